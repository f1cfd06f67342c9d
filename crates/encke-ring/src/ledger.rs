//! A log of one rank's memory: an entry for every buffer that is allocated and freed, with the
//! bytes that the allocator really reserved.
//!
//! The decision here: the ledger is the list of its entries. Current, peak and per-round use are
//! computed from it, and a rank that allocates nothing in its steady state adds no entries, however
//! long it runs.

use encke_core::plan::program::Component;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// An allocation or a deallocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerEntry {
    /// The round; 0 also stands for the time before the first round.
    pub round: usize,
    /// What the memory is for.
    pub component: Component,
    /// The number of bytes.
    pub bytes: usize,
    /// True for an allocation, false for a deallocation.
    pub taken: bool,
}

/// Memory in use during some time, by what it is for: at its end, and at its peak.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Holdings {
    /// Bytes in use at the end of that time.
    pub held: BTreeMap<Component, usize>,
    /// The peak of each component during that time.
    pub peak: BTreeMap<Component, usize>,
    /// The peak of all components together.
    pub peak_bytes: usize,
}

impl Holdings {
    /// All bytes in use at the end of that time.
    pub fn held_bytes(&self) -> usize {
        self.held.values().sum()
    }

    /// A time that begins with these bytes in use.
    fn begin(held: &BTreeMap<Component, usize>) -> Holdings {
        Holdings {
            held: held.clone(),
            peak: held.clone(),
            peak_bytes: held.values().sum(),
        }
    }

    fn apply(&mut self, entry: &LedgerEntry) {
        let held = self.held.entry(entry.component).or_default();
        if entry.taken {
            *held += entry.bytes;
            let peak = self.peak.entry(entry.component).or_default();
            *peak = (*peak).max(*held);
            self.peak_bytes = self.peak_bytes.max(self.held_bytes());
        } else {
            let left = held.checked_sub(entry.bytes);
            *held = left.expect("no more is freed than was allocated");
        }
    }
}

/// The memory of one rank.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ledger {
    entries: Vec<LedgerEntry>,
}

impl Ledger {
    /// Records an allocation.
    pub fn allocate(&mut self, round: usize, component: Component, bytes: usize) {
        self.record(round, component, bytes, true);
    }

    /// Records a deallocation.
    pub fn free(&mut self, round: usize, component: Component, bytes: usize) {
        self.record(round, component, bytes, false);
    }

    /// Sets the bytes of a component, for memory whose owner counts it: records the difference.
    pub fn set(&mut self, round: usize, component: Component, bytes: usize) {
        let held = self.total().held.get(&component).copied().unwrap_or(0);
        if bytes >= held {
            self.allocate(round, component, bytes - held);
        } else {
            self.free(round, component, held - bytes);
        }
    }

    fn record(&mut self, round: usize, component: Component, bytes: usize, taken: bool) {
        if bytes == 0 {
            return;
        }
        let last = self.entries.last().map_or(0, |entry| entry.round);
        assert!(
            last <= round,
            "round {round} is recorded after round {last}"
        );
        self.entries.push(LedgerEntry {
            round,
            component,
            bytes,
            taken,
        });
    }

    /// Every entry, in order.
    pub fn entries(&self) -> &[LedgerEntry] {
        &self.entries
    }

    /// Memory in use now, and its peak.
    pub fn total(&self) -> Holdings {
        let mut holdings = Holdings::default();
        for entry in &self.entries {
            holdings.apply(entry);
        }
        holdings
    }

    /// Memory in use in each of the rounds `0..rounds`.
    pub fn rounds(&self, rounds: usize) -> Vec<Holdings> {
        let mut entries = self.entries.iter().peekable();
        let mut held = BTreeMap::new();
        let step = |round: usize| {
            let mut holdings = Holdings::begin(&held);
            while let Some(entry) = entries.next_if(|entry| entry.round <= round) {
                holdings.apply(entry);
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
    fn peaks_are_those_of_each_round_and_of_the_whole() {
        let (q, kv) = (Component::Queries, Component::OwnKv);
        let mut ledger = Ledger::default();
        ledger.allocate(0, q, 10);
        ledger.allocate(1, kv, 5);
        ledger.free(1, q, 10);
        ledger.allocate(3, q, 7);
        ledger.free(3, kv, 5);
        let total = ledger.total();
        assert_eq!((total.held_bytes(), total.peak_bytes), (7, 15));
        assert_eq!((total.peak[&q], total.peak[&kv]), (10, 5));
        let rounds = ledger.rounds(4);
        let peaks: Vec<usize> = rounds.iter().map(|round| round.peak_bytes).collect();
        let held: Vec<usize> = rounds.iter().map(Holdings::held_bytes).collect();
        assert_eq!((peaks, held), (vec![10, 15, 5, 12], vec![10, 5, 5, 7]));
    }

    #[test]
    fn set_records_differences_only() {
        let mut ledger = Ledger::default();
        for (round, bytes) in [4, 4, 9, 9, 2].into_iter().enumerate() {
            ledger.set(round, Component::Workspace, bytes);
        }
        assert_eq!(ledger.entries().len(), 3);
        let total = ledger.total();
        assert_eq!((total.held_bytes(), total.peak_bytes), (2, 9));
    }

    #[test]
    #[should_panic(expected = "no more is freed")]
    fn freeing_more_than_was_allocated_panics() {
        let mut ledger = Ledger::default();
        ledger.free(0, Component::Carry, 1);
        ledger.total();
    }
}
