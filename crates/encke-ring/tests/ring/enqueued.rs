//! What is only enqueued is asked for before a parcel is posted; what is done at once, after.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use encke_core::transport::{Address, Incoming, Outgoing, Transport, WireBuffer};
use encke_ring::threads::{Endpoint, endpoints};

/// A byte that notes what is done with it.
#[derive(Clone)]
struct Noted {
    byte: u8,
    enqueued: bool,
    notes: Arc<Mutex<Vec<String>>>,
}

impl Noted {
    fn new(byte: u8, enqueued: bool) -> Noted {
        Noted {
            byte,
            enqueued,
            notes: Arc::default(),
        }
    }

    fn note(&self, what: String) {
        self.notes.lock().unwrap().push(what);
    }
}

impl WireBuffer for Noted {
    fn elements(&self) -> usize {
        1
    }

    fn element_bytes(&self) -> usize {
        1
    }

    fn copy_from(&mut self, source: &Noted, _: usize) {
        self.byte = source.byte;
    }

    fn allocated_bytes(&self) -> usize {
        1
    }

    fn take(&mut self) -> Noted {
        self.note("posted".into());
        self.clone()
    }

    fn is_enqueued(&self) -> bool {
        self.enqueued
    }

    fn vacate(&mut self, round: usize) {
        self.note(format!("vacated in round {round}"));
    }

    fn checksum(&self, _: usize) -> u64 {
        self.byte.into()
    }
}

/// What a rank notes of a hop to the other one and back, in round 3.
fn notes(mut endpoint: Endpoint<Noted>, peer: usize, enqueued: bool) -> Vec<String> {
    let sent = Noted::new(1 - peer as u8, enqueued);
    let mut received = Noted::new(7, enqueued);
    let notes = Arc::clone(&received.notes);
    let address = Address {
        peer,
        tag: 0,
        elements: 1,
    };
    let mut meanwhile = || notes.lock().unwrap().push("computed".into());
    let outgoing = [Outgoing {
        to: address,
        parcel: &sent,
    }];
    let mut incoming = [Incoming {
        from: address,
        parcel: &mut received,
    }];
    let moved = endpoint.exchange(3, &outgoing, &mut incoming, &mut meanwhile);
    moved.expect("a hop");
    assert_eq!(received.byte, peer as u8);
    notes.lock().unwrap().clone()
}

#[test]
fn computing_is_asked_for_before_posting_where_both_are_only_enqueued() {
    for (enqueued, expected) in [
        (true, ["computed", "vacated in round 3", "posted"]),
        (false, ["vacated in round 3", "posted", "computed"]),
    ] {
        let ends = endpoints::<Noted>(2, Duration::from_secs(20));
        std::thread::scope(|scope| {
            for (rank, end) in ends.into_iter().enumerate() {
                scope.spawn(move || assert_eq!(notes(end, 1 - rank, enqueued), expected));
            }
        });
    }
}
