//! The transport suite.
//!
//! This crate starts no threads, so the caller runs the ranks: each of them, in its own thread or
//! process, calls [`transport`] with its own endpoint, and all must return Ok.

use super::failure::Failure;
use super::random::Random;
use crate::transport::{Address, Incoming, Moved, Outgoing, Transport};

/// Byte `i` of the parcel of rank `owner` in scenario `scenario`.
fn content(scenario: usize, owner: usize, i: usize) -> u8 {
    let mixed = (scenario * 131 + owner * 31 + i * 7 + (i >> 8) * 13) as u8;
    mixed ^ 0xa5
}

fn parcel(scenario: usize, owner: usize, elements: usize, room: usize) -> Vec<u8> {
    let byte = |i: usize| match i < elements {
        true => content(scenario, owner, i),
        false => 0xee,
    };
    (0..room).map(byte).collect()
}

/// One rank of the suite.
struct SuiteRank<'a, T> {
    rank: usize,
    ranks: usize,
    transport: &'a mut T,
    round: usize,
    random: Random,
}

/// A message to send or to receive: the other rank, the tag, the size and the buffer.
struct MessageEnd<P> {
    peer: usize,
    tag: u64,
    elements: usize,
    parcel: P,
}

/// Runs the suite on one rank; all ranks of `0..ranks` must run it concurrently.
pub fn transport<T: Transport<Vec<u8>>>(
    rank: usize,
    ranks: usize,
    transport: &mut T,
) -> Result<(), Failure> {
    let mut suite = SuiteRank {
        rank,
        ranks,
        transport,
        round: 0,
        random: Random::new(rank as u64 + 1),
    };
    suite.alone()?;
    if ranks == 1 {
        return Ok(());
    }
    suite.rotation()?;
    suite.reuse()?;
    suite.two_tags()?;
    suite.line()
}

