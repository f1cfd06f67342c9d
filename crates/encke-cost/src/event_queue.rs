//! What is going to happen, in order of time.
//!
//! The decision here: things of equal time happen in the order in which they were foreseen, so that
//! nothing depends on how a heap breaks ties.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::cores::End;
use super::wires::Arrival;

/// Something that happens.
#[derive(Debug, Clone, Copy)]
pub(super) enum What {
    /// Work on some cores ends.
    End(End),
    /// The first byte of a hop moves.
    Depart(usize),
    /// The last byte of a hop arrives.
    Arrival(Arrival),
}

#[derive(Debug, Clone, Copy)]
struct Happening {
    at: f64,
    order: u64,
    what: What,
}

/// Everything that is foreseen.
#[derive(Debug, Default)]
pub(super) struct EventQueue {
    heap: BinaryHeap<Happening>,
    order: u64,
}

impl EventQueue {
    /// Something will happen.
    pub fn add(&mut self, at: f64, what: What) {
        self.order += 1;
        let order = self.order;
        self.heap.push(Happening { at, order, what });
    }

    /// What happens next, and when.
    pub fn next(&mut self) -> Option<(f64, What)> {
        self.heap.pop().map(|next| (next.at, next.what))
    }
}

impl Ord for Happening {
    /// The earliest is the greatest, as a heap wants it.
    fn cmp(&self, other: &Happening) -> Ordering {
        let time = other.at.total_cmp(&self.at);
        time.then(other.order.cmp(&self.order))
    }
}

impl PartialOrd for Happening {
    fn partial_cmp(&self, other: &Happening) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Happening {
    fn eq(&self, other: &Happening) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Happening {}
