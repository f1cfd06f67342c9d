//! Collectives between ranks of different processes: gather, broadcast, agreement, all-reduce.
//!
//! For reports and sums, not for rows of attention: gather and broadcast go through one rank, the
//! root. They are built from exchanges, so they have the deadlines, checks and errors of any
//! transport.

use encke_core::transport::{Address, Incoming, Outgoing, Transport, TransportError};

/// The collectives of some ranks. Every member calls the same functions in the same order.
pub struct Collectives<'a, T> {
    transport: &'a mut T,
    rank: usize,
    /// The participating ranks, in ascending order; the first is the root.
    members: &'a [usize],
    round: usize,
}

/// A rank's refusal in [`Collectives::agree`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The first rank that refused.
    pub rank: usize,
    /// Why.
    pub reason: String,
}

impl<'a, T: Transport<Vec<u8>>> Collectives<'a, T> {
    /// Collectives of `members`, which include this rank.
    pub fn new(transport: &'a mut T, rank: usize, members: &'a [usize]) -> Collectives<'a, T> {
        Collectives {
            transport,
            rank,
            members,
            round: 0,
        }
    }

    fn root(&self) -> usize {
        self.members[0]
    }

    /// Receives one message from each of `from`, and sends the same one to each of `to`.
    fn exchange(
        &mut self,
        from: &[(usize, usize)],
        to: &[usize],
        sent: &Vec<u8>,
    ) -> Result<Vec<Vec<u8>>, TransportError> {
        let to: Vec<(usize, &Vec<u8>)> = to.iter().map(|&peer| (peer, sent)).collect();
        self.exchange_each(from, &to)
    }

    /// The same with a different message for each of `to`.
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

    /// All members' bytes, in the order of the members, at the root; `None` at the others.
    pub fn gather(&mut self, own: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, TransportError> {
        let length = (own.len() as u64).to_le_bytes().to_vec();
        if self.rank != self.root() {
            let root = [self.root()];
            self.exchange(&[], &root, &length)?;
            self.exchange(&[], &root, &own)?;
            return Ok(None);
        }
        let others: Vec<(usize, usize)> = self.members[1..].iter().map(|&r| (r, 8)).collect();
        let lengths = self.exchange(&others, &[], &Vec::new())?;
        let others = others.iter().zip(&lengths);
        let others: Vec<(usize, usize)> = others.map(|(end, l)| (end.0, decode_len(l))).collect();
        let mut all = vec![own];
        all.extend(self.exchange(&others, &[], &Vec::new())?);
        Ok(Some(all))
    }

    /// The root's bytes, at every member.
    pub fn broadcast(&mut self, own: Vec<u8>) -> Result<Vec<u8>, TransportError> {
        if self.rank == self.root() {
            let others = self.members[1..].to_vec();
            let length = (own.len() as u64).to_le_bytes().to_vec();
            self.exchange(&[], &others, &length)?;
            self.exchange(&[], &others, &own)?;
            return Ok(own);
        }
        let root = self.root();
        let got = self.exchange(&[(root, 8)], &[], &Vec::new())?;
        let got = self.exchange(&[(root, decode_len(&got[0]))], &[], &Vec::new())?;
        Ok(got.into_iter().next().unwrap_or_default())
    }

    /// Ok if every member's result is; otherwise the first refusal, the same one at every member.
    pub fn agree(
        &mut self,
        own: Result<(), String>,
    ) -> Result<Result<(), Refusal>, TransportError> {
        // An empty message stands for Ok.
        let reason = own.err().map_or(Vec::new(), |reason| {
            let reason = if reason.is_empty() { "no" } else { &reason };
            reason.as_bytes().to_vec()
        });
        let reasons = self.gather(reason)?.unwrap_or_default();
        let mut reasons = self.members.iter().zip(reasons);
        let refused = reasons.find(|(_, reason)| !reason.is_empty());
        let refused = refused.map_or(Vec::new(), |(&rank, reason)| {
            let mut bytes = (rank as u64).to_le_bytes().to_vec();
            bytes.extend(reason);
            bytes
        });
        let answer = self.broadcast(refused)?;
        Ok(match answer.split_at_checked(8) {
            Some((rank, reason)) => Err(Refusal {
                rank: decode_len(rank),
                reason: String::from_utf8_lossy(reason).into_owned(),
            }),
            None => Ok(()),
        })
    }

    /// All-reduce: the element-wise sums over all members, at every member. Each member sums a part
    /// of the elements, in the order of the members, so the bits are the same at every member and
    /// in every run, and all members move and hold the same number of bytes.
    pub fn sum(&mut self, own: &[f32]) -> Result<Vec<f32>, TransportError> {
        self.sum_terms(own, &vec![1; self.members.len()])
    }

    /// The same where member i has `counts[i]` terms, one after the other in `own`: the sum is in
    /// the order of the members and of their terms, so it does not depend on which of them has
    /// which, as long as the order stays. Every member has a term.
    pub fn sum_terms(&mut self, own: &[f32], counts: &[usize]) -> Result<Vec<f32>, TransportError> {
        let members = self.members.len();
        let at = self.members.iter().position(|&member| member == self.rank);
        let at = at.unwrap_or(0);
        let length = own.len() / counts[at].max(1);
        let part = |at: usize| length * at / members..length * (at + 1) / members;
        let mine = part(at);
        let terms_of = |to: usize| -> Vec<u8> {
            let terms = own.chunks(length.max(1));
            terms.flat_map(|term| bytes(&term[part(to)])).collect()
        };
        let parts: Vec<Vec<u8>> = (0..members).map(terms_of).collect();
        let others: Vec<(usize, usize)> = (0..members)
            .map(|at| (self.members[at], at))
            .filter(|(rank, _)| *rank != self.rank)
            .collect();

        let arriving = |&(rank, at): &(usize, usize)| (rank, 4 * mine.len() * counts[at]);
        let from: Vec<(usize, usize)> = others.iter().map(arriving).collect();
        let to: Vec<_> = others.iter().map(|end| (end.0, &parts[end.1])).collect();
        let mut arrived = self.exchange_each(&from, &to)?.into_iter();
        let mut sums = vec![0.0; mine.len()];
        for &member in self.members {
            let terms = match member == self.rank {
                true => elements(&parts[at]),
                false => elements(&arrived.next().unwrap_or_default()),
            };
            for term in terms.chunks(mine.len().max(1)) {
                sums.iter_mut().zip(term).for_each(|(sum, x)| *sum += x);
            }
        }

        let from = others.iter().map(|end| (end.0, 4 * part(end.1).len()));
        let from: Vec<(usize, usize)> = from.collect();
        let to: Vec<usize> = others.iter().map(|end| end.0).collect();
        let arrived = self.exchange(&from, &to, &bytes(&sums))?;
        let mut whole = vec![0.0; length];
        whole[mine].copy_from_slice(&sums);
        for (end, bytes) in others.iter().zip(&arrived) {
            whole[part(end.1)].copy_from_slice(&elements(bytes));
        }
        Ok(whole)
    }
}

