//! What is wanted, and which alternatives that leaves open.
//!
//! The decision here: what was given is never weighed, and what is open is taken at a few sizes, each
//! about half as large again or twice as large as the one before: in between nothing changes by more
//! than the clock can tell.

use encke_core::plan::rings::Rotating;
use encke_core::plan::{Queries, Request, Schedule};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{DType, Pattern, Shape};
use encke_cost::ClockError;
use serde::Serialize;

use crate::checkpoint::CheckpointPolicy;

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// A forward pass.
    Forward,
    /// A backward pass.
    Backward,
    /// A forward pass and, some time later, the backward pass: what is kept meanwhile is memory.
    Training {
        /// Layers that keep their output at the same time.
        layers: usize,
    },
}

/// What is wanted, and what of it is left open: everything that is `None`.
#[derive(Debug, Clone)]
pub struct Constraints {
    /// Sizes.
    pub shape: Shape,
    /// Who sees whom.
    pub pattern: Pattern,
    /// The storage type.
    pub dtype: DType,
    /// What is to be done.
    pub work: Work,
    /// How many ranks.
    pub ranks: Option<usize>,
    /// How tokens are cut.
    pub cut: Option<Cut>,
    /// Who holds the queries; open, it is chosen with the rest: K/V travel, or carries do.
    pub queries: Option<Queries>,
    /// How many distances a round takes; see [`Schedule`].
    pub width: Option<usize>,
    /// What travels in the backward pass; see [`Schedule`].
    pub rotate: Option<Rotating>,
    /// What is kept for the backward pass.
    pub checkpoint: Option<CheckpointPolicy>,
    /// How many other ranks keep each rank's inputs.
    pub redundancy: usize,
    /// The largest ring there can be.
    pub most_ranks: usize,
    /// Bytes that a rank may hold.
    pub memory_limit: Option<usize>,
    /// Below so many tokens only one device is considered.
    pub one_device_below: Option<usize>,
}

impl Constraints {
    /// A forward pass with everything else left open, on at most so many ranks.
    pub fn new(shape: Shape, pattern: Pattern, dtype: DType, most_ranks: usize) -> Constraints {
        Constraints {
            shape,
            pattern,
            dtype,
            work: Work::Forward,
            ranks: None,
            cut: None,
            queries: Some(Queries::Sharded),
            width: None,
            rotate: None,
            checkpoint: None,
            redundancy: 0,
            most_ranks,
            memory_limit: None,
            one_device_below: None,
        }
    }

    /// Ring sizes that are looked at: the one given, or 1, 2, 3, 4, 6, 8, 12, 16, … and the largest.
    fn sizes(&self) -> Vec<usize> {
        if let Some(ranks) = self.ranks {
            return vec![ranks];
        }
        if let Some(Cut::Firsts(firsts)) = &self.cut {
            return vec![firsts.len()];
        }
        let least = self.redundancy + 1;
        let below = |limit: usize| self.shape.tokens < limit;
        if self.one_device_below.is_some_and(below) && least == 1 {
            return vec![1];
        }
        let doublings = (0..usize::BITS - 1).map(|power| 1usize << power);
        let sizes = doublings.flat_map(|size| [size, size + size / 2]);
        let mut sizes: Vec<usize> = sizes
            .take_while(|size| *size <= self.most_ranks)
            .chain([self.most_ranks])
            .filter(|size| *size >= least)
            .collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    /// Every ring that is looked at, the simplest first.
    pub(super) fn requests(&self) -> Result<Vec<Request>, ClockError> {
        let mut requests = Vec::new();
        for ranks in self.sizes() {
            let cuts = match &self.cut {
                Some(cut) => vec![cut.clone()],
                None if ranks == 1 => vec![Cut::Contiguous],
                None => vec![Cut::Contiguous, Cut::Zigzag, Cut::Striped],
            };
            let queries = match self.queries {
                // One rank has all queries either way.
                _ if ranks == 1 => vec![Queries::Sharded],
                Some(queries) => vec![queries],
                None if self.redundancy > 0 => vec![Queries::Sharded],
                None => vec![Queries::Sharded, Queries::Replicated],
            };
            for cut in cuts {
                let sharding = Sharding::new(ranks, cut)?;
                let basis = Request {
                    redundancy: self.redundancy,
                    ..Request::new(self.shape, self.pattern.clone(), sharding, self.dtype)
                };
                for &queries in &queries {
                    let schedules = self.schedules(ranks, queries).into_iter();
                    requests.extend(schedules.map(|schedule| Request {
                        queries,
                        schedule,
                        ..basis.clone()
                    }));
                }
            }
        }
        Ok(requests)
    }

    /// The schedules of a ring that are looked at: a ring, twice and four times as wide, and
    /// everything at once; with keys that travel in the backward pass and with queries that do.
    fn schedules(&self, ranks: usize, queries: Queries) -> Vec<Schedule> {
        let most = ranks.saturating_sub(1).max(1);
        let widths = match self.width {
            Some(width) => vec![width],
            None => {
                let narrow = [1, 2, 4].into_iter().filter(|width| *width < most);
                narrow.chain([most]).collect()
            }
        };
        let either = ranks > 1
            && self.work != Work::Forward
            && queries == Queries::Sharded
            && self.redundancy == 0;
        let rotate = match self.rotate {
            Some(rotate) => vec![rotate],
            None if either => vec![Rotating::Keys, Rotating::Queries],
            None => vec![Rotating::Keys],
        };
        let mut schedules = Vec::new();
        for width in widths {
            let each = rotate.iter();
            schedules.extend(each.map(|&backward| Schedule { width, backward }.on(ranks)));
        }
        schedules
    }
}
