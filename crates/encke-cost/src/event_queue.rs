//! A queue of events in order of virtual time, for discrete-event simulations.
//!
//! It does not run anything: the caller pops an event, handles it and pushes its consequences. The
//! decision here: events of equal time come out in the order in which they were pushed, so that
//! runs are reproducible to the bit and do not depend on how a heap breaks ties.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::time::Duration;

/// A virtual time with a total order.
pub trait VirtualTime: Copy {
    /// Compares two times; every pair of times is comparable.
    fn total_cmp(&self, other: &Self) -> Ordering;
}

impl VirtualTime for f64 {
    fn total_cmp(&self, other: &f64) -> Ordering {
        f64::total_cmp(self, other)
    }
}

impl VirtualTime for Duration {
    fn total_cmp(&self, other: &Duration) -> Ordering {
        self.cmp(other)
    }
}

/// Pending events, ordered by virtual time `T` and then by insertion.
///
/// ```
/// let mut queue = encke_cost::EventQueue::default();
/// queue.push(2.0, "second");
/// queue.push(1.0, "first");
/// queue.push(2.0, "third");
/// assert_eq!(queue.pop(), Some((1.0, "first")));
/// assert_eq!(queue.pop(), Some((2.0, "second")));
/// assert_eq!(queue.pop(), Some((2.0, "third")));
/// assert_eq!(queue.pop(), None);
/// ```
#[derive(Debug)]
pub struct EventQueue<E, T: VirtualTime = f64> {
    heap: BinaryHeap<QueuedEvent<E, T>>,
    /// Events pushed so far.
    pushed: u64,
}

#[derive(Debug)]
struct QueuedEvent<E, T> {
    at: T,
    sequence: u64,
    event: E,
}

impl<E, T: VirtualTime> EventQueue<E, T> {
    /// Adds an event at a time.
    pub fn push(&mut self, at: T, event: E) {
        let sequence = self.pushed;
        self.pushed += 1;
        self.heap.push(QueuedEvent {
            at,
            sequence,
            event,
        });
    }

    /// Removes the earliest event; the first pushed of several at the same time.
    pub fn pop(&mut self) -> Option<(T, E)> {
        self.heap.pop().map(|next| (next.at, next.event))
    }
}

impl<E, T: VirtualTime> Default for EventQueue<E, T> {
    fn default() -> EventQueue<E, T> {
        EventQueue {
            heap: BinaryHeap::new(),
            pushed: 0,
        }
    }
}

impl<E, T: VirtualTime> Ord for QueuedEvent<E, T> {
    /// Reversed, because [`BinaryHeap`] pops the greatest element.
    fn cmp(&self, other: &Self) -> Ordering {
        let time = other.at.total_cmp(&self.at);
        time.then(other.sequence.cmp(&self.sequence))
    }
}

impl<E, T: VirtualTime> PartialOrd for QueuedEvent<E, T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E, T: VirtualTime> PartialEq for QueuedEvent<E, T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<E, T: VirtualTime> Eq for QueuedEvent<E, T> {}