fn bytes(elements: &[f32]) -> Vec<u8> {
    elements.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn elements(bytes: &[u8]) -> Vec<f32> {
    let element = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    bytes.chunks_exact(4).map(element).collect()
}

fn decode_len(bytes: &[u8]) -> usize {
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
    fn on_members<R: Send>(
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
    fn gather_collects_all_members_and_broadcast_reaches_all() {
        for members in [&[0][..], &[0, 1], &[0, 1, 2, 3, 4], &[1, 4, 5]] {
            let received = on_members(members, |rank, members| {
                let own = vec![rank as u8; rank * 7];
                let all = members.gather(own).unwrap();
                let sum = all.map(|all| all.concat()).unwrap_or_default();
                members.broadcast(sum).unwrap()
            });
            let expected: Vec<u8> = members.iter().flat_map(|&r| vec![r as u8; r * 7]).collect();
            assert!(
                received.iter().all(|bytes| *bytes == expected),
                "{members:?}"
            );
        }
    }

    #[test]
    fn sums_are_in_member_order_and_equal_on_every_member() {
        // Terms whose sum depends on the order; also fewer elements than members.
        let term =
            |rank: usize, at: usize| ((rank * 31 + at) as f32).sin() * 10f32.powi(at as i32 % 7);
        for members in [&[0][..], &[0, 1], &[0, 1, 2, 3, 4], &[1, 4, 5]] {
            for count in [0, 1, 3, 50] {
                let sums = on_members(members, |rank, members| {
                    let own: Vec<f32> = (0..count).map(|at| term(rank, at)).collect();
                    members.sum(&own).unwrap()
                });
                let sum = |at| members.iter().fold(0.0, |sum, &rank| sum + term(rank, at));
                let expected: Vec<f32> = (0..count).map(sum).collect();
                assert!(sums.iter().all(|sum| *sum == expected), "{members:?}");
            }
        }
    }

    #[test]
    fn a_sum_does_not_depend_on_which_member_has_which_term() {
        let term = |number: usize| -> Vec<f32> {
            let value = |at: usize| ((number * 37 + at) as f32).sin() * 10f32.powi(at as i32 % 7);
            (0..50).map(value).collect()
        };
        let alone = (0..6).fold(vec![0.0; 50], |sum, number| {
            let both = sum.iter().zip(term(number));
            both.map(|(sum, x)| sum + x).collect::<Vec<f32>>()
        });
        for counts in [&[6][..], &[1, 5], &[2, 1, 3], &[1, 1, 1, 1, 1, 1]] {
            let members: Vec<usize> = (0..counts.len()).collect();
            let sums = on_members(&members, |rank, members| {
                let first: usize = counts[..rank].iter().sum();
                let own = (first..first + counts[rank]).flat_map(term);
                members
                    .sum_terms(&own.collect::<Vec<f32>>(), counts)
                    .unwrap()
            });
            assert!(sums.iter().all(|sum| *sum == alone), "{counts:?}");
        }
    }

    #[test]
    fn a_sum_of_different_lengths_is_an_error() {
        let ended = on_members(&[0, 1], |rank, members| {
            members.sum(&vec![1.0; 4 + 2 * rank])
        });
        assert!(ended.iter().all(Result::is_err), "{ended:?}");
    }

    #[test]
    fn a_refusal_of_one_member_is_returned_at_all() {
        let members = [0, 1, 2, 3];
        let agreed = on_members(&members, |_, members| members.agree(Ok(())).unwrap());
        assert!(agreed.iter().all(Result::is_ok));
        let refused = on_members(&members, |rank, members| {
            let own = match rank {
                2 => Err("no file".to_string()),
                3 => Err(String::new()),
                _ => Ok(()),
            };
            members.agree(own).unwrap()
        });
        let refusal = Refusal {
            rank: 2,
            reason: "no file".to_string(),
        };
        assert!(refused.iter().all(|answer| *answer == Err(refusal.clone())));
    }
}
