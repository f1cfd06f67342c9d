//! How the same attention is moved.
//!
//! The decision here: a schedule is a value of the request. Which pairs are computed does not depend
//! on it, only who has what when; so every proof about plans is a proof about every schedule.

use serde::Serialize;

use super::rings::Rotating;

/// How parcels go round, where there is more than one way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct Schedule {
    /// How many distances a round takes. With 1, the ring, a rank computes with one parcel while
    /// the next one arrives. With more, so many parcels lie side by side in its memory, their keys
    /// are one job where they lie right, and all of them go on together to the member that many
    /// places further. With as many as there are other ranks nothing is passed on at all: a gather.
    pub width: usize,
    /// What travels in a backward pass whose queries are sharded: keys and values, with their
    /// gradients one round behind, or queries and what is known of them, with theirs.
    pub backward: Rotating,
}

impl Schedule {
    /// One parcel at a time.
    pub const RING: Schedule = Schedule {
        width: 1,
        backward: Rotating::Keys,
    };

    /// Everything at once.
    pub const GATHER: Schedule = Schedule {
        width: usize::MAX,
        ..Schedule::RING
    };

    /// This schedule as so many ranks can have it: no round takes more than all others.
    #[must_use]
    pub fn on(self, ranks: usize) -> Schedule {
        self.with_width(self.width.min(ranks.saturating_sub(1).max(1)))
    }

    /// This schedule with other freight in the backward pass.
    #[must_use]
    pub fn with_backward(self, backward: Rotating) -> Schedule {
        Schedule { backward, ..self }
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
