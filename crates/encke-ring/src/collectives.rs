//! What ranks of different processes have to say to one another beside their rows: who is ready, who
//! failed, what each of them did.
//!
//! Not for rows: words pass through one rank, the chair, and of numbers there are only sums. It is
//! built from exchanges, so that it has their deadlines, their checks and their errors, over any
//! transport.

use encke_core::transport::{Address, Incoming, Outgoing, Transport, TransportError};

/// Ranks that talk about a call. Each calls the same functions in the same order.
pub struct Collectives<'a, T> {
    transport: &'a mut T,
    rank: usize,
    /// Who is there, rising; the first is the chair.
    members: &'a [usize],
    round: usize,
}

/// What a rank said no to, and which.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The first rank that said no.
    pub rank: usize,
    /// Why.
    pub reason: String,
}

impl<'a, T: Transport<Vec<u8>>> Collectives<'a, T> {
    /// A meeting of `members`, this rank among them.
    pub fn new(transport: &'a mut T, rank: usize, members: &'a [usize]) -> Collectives<'a, T> {
        Collectives {
            transport,
            rank,
            members,
            round: 0,
        }
    }

    fn chair(&self) -> usize {
        self.members[0]
    }

    /// Moves one message from each of `from` to here, and the same one from here to each of `to`.
    fn exchange(
        &mut self,
        from: &[(usize, usize)],
        to: &[usize],
        sent: &Vec<u8>,
    ) -> Result<Vec<Vec<u8>>, TransportError> {
        let to: Vec<(usize, &Vec<u8>)> = to.iter().map(|&peer| (peer, sent)).collect();
        self.exchange_each(from, &to)
    }

    /// The same with a message of its own for each of `to`.
    fn exchange_each(
        &mut self,
        from: &[(usize, usize)],
        to: &[(usize, &Vec<u8>)],
    ) -> Result<Vec<Vec<u8>>, TransportError> {
        let mut received: Vec<Vec<u8>> = from.iter().map(|(_, bytes)| vec![0; *bytes]).collect();
        let address = |peer: usize, elements: usize| Address {
            peer,
            tag: 0,
            elements,
        };
        let sends = to.iter().map(|&(peer, sent)| Outgoing {
            to: address(peer, sent.len()),
            parcel: sent,
        });
        let sends: Vec<Outgoing<'_, Vec<u8>>> = sends.collect();
        let receives = from
            .iter()
            .zip(&mut received)
            .map(|(end, parcel)| Incoming {
                from: address(end.0, end.1),
                parcel,
            });
        let mut receives: Vec<Incoming<'_, Vec<u8>>> = receives.collect();
        let round = self.round;
        self.round += 1;
        let exchanged = self
            .transport
            .exchange(round, &sends, &mut receives, &mut || {});
        exchanged.map(|_| received)
    }

    /// Everyone's bytes, in the order of the members, at the chair; nothing at the others.
    pub fn gather(&mut self, own: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, TransportError> {
        let length = (own.len() as u64).to_le_bytes().to_vec();
        if self.rank != self.chair() {
            let chair = [self.chair()];
            self.exchange(&[], &chair, &length)?;
            self.exchange(&[], &chair, &own)?;
            return Ok(None);
        }
        let others: Vec<(usize, usize)> = self.members[1..].iter().map(|&r| (r, 8)).collect();
        let lengths = self.exchange(&others, &[], &Vec::new())?;
        let others = others.iter().zip(&lengths);
        let others: Vec<(usize, usize)> = others.map(|(end, l)| (end.0, number(l))).collect();
        let mut all = vec![own];
        all.extend(self.exchange(&others, &[], &Vec::new())?);
        Ok(Some(all))
    }

    /// The chair's bytes, at everyone.
    pub fn broadcast(&mut self, own: Vec<u8>) -> Result<Vec<u8>, TransportError> {
        if self.rank == self.chair() {
            let others = self.members[1..].to_vec();
            let length = (own.len() as u64).to_le_bytes().to_vec();
            self.exchange(&[], &others, &length)?;
            self.exchange(&[], &others, &own)?;
            return Ok(own);
        }
        let chair = self.chair();
        let length = self.exchange(&[(chair, 8)], &[], &Vec::new())?;
        let got = self.exchange(&[(chair, number(&length[0]))], &[], &Vec::new())?;
        Ok(got.into_iter().next().unwrap_or_default())
    }

    /// Whether everyone says yes; the same answer at everyone.
    pub fn agree(
        &mut self,
        own: Result<(), String>,
    ) -> Result<Result<(), Refusal>, TransportError> {
        let word = own.err().map_or(Vec::new(), |reason| {
            let reason = if reason.is_empty() { "no" } else { &reason };
            reason.as_bytes().to_vec()
        });
        let said = self.gather(word)?.unwrap_or_default();
        let no = self
            .members
            .iter()
            .zip(said)
            .find(|(_, word)| !word.is_empty());
        let no = no.map_or(Vec::new(), |(&rank, word)| {
            let mut bytes = (rank as u64).to_le_bytes().to_vec();
            bytes.extend(word);
            bytes
        });
        let answer = self.broadcast(no)?;
        Ok(match answer.split_at_checked(8) {
            Some((rank, reason)) => Err(Refusal {
                rank: number(rank),
                reason: String::from_utf8_lossy(reason).into_owned(),
            }),
            None => Ok(()),
        })
    }

    /// The sums of everyone's numbers, of which all have as many, at everyone. Each member sums a part
    /// of them, in the order of the members: the same bits at everyone and in every run, and nobody
    /// moves or holds more than another.
    pub fn sum(&mut self, own: &[f32]) -> Result<Vec<f32>, TransportError> {
        let members = self.members.len();
        let part = |at: usize| own.len() * at / members..own.len() * (at + 1) / members;
        let at = self.members.iter().position(|&member| member == self.rank);
        let mine = part(at.unwrap_or(0));
        let parts: Vec<Vec<u8>> = (0..members).map(|to| bytes(&own[part(to)])).collect();
        let others: Vec<(usize, usize)> = (0..members)
            .map(|at| (self.members[at], at))
            .filter(|(rank, _)| *rank != self.rank)
            .collect();

        let from: Vec<(usize, usize)> = others.iter().map(|end| (end.0, 4 * mine.len())).collect();
        let to: Vec<_> = others.iter().map(|end| (end.0, &parts[end.1])).collect();
        let mut arrived = self.exchange_each(&from, &to)?.into_iter();
        let mut sums = vec![0.0; mine.len()];
        for &member in self.members {
            let terms = match member == self.rank {
                true => own[mine.clone()].to_vec(),
                false => numbers(&arrived.next().unwrap_or_default()),
            };
            sums.iter_mut().zip(terms).for_each(|(sum, x)| *sum += x);
        }

        let from = others.iter().map(|end| (end.0, 4 * part(end.1).len()));
        let from: Vec<(usize, usize)> = from.collect();
        let to: Vec<usize> = others.iter().map(|end| end.0).collect();
        let arrived = self.exchange(&from, &to, &bytes(&sums))?;
        let mut whole = vec![0.0; own.len()];
        whole[mine].copy_from_slice(&sums);
        for (end, bytes) in others.iter().zip(&arrived) {
            whole[part(end.1)].copy_from_slice(&numbers(bytes));
        }
        Ok(whole)
    }
}

