//! What one shard has completed, as a continuation needs to know it.
//!
//! Plain data: [`Epoch`](super::membership::Epoch) derives it from the rounds a rank completed, and
//! the forward and backward programs skip the work it records.

use serde::Serialize;
use std::collections::BTreeSet;

/// What one shard has completed so far.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ShardProgress {
    /// Whether round 0 is done, and with it attention of the shard to itself.
    pub begun: bool,
    /// (ring, distance) of the parcels that the shard's queries have attended to.
    pub seen: BTreeSet<(usize, usize)>,
    /// (ring, distance) of the members whose gradients for the shard's parcel have been added to
    /// its dk and dv.
    pub gathered: BTreeSet<(usize, usize)>,
}
