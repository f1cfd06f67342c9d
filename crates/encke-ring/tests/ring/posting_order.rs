//! The thread transport computes before it posts receives if work is only enqueued, otherwise
//! after.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use encke_core::transport::{Address, Incoming, Outgoing, Transport, WireBuffer};
use encke_ring::threads::{Endpoint, endpoints};

/// A byte that logs what is done with it.
#[derive(Clone)]
struct LoggedByte {
    byte: u8,
    enqueued: bool,
    log: Arc<Mutex<Vec<String>>>,
}

impl LoggedByte {
    fn new(byte: u8, enqueued: bool) -> LoggedByte {
        LoggedByte {
            byte,
            enqueued,
            log: Arc::default(),
        }
    }

    fn record(&self, what: String) {
        self.log.lock().unwrap().push(what);
    }
}

impl WireBuffer for LoggedByte {
    fn elements(&self) -> usize {
        1
    }

    fn element_bytes(&self) -> usize {
        1
    }

    fn copy_from(&mut self, source: &LoggedByte, _: usize) {
        self.byte = source.byte;
    }

    fn allocated_bytes(&self) -> usize {
        1
    }

    fn take(&mut self) -> LoggedByte {
        self.record("posted".into());
        self.clone()
    }

    fn is_enqueued(&self) -> bool {
        self.enqueued
    }

    fn vacate(&mut self, round: usize) {
        self.record(format!("vacated in round {round}"));
    }

    fn checksum(&self, _: usize) -> u64 {
        self.byte.into()
    }
}

/// What a rank logs of a message to the other rank and one back, in round 3.
fn log(mut endpoint: Endpoint<LoggedByte>, peer: usize, enqueued: bool) -> Vec<String> {
    let sent = LoggedByte::new(1 - peer as u8, enqueued);
    let mut received = LoggedByte::new(7, enqueued);
    let log = Arc::clone(&received.log);
    let address = Address {
        peer,
        tag: 0,
        elements: 1,
    };
    let mut meanwhile = || log.lock().unwrap().push("computed".into());
    let outgoing = [Outgoing {
        to: address,
        parcel: &sent,
    }];
    let mut incoming = [Incoming {
        from: address,
        parcel: &mut received,
    }];
    let moved = endpoint.exchange(3, &outgoing, &mut incoming, &mut meanwhile);
    moved.expect("a message");
    assert_eq!(received.byte, peer as u8);
    log.lock().unwrap().clone()
}

#[test]
fn enqueued_work_is_launched_before_receives_are_posted() {
    for (enqueued, expected) in [
        (true, ["computed", "vacated in round 3", "posted"]),
        (false, ["vacated in round 3", "posted", "computed"]),
    ] {
        let ends = endpoints::<LoggedByte>(2, Duration::from_secs(20));
        std::thread::scope(|scope| {
            for (rank, end) in ends.into_iter().enumerate() {
                scope.spawn(move || assert_eq!(log(end, 1 - rank, enqueued), expected));
            }
        });
    }
}
