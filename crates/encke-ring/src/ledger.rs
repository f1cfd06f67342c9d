//! The book of one rank's memory: every buffer is entered when it is taken and when it is given
//! back, with the bytes the allocator really gave.
//!
//! The decision here: the ledger is the list of its entries. What is held now, what was held at
//! most and what stood in the books in any round are read off it, and a rank that allocates nothing
//! in its steady state adds no entries there, however long it runs.

use encke_core::plan::program::Component;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Bytes taken or given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The round; 0 also stands for the time before the first.
    pub round: usize,
    /// What for.
    pub component: Component,
    /// How many.
    pub bytes: usize,
    /// Whether they were taken, or given back.
    pub taken: bool,
}

/// Bytes held at some time, by what they are for, and the most that were.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Holdings {
    /// Held at the end of that time.
    pub held: BTreeMap<Component, usize>,
    /// The most of each that was held at any moment of it.
    pub peak: BTreeMap<Component, usize>,
    /// The most that was held at any moment, of all together.
    pub peak_bytes: usize,
}

impl Holdings {
    /// All bytes held at the end of that time.
    pub fn held_bytes(&self) -> usize {
        self.held.values().sum()
    }

    /// The same bytes at the beginning of a time in which nothing has happened yet.
    fn begin(held: &BTreeMap<Component, usize>) -> Holdings {
        Holdings {
            held: held.clone(),
            peak: held.clone(),
            peak_bytes: held.values().sum(),
        }
    }

    fn enter(&mut self, entry: &Entry) {
        let held = self.held.entry(entry.component).or_default();
        if entry.taken {
            *held += entry.bytes;
            let peak = self.peak.entry(entry.component).or_default();
            *peak = (*peak).max(*held);
            self.peak_bytes = self.peak_bytes.max(self.held_bytes());
        } else {
            let left = held.checked_sub(entry.bytes);
            *held = left.expect("no more is given back than was taken");
        }
    }
}

/// The memory of one rank.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ledger {
    entries: Vec<Entry>,
}

impl Ledger {
    /// Books bytes that were allocated.
    pub fn take(&mut self, round: usize, component: Component, bytes: usize) {
        self.enter(round, component, bytes, true);
    }

    /// Books bytes that were freed.
    pub fn give_back(&mut self, round: usize, component: Component, bytes: usize) {
        self.enter(round, component, bytes, false);
    }

    /// Books the difference to what a component now holds, for memory that its owner counts.
    pub fn hold(&mut self, round: usize, component: Component, bytes: usize) {
        let held = self.total().held.get(&component).copied().unwrap_or(0);
        if bytes >= held {
            self.take(round, component, bytes - held);
        } else {
            self.give_back(round, component, held - bytes);
        }
    }

    fn enter(&mut self, round: usize, component: Component, bytes: usize, taken: bool) {
        if bytes == 0 {
            return;
        }
        let last = self.entries.last().map_or(0, |entry| entry.round);
        assert!(last <= round, "round {round} is booked after round {last}");
        self.entries.push(Entry {
            round,
            component,
            bytes,
            taken,
        });
    }

    /// Every entry, in order.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// What is held now, and the most that ever was.
    pub fn total(&self) -> Holdings {
        let mut holdings = Holdings::default();
        for entry in &self.entries {
            holdings.enter(entry);
        }
        holdings
    }

    /// What was held in each of the rounds `0..rounds`.
    pub fn rounds(&self, rounds: usize) -> Vec<Holdings> {
        let mut entries = self.entries.iter().peekable();
        let mut held = BTreeMap::new();
        let step = |round: usize| {
            let mut holdings = Holdings::begin(&held);
            while let Some(entry) = entries.next_if(|entry| entry.round <= round) {
                holdings.enter(entry);
            }
            held.clone_from(&holdings.held);
            holdings
        };
        (0..rounds).map(step).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_are_of_the_time_asked_for() {
        let (q, kv) = (Component::Queries, Component::OwnKv);
        let mut ledger = Ledger::default();
        ledger.take(0, q, 10);
        ledger.take(1, kv, 5);
        ledger.give_back(1, q, 10);
        ledger.take(3, q, 7);
        ledger.give_back(3, kv, 5);
        let total = ledger.total();
        assert_eq!((total.held_bytes(), total.peak_bytes), (7, 15));
        assert_eq!((total.peak[&q], total.peak[&kv]), (10, 5));
        let rounds = ledger.rounds(4);
        let peaks: Vec<usize> = rounds.iter().map(|round| round.peak_bytes).collect();
        let held: Vec<usize> = rounds.iter().map(Holdings::held_bytes).collect();
        assert_eq!((peaks, held), (vec![10, 15, 5, 12], vec![10, 5, 5, 7]));
    }

    #[test]
    fn holding_books_differences_and_nothing_where_there_is_none() {
        let mut ledger = Ledger::default();
        for (round, bytes) in [4, 4, 9, 9, 2].into_iter().enumerate() {
            ledger.hold(round, Component::Workspace, bytes);
        }
        assert_eq!(ledger.entries().len(), 3);
        let total = ledger.total();
        assert_eq!((total.held_bytes(), total.peak_bytes), (2, 9));
    }

    #[test]
    #[should_panic(expected = "no more is given back")]
    fn what_was_not_taken_cannot_be_given_back() {
        let mut ledger = Ledger::default();
        ledger.give_back(0, Component::Carry, 1);
        ledger.total();
    }
}