impl<T: Transport<Vec<u8>>> SuiteRank<'_, T> {
    /// An exchange, with the checks that do not depend on the scenario.
    fn exchange(
        &mut self,
        name: &str,
        sends: &[MessageEnd<&Vec<u8>>],
        receives: &mut [MessageEnd<&mut Vec<u8>>],
    ) -> Result<(), Failure> {
        let before: Vec<Vec<u8>> = sends.iter().map(|end| end.parcel.clone()).collect();
        let outgoing: Vec<Outgoing<'_, Vec<u8>>> = sends
            .iter()
            .map(|end| Outgoing {
                to: address(end),
                parcel: end.parcel,
            })
            .collect();
        let expected = Moved {
            sent_bytes: sends.iter().map(|end| end.elements).sum(),
            received_bytes: receives.iter().map(|end| end.elements).sum(),
        };
        let mut incoming: Vec<Incoming<'_, Vec<u8>>> = receives
            .iter_mut()
            .map(|end| Incoming {
                from: address(end),
                parcel: &mut *end.parcel,
            })
            .collect();
        let mut computed = 0;
        let mut readable = true;
        // Random work, so that each rank is sometimes ahead and sometimes behind.
        let spins = self.random.below(20_000);
        let mut meanwhile = || {
            computed += 1;
            readable &= (0..spins).fold(1u64, |x, i| x.wrapping_mul(i as u64 | 1)) != 0;
            let sent = outgoing.iter().zip(&before);
            readable &= sent.fold(true, |ok, (out, was)| ok && out.parcel == was);
        };
        let round = self.round;
        self.round += 1;
        let moved = self
            .transport
            .exchange(round, &outgoing, &mut incoming, &mut meanwhile)
            .map_err(|error| self.failure(name, &error.to_string()))?;
        self.expect(name, computed == 1, "`meanwhile` must run exactly once")?;
        self.expect(
            name,
            readable,
            "a sent buffer must stay readable and unchanged",
        )?;
        let counted = format!("counted {moved:?}, actual {expected:?}");
        self.expect(name, moved == expected, &counted)
    }

    fn failure(&self, name: &str, what: &str) -> Failure {
        Failure {
            message: format!("{name}: rank {} of {}: {what}", self.rank, self.ranks),
        }
    }

    fn expect(&self, name: &str, holds: bool, what: &str) -> Result<(), Failure> {
        match holds {
            true => Ok(()),
            false => Err(self.failure(name, what)),
        }
    }

    fn check(&self, name: &str, got: &[u8], expected: &[u8]) -> Result<(), Failure> {
        let wrong = got.iter().zip(expected).position(|(a, b)| a != b);
        let what = format!("byte {wrong:?} of a parcel is wrong");
        self.expect(name, wrong.is_none() && got.len() == expected.len(), &what)
    }

    fn next(&self) -> usize {
        (self.rank + 1) % self.ranks
    }

    fn previous(&self) -> usize {
        (self.rank + self.ranks - 1) % self.ranks
    }

    /// No messages: `meanwhile` must run all the same.
    fn alone(&mut self) -> Result<(), Failure> {
        self.exchange("no hops", &[], &mut [])
    }

    /// Parcels of different sizes rotate through all ranks, in two alternating buffers; bytes after
    /// a shorter parcel must not change.
    fn rotation(&mut self) -> Result<(), Failure> {
        let name = "rotation";
        for scenario in 0..5 {
            let size = |owner: usize| 1 + (owner * 977 + scenario * 4099) % 9001;
            let most = (0..self.ranks).map(size).max().unwrap_or(1);
            let mut current = parcel(scenario, self.rank, size(self.rank), most);
            let mut incoming = vec![0xcc; most];
            for distance in 1..self.ranks {
                let back = |d: usize| (self.rank + self.ranks - d) % self.ranks;
                let (held, coming) = (back(distance - 1), back(distance));
                let untouched = incoming.clone();
                let (next, previous) = (self.next(), self.previous());
                self.exchange(
                    name,
                    &[end(next, 5, size(held), &current)],
                    &mut [end(previous, 5, size(coming), &mut incoming)],
                )?;
                let mut expected = parcel(scenario, coming, size(coming), most);
                expected[size(coming)..].copy_from_slice(&untouched[size(coming)..]);
                self.check(name, &incoming, &expected)?;
                std::mem::swap(&mut current, &mut incoming);
            }
        }
        Ok(())
    }

    /// A buffer may be overwritten as soon as the exchange returns.
    fn reuse(&mut self) -> Result<(), Failure> {
        let name = "reuse";
        let mut send = vec![0; 4096];
        let mut receive = vec![0; 4096];
        for scenario in 10..30 {
            send.copy_from_slice(&parcel(scenario, self.rank, 4096, 4096));
            let (next, previous) = (self.next(), self.previous());
            self.exchange(
                name,
                &[end(next, 9, 4096, &send)],
                &mut [end(previous, 9, 4096, &mut receive)],
            )?;
            send.fill(0xdd);
            self.check(name, &receive, &parcel(scenario, previous, 4096, 4096))?;
        }
        Ok(())
    }

    /// k and v at once, posted in different orders at the two ends.
    fn two_tags(&mut self) -> Result<(), Failure> {
        let name = "two tags";
        for scenario in 40..50 {
            let [k, v] = [0, 100].map(|kind| parcel(scenario + kind, self.rank, 300, 300));
            let (mut to_k, mut to_v) = (vec![0; 300], vec![0; 300]);
            let (next, previous) = (self.next(), self.previous());
            let sends = [end(next, 1, 300, &k), end(next, 2, 300, &v)];
            let mut receives = [
                end(previous, 2, 300, &mut to_v),
                end(previous, 1, 300, &mut to_k),
            ];
            self.exchange(name, &sends, &mut receives)?;
            self.check(name, &to_k, &parcel(scenario, previous, 300, 300))?;
            self.check(name, &to_v, &parcel(scenario + 100, previous, 300, 300))?;
        }
        Ok(())
    }

    /// Messages in one direction only: the first rank never receives, the last never sends, and
    /// messages stay in order.
    fn line(&mut self) -> Result<(), Failure> {
        let name = "line";
        let mut receive = vec![0; 64];
        for scenario in 60..80 {
            let send = parcel(scenario, self.rank, 64, 64);
            let mut sends = Vec::new();
            if self.rank + 1 < self.ranks {
                sends.push(end(self.rank + 1, 3, 64, &send));
            }
            let mut receives = Vec::new();
            if self.rank > 0 {
                receives.push(end(self.rank - 1, 3, 64, &mut receive));
            }
            self.exchange(name, &sends, &mut receives)?;
            if self.rank > 0 {
                self.check(name, &receive, &parcel(scenario, self.rank - 1, 64, 64))?;
            }
        }
        Ok(())
    }
}

fn end<P>(peer: usize, tag: u64, elements: usize, parcel: P) -> MessageEnd<P> {
    MessageEnd {
        peer,
        tag,
        elements,
        parcel,
    }
}

fn address<P>(end: &MessageEnd<P>) -> Address {
    Address {
        peer: end.peer,
        tag: end.tag,
        elements: end.elements,
    }
}
