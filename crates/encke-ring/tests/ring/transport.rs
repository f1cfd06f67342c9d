//! The thread transport under the conformance suite, and faulty transports that the suite must
//! catch.

use std::time::Duration;

use encke_core::conformance::{self, Failure};
use encke_core::transport::{Address, Incoming, Moved, Outgoing, Transport, TransportError};
use encke_ring::threads::{Endpoint, endpoints};

/// Runs each rank's part of the suite on a thread of its own.
fn suite<T: Transport<Vec<u8>> + Send>(transports: Vec<T>) -> Result<(), Failure> {
    let ranks = transports.len();
    std::thread::scope(|scope| {
        let part = |(rank, mut transport): (usize, T)| {
            scope.spawn(move || conformance::transport(rank, ranks, &mut transport))
        };
        let threads: Vec<_> = transports.into_iter().enumerate().map(part).collect();
        let joined = threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic"));
        let results: Vec<Result<(), Failure>> = joined.collect();
        results.into_iter().collect()
    })
}

#[test]
fn the_thread_transport_passes_the_conformance_suite() {
    for ranks in 1..=8 {
        suite(endpoints(ranks, Duration::from_secs(60))).expect("the thread transport conforms");
    }
}

/// Waits for a parcel from the next rank, and returns the error.
fn wait_for_next(rank: usize, mut end: Endpoint<Vec<u8>>) -> TransportError {
    let from = Address {
        peer: rank + 1,
        tag: 0,
        elements: 4,
    };
    let mut parcel = vec![0u8; 4];
    let mut incoming = [Incoming {
        from,
        parcel: &mut parcel,
    }];
    let moved = end.exchange(0, &[], &mut incoming, &mut || {});
    moved.expect_err("no rank sends")
}

/// Rank 0 waits for 1, later 1 for 2, then 2 for 3, which never posts: the deadline of 0 expires
/// first.
#[test]
fn a_deadline_blames_the_end_of_the_chain_of_waiting_ranks() {
    let mut ends = endpoints::<Vec<u8>>(4, Duration::from_secs(1));
    let absent = ends.pop();
    std::thread::scope(|scope| {
        let wait = |(rank, end)| {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(100) * rank as u32);
                wait_for_next(rank, end)
            })
        };
        let threads: Vec<_> = ends.into_iter().enumerate().map(wait).collect();
        for (rank, thread) in threads.into_iter().enumerate() {
            match thread.join().expect("no panic") {
                TransportError::Deadline { peer, .. } => assert_eq!(peer, 3, "rank {rank}"),
                error => panic!("a deadline, not {error}"),
            }
        }
    });
    drop(absent);
}

/// Faults that real rings have had.
#[derive(Debug, Clone, Copy, PartialEq)]
enum TransportFault {
    /// Receives into the buffer it is sending.
    SharedBuffer,
    /// Sends its first message again and again.
    NeverUpdated,
    /// Sends k where v belongs.
    OneBufferForKAndV,
    /// Truncates a message.
    Short,
    /// Writes past the end of a message.
    Long,
    /// Does not compute while it waits.
    NoCompute,
    /// Computes twice.
    ComputesTwice,
    /// Sends parcels in the wrong direction.
    WrongWay,
    /// Reports bytes that it did not move.
    Miscounts,
}

const FAULTS: [TransportFault; 9] = [
    TransportFault::SharedBuffer,
    TransportFault::NeverUpdated,
    TransportFault::OneBufferForKAndV,
    TransportFault::Short,
    TransportFault::Long,
    TransportFault::NoCompute,
    TransportFault::ComputesTwice,
    TransportFault::WrongWay,
    TransportFault::Miscounts,
];

struct FaultyTransport {
    inner: Endpoint<Vec<u8>>,
    fault: TransportFault,
    ranks: usize,
    first: Option<Vec<u8>>,
}

impl FaultyTransport {
    /// The messages it sends instead.
    fn altered(&mut self, outgoing: &[Outgoing<'_, Vec<u8>>]) -> Vec<Vec<u8>> {
        let mut parcels: Vec<Vec<u8>> = outgoing.iter().map(|out| out.parcel.clone()).collect();
        match self.fault {
            TransportFault::SharedBuffer => parcels.iter_mut().for_each(|parcel| parcel.fill(0xcc)),
            TransportFault::NeverUpdated => {
                for parcel in &mut parcels {
                    let first = self.first.get_or_insert_with(|| parcel.clone());
                    let common = first.len().min(parcel.len());
                    parcel[..common].copy_from_slice(&first[..common]);
                }
            }
            TransportFault::OneBufferForKAndV => {
                if let [k, v] = &mut parcels[..] {
                    v.copy_from_slice(k);
                }
            }
            TransportFault::Short => {
                for (parcel, out) in parcels.iter_mut().zip(outgoing) {
                    parcel[out.to.elements - 1] = 0;
                }
            }
            _ => {}
        }
        parcels
    }
}

impl Transport<Vec<u8>> for FaultyTransport {
    fn exchange(
        &mut self,
        round: usize,
        outgoing: &[Outgoing<'_, Vec<u8>>],
        incoming: &mut [Incoming<'_, Vec<u8>>],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Moved, TransportError> {
        let parcels = self.altered(outgoing);
        let altered: Vec<Outgoing<'_, Vec<u8>>> = outgoing
            .iter()
            .zip(&parcels)
            .map(|(out, parcel)| {
                let mut to = out.to;
                if self.fault == TransportFault::WrongWay && self.ranks > 2 {
                    to.peer = (to.peer + self.ranks - 2) % self.ranks;
                }
                Outgoing { to, parcel }
            })
            .collect();
        let times = match self.fault {
            TransportFault::NoCompute => 0,
            TransportFault::ComputesTwice => 2,
            _ => 1,
        };
        let mut work = || (0..times).for_each(|_| meanwhile());
        let moved = self.inner.exchange(round, &altered, incoming, &mut work)?;
        if self.fault == TransportFault::Long {
            for Incoming { from, parcel } in incoming.iter_mut() {
                if let Some(byte) = parcel.get_mut(from.elements) {
                    *byte ^= 1;
                }
            }
        }
        let extra = usize::from(self.fault == TransportFault::Miscounts && !outgoing.is_empty());
        Ok(Moved {
            sent_bytes: moved.sent_bytes + extra,
            ..moved
        })
    }
}

#[test]
fn the_suite_catches_faulty_transports() {
    for fault in FAULTS {
        let ranks = 4;
        let mutants = endpoints(ranks, Duration::from_millis(300));
        let mutants = mutants.into_iter().map(|inner| FaultyTransport {
            inner,
            fault,
            ranks,
            first: None,
        });
        let verdict = suite(mutants.collect());
        assert!(verdict.is_err(), "{fault:?} went unnoticed");
    }
}