fn bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn numbers(bytes: &[u8]) -> Vec<f32> {
    let number = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    bytes.chunks_exact(4).map(number).collect()
}

fn number(bytes: &[u8]) -> usize {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[..8]);
    usize::try_from(u64::from_le_bytes(word)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads::endpoints;
    use std::time::Duration;

    /// Runs `work` as each of the members, on threads of a larger ring.
    fn meet<R: Send>(
        members: &[usize],
        work: impl Fn(usize, &mut Collectives<'_, crate::threads::Endpoint<Vec<u8>>>) -> R + Sync,
    ) -> Vec<R> {
        let ranks = members.last().map_or(0, |last| last + 1);
        let endpoints = endpoints(ranks, Duration::from_secs(60));
        std::thread::scope(|scope| {
            let there = endpoints.into_iter().enumerate();
            let there = there.filter(|(rank, _)| members.contains(rank));
            let work = &work;
            let threads = there.map(|(rank, mut endpoint)| {
                scope.spawn(move || work(rank, &mut Collectives::new(&mut endpoint, rank, members)))
            });
            let threads: Vec<_> = threads.collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    #[test]
    fn everyone_is_heard_and_the_chair_is_heard_by_everyone() {
        for members in [&[0][..], &[0, 1], &[0, 1, 2, 3, 4], &[1, 4, 5]] {
            let said = meet(members, |rank, meeting| {
                let own = vec![rank as u8; rank * 7];
                let all = meeting.gather(own).unwrap();
                let sum = all.map(|all| all.concat()).unwrap_or_default();
                meeting.broadcast(sum).unwrap()
            });
            let expected: Vec<u8> = members.iter().flat_map(|&r| vec![r as u8; r * 7]).collect();
            assert!(said.iter().all(|heard| *heard == expected), "{members:?}");
        }
    }

    #[test]
    fn sums_are_those_in_the_order_of_the_members_at_everyone() {
        // Numbers whose sum depends on the order; fewer of them than members, too.
        let term =
            |rank: usize, at: usize| ((rank * 31 + at) as f32).sin() * 10f32.powi(at as i32 % 7);
        for members in [&[0][..], &[0, 1], &[0, 1, 2, 3, 4], &[1, 4, 5]] {
            for count in [0, 1, 3, 50] {
                let sums = meet(members, |rank, meeting| {
                    let own: Vec<f32> = (0..count).map(|at| term(rank, at)).collect();
                    meeting.sum(&own).unwrap()
                });
                let sum = |at| members.iter().fold(0.0, |sum, &rank| sum + term(rank, at));
                let expected: Vec<f32> = (0..count).map(sum).collect();
                assert!(sums.iter().all(|sum| *sum == expected), "{members:?}");
            }
        }
    }

    #[test]
    fn a_sum_of_different_lengths_is_an_error() {
        let ended = meet(&[0, 1], |rank, meeting| {
            meeting.sum(&vec![1.0; 4 + 2 * rank])
        });
        assert!(ended.iter().all(Result::is_err), "{ended:?}");
    }

    #[test]
    fn one_no_is_everyones() {
        let members = [0, 1, 2, 3];
        let agreed = meet(&members, |_, meeting| meeting.agree(Ok(())).unwrap());
        assert!(agreed.iter().all(Result::is_ok));
        let refused = meet(&members, |rank, meeting| {
            let own = match rank {
                2 => Err("no file".to_string()),
                3 => Err(String::new()),
                _ => Ok(()),
            };
            meeting.agree(own).unwrap()
        });
        let refusal = Refusal {
            rank: 2,
            reason: "no file".to_string(),
        };
        assert!(refused.iter().all(|answer| *answer == Err(refusal.clone())));
    }
}
