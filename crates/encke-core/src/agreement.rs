//! What ranks exchange when an epoch ends: how far each of them got, and who is gone.
//!
//! Plain data without machinery: transports implement the exchange, the plan interprets the result
//! ([`Epoch`](crate::plan::membership::Epoch)), and neither depends on the other.

use serde::Serialize;

/// How far a rank got in an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct RankProgress {
    /// Rounds of its program whose tasks it has completed. The messages of the last of these rounds
    /// may be missing.
    pub done: usize,
    /// Whether it completed the whole program, all messages included.
    pub finished: bool,
}

/// What the survivors of an epoch agree on: identical on each of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Agreement {
    /// The progress of each rank; None for ranks that are gone, in this epoch or an earlier one.
    pub progress: Vec<Option<RankProgress>>,
}
