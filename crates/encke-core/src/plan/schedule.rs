//! How parcels rotate.
//!
//! The decision here: the schedule is part of the request. It does not change which pairs are
//! computed, only which rank holds what when, so every proof about plans covers every schedule.

use serde::Serialize;

use super::rings::Rotating;

/// How parcels rotate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct Schedule {
    /// How many distances a round takes. With 1, the ring, a rank computes with one parcel while
    /// the next one arrives. With w, a rank holds w parcels at a time, computes with adjacent keys
    /// in one job, and forwards all of them to the member w positions further. With as many as
    /// there are other ranks nothing is forwarded: an all-gather.
    pub width: usize,
    /// What rotates in a backward pass with sharded queries: keys and values, followed by dk and
    /// dv, or queries with dout, lse and delta, followed by dq.
    pub backward: Rotating,
    /// Ranks of a node, for rings in two levels: parcels rotate inside each node, and every node's
    /// parcels move to the next node once, in pieces, during a whole turn inside the nodes. 1: one
    /// level. Ranks are assigned to nodes in order.
    pub node: usize,
    /// Ranks of a group that divide the heads among them: they exchange heads first (an
    /// all-to-all), and rings then pass from group to group. 1: every rank has all heads. Ranks are
    /// assigned to groups in order.
    pub heads: usize,
}

impl Schedule {
    /// One parcel at a time.
    pub const RING: Schedule = Schedule {
        width: 1,
        backward: Rotating::Keys,
        node: 1,
        heads: 1,
    };

    /// All parcels at once.
    pub const GATHER: Schedule = Schedule {
        width: usize::MAX,
        ..Schedule::RING
    };

    /// This schedule on `ranks` ranks: a round takes at most all other ranks.
    #[must_use]
    pub fn on(self, ranks: usize) -> Schedule {
        self.with_width(self.width.min(ranks.saturating_sub(1).max(1)))
    }

    /// This schedule with other tensors rotating in the backward pass.
    #[must_use]
    pub fn with_backward(self, backward: Rotating) -> Schedule {
        Schedule { backward, ..self }
    }

    /// This schedule in two levels, with `node` ranks in a node.
    #[must_use]
    pub fn with_node(self, node: usize) -> Schedule {
        Schedule { node, ..self }
    }

    /// This schedule with heads divided among `heads` ranks.
    #[must_use]
    pub fn with_heads(self, heads: usize) -> Schedule {
        Schedule { heads, ..self }
    }

    /// This schedule with another width.
    #[must_use]
    pub fn with_width(self, width: usize) -> Schedule {
        Schedule { width, ..self }
    }
}

impl Default for Schedule {
    fn default() -> Schedule {
        Schedule::RING
    }
}
