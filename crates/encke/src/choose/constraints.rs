//! The fixed and the open settings of a choice, and the alternatives that follow.
//!
//! The decision here: a fixed setting is never varied, and an open size is tried at a few values,
//! each about 1.5 or 2 times the one before: between them, times change by less than the prediction
//! error.

use encke_core::plan::balance::Balance;
use encke_core::plan::rings::Rotating;
use encke_core::plan::{Queries, Request, Schedule};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{DType, Pattern, Shape};
use encke_cost::CostError;
use serde::Serialize;

use crate::checkpoint::CheckpointPolicy;

/// The passes that are timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Workload {
    /// A forward pass.
    Forward,
    /// A backward pass.
    Backward,
    /// A forward pass and later the backward pass; the saved output takes memory in between.
    Training {
        /// Layers whose outputs are saved at the same time.
        layers: usize,
    },
}

/// A workload with its settings. A setting that is `None` is open: its alternatives are tried.
#[derive(Debug, Clone)]
pub struct Constraints {
    /// Batch, tokens, heads and head dimension.
    pub shape: Shape,
    /// Which query attends to which key.
    pub pattern: Pattern,
    /// The storage type.
    pub dtype: DType,
    /// The passes.
    pub work: Workload,
    /// Number of ranks.
    pub ranks: Option<usize>,
    /// How tokens are divided.
    pub cut: Option<Cut>,
    /// Sharded queries (K/V rotate) or replicated ones (softmax states travel).
    pub queries: Option<Queries>,
    /// How many ring distances a round covers; see [`Schedule`].
    pub width: Option<usize>,
    /// Two levels, divided heads, or neither, as in this [`Schedule`]; the other settings of it
    /// are not used.
    pub nodes: Option<Schedule>,
    /// What rotates in the backward pass; see [`Schedule`].
    pub rotate: Option<Rotating>,
    /// What the forward pass saves for the backward pass.
    pub checkpoint: Option<CheckpointPolicy>,
    /// Number of other ranks that hold a copy of each rank's inputs.
    pub redundancy: usize,
    /// The largest number of ranks.
    pub most_ranks: usize,
    /// Bytes that a rank may hold.
    pub memory_limit: Option<usize>,
    /// Below this many tokens only one device is considered.
    pub one_device_below: Option<usize>,
}

impl Constraints {
    /// A forward pass with sharded queries on at most `most_ranks` ranks; the rest is open.
    pub fn new(shape: Shape, pattern: Pattern, dtype: DType, most_ranks: usize) -> Constraints {
        Constraints {
            shape,
            pattern,
            dtype,
            work: Workload::Forward,
            ranks: None,
            cut: None,
            queries: Some(Queries::Sharded),
            width: None,
            nodes: None,
            rotate: None,
            checkpoint: None,
            redundancy: 0,
            most_ranks,
            memory_limit: None,
            one_device_below: None,
        }
    }

    /// The ring sizes tried: the fixed one, or 1, 2, 3, 4, 6, 8, 12, 16, … and the largest.
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

    /// The requests of all alternatives on a machine with `node` ranks in a node, the simplest
    /// first.
    pub(super) fn requests(&self, node: usize) -> Result<Vec<Request>, CostError> {
        let mut requests = Vec::new();
        for ranks in self.sizes() {
            let cuts = match &self.cut {
                Some(cut) => vec![cut.clone()],
                None if ranks == 1 => vec![Cut::Contiguous],
                None if self.pattern.has_plain_mask() => {
                    vec![Cut::Contiguous, Cut::Zigzag, Cut::Striped]
                }
                // Documents and windows are rarely even, and a striped cut sends all of them.
                None => {
                    let [even, by_document] = [Balance::Contiguous, Balance::Documents]
                        .map(|balance| balance.cut(&self.pattern, &self.shape, ranks));
                    vec![Cut::Contiguous, even?, by_document?]
                }
            };
            let queries = match self.queries {
                // One rank has all queries in both cases.
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
                    let of_queries = Request {
                        queries,
                        ..basis.clone()
                    };
                    let schedules = self.schedules(&of_queries, node).into_iter();
                    requests.extend(schedules.map(|schedule| Request {
                        schedule,
                        ..of_queries.clone()
                    }));
                }
            }
        }
        Ok(requests)
    }

    /// The schedules tried: widths 1, 2, 4 and all distances at once, and where ranks are in
    /// several nodes two levels and heads x sequence, each with keys and with queries rotating in
    /// the backward pass.
    fn schedules(&self, request: &Request, node: usize) -> Vec<Schedule> {
        let (ranks, queries) = (request.sharding.ranks(), request.queries);
        let most = ranks.saturating_sub(1).max(1);
        let widths = match self.width {
            Some(width) => vec![width],
            None => {
                let narrow = [1, 2, 4].into_iter().filter(|width| *width < most);
                narrow.chain([most]).collect()
            }
        };
        let either = ranks > 1
            && self.work != Workload::Forward
            && queries == Queries::Sharded
            && self.redundancy == 0;
        let rotate = match self.rotate {
            Some(rotate) => vec![rotate],
            None if either => vec![Rotating::Keys, Rotating::Queries],
            None => vec![Rotating::Keys],
        };
        let nodes = self.nodes.unwrap_or(Schedule::RING);
        let one_level = nodes.node == 1 && nodes.heads == 1;
        let widths = widths.into_iter().filter(|width| one_level || *width == 1);
        let each = widths.map(|width| nodes.with_width(width).on(ranks));
        let mut kinds: Vec<Schedule> = each.collect();
        let open = self.nodes.is_none() && self.width.is_none_or(|width| width == 1);
        let several = (2..ranks).contains(&node);
        if open && several && queries == Queries::Sharded && self.redundancy == 0 {
            kinds.push(Schedule::RING.with_node(node));
            kinds.extend(request.dividing_heads(node));
        }
        let with = |schedule: Schedule| {
            let each = rotate.iter();
            each.map(move |&backward| schedule.with_backward(backward))
        };
        kinds.into_iter().flat_map(with).collect()
    }
}
