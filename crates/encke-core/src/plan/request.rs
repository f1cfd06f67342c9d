//! Everything a plan depends on: the request, and the checks it must pass.
//!
//! The decision here: a request is a plain value. Equal requests give equal plans on every rank, so
//! ranks never exchange plans, and callers can cache them by request.

use std::ops::Range;
use std::sync::Arc;

use serde::Serialize;

use super::rings::Rotating;
use super::schedule::Schedule;
use crate::bits::{Bits, TileGrid};
use crate::congruence::gcd;
use crate::dropout::Dropout;
use crate::dtype::DType;
use crate::error::{Error, Result, check_steps, product};
use crate::job::ScoreTransform;
use crate::pattern::{LaneHead, Mode, Pattern};
use crate::scores::Scores;
use crate::shape::Shape;
use crate::sharding::{Cut, Run, Sharding};

/// Steps of a plan for two ranks that share a group of segments, and for a rank alone.
const PAIR_STEPS: usize = 512;
const RANK_STEPS: usize = 64;

/// Which ranks hold the queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Queries {
    /// Each rank holds the queries of its own tokens; keys and values rotate.
    Sharded,
    /// Every rank holds all queries and returns the whole output; keys and values do not move.
    Replicated,
}

/// The direction of the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pass {
    /// q, k, v to out, lse.
    Forward,
    /// q, k, v, out, lse, dout (and dlse) to dq, dk, dv.
    Backward {
        /// Whether the lse has an upstream gradient too.
        dlse: bool,
    },
    /// q, k, v, lse, dout and the delta of each branch to dq, dk, dv. Where mixing weights are
    /// constants, the weights of a branch are those of the softmax over all branches, but its delta
    /// is dout·out − dlse with the branch's own out.
    BackwardByBranch,
}

impl Pass {
    /// Its name.
    pub fn name(&self) -> &'static str {
        match self {
            Pass::Forward => "forward",
            Pass::Backward { .. } | Pass::BackwardByBranch => "backward",
        }
    }
}

/// Everything a plan depends on.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Request {
    /// The sizes of the tensors.
    pub shape: Shape,
    /// Which query attends to which key.
    pub pattern: Pattern,
    /// Which rank owns which tokens.
    pub sharding: Sharding,
    /// Which ranks hold the queries.
    pub queries: Queries,
    /// The compute type: inputs are converted to it.
    pub dtype: DType,
    /// The softmax scale: 0, or of either sign and a size within [`DType::scales`]; None for
    /// 1/sqrt(dim).
    pub scale: Option<f64>,
    /// Scores x become `softcap * tanh(x / softcap)`.
    pub softcap: Option<f64>,
    /// The ALiBi slope of each query head: slope times distance is subtracted from the score.
    pub slopes: Option<Arc<[f64]>>,
    /// Which pairs are dropped after the softmax. A plan does not depend on the seed.
    pub dropout: Option<Dropout>,
    /// The direction.
    pub pass: Pass,
    /// How many other ranks hold a replica of each rank's inputs. That many consecutive ranks may
    /// die without losing the call.
    pub redundancy: usize,
    /// What rotates, and how many distances a round takes.
    pub schedule: Schedule,
    /// What the bits of the result may depend on.
    #[serde(skip_serializing_if = "Bits::is_planned")]
    pub bits: Bits,
}

impl Request {
    /// A request for a forward pass with every option at its default.
    pub fn new(shape: Shape, pattern: Pattern, sharding: Sharding, dtype: DType) -> Request {
        Request {
            shape,
            pattern,
            sharding,
            queries: Queries::Sharded,
            dtype,
            scale: None,
            softcap: None,
            slopes: None,
            dropout: None,
            pass: Pass::Forward,
            redundancy: 0,
            schedule: Schedule::RING,
            bits: Bits::Planned,
        }
    }

    /// This request on another number of ranks, with the same kind of cut. Where bits must not
    /// depend on the ring, a contiguous sharding is cut between tiles.
    pub fn on_ranks(self, ranks: usize) -> Result<Request> {
        let cut = self.sharding.cut();
        let sharding = match self.bits.tile() {
            Some(tile) if matches!(cut, Cut::Contiguous | Cut::Firsts(_)) => {
                TileGrid::new(&self.pattern, &self.shape, tile)?.contiguous(ranks)
            }
            _ => Sharding::new(ranks, cut.clone()),
        };
        Ok(Request {
            sharding: sharding?,
            ..self
        })
    }

    /// This request with another seed of its dropout, if it has any.
    pub fn with_seed(mut self, seed: u64) -> Request {
        self.dropout = self.dropout.map(|dropout| dropout.with_seed(seed));
        self
    }

    /// The schedule that divides heads among as many ranks of a node of `node` ranks as possible;
    /// None if this request cannot have one.
    pub fn dividing_heads(&self, node: usize) -> Option<Schedule> {
        let ring = Schedule::RING.with_backward(self.schedule.backward);
        let most = node.min(self.shape.kv_heads);
        let groups = (2..=most).rev().filter(|group| node.is_multiple_of(*group));
        let mut schedules = groups.map(|group| ring.with_heads(group));
        schedules.find(|&schedule| {
            let request = Request {
                schedule,
                ..self.clone()
            };
            request.check_heads().is_ok()
        })
    }

    /// The softmax scale in effect.
    pub fn scale(&self) -> f64 {
        self.scale.unwrap_or_else(|| self.shape.default_scale())
    }

    /// The positions of the queries.
    pub fn positions(&self) -> Range<usize> {
        let first = self.pattern.first_query(&self.shape);
        first..first + self.shape.queries
    }

    /// The queries of `rank`, by index in q.
    pub fn query_runs(&self, rank: usize) -> Vec<Run> {
        self.sharding
            .query_runs(self.shape.tokens, rank, &self.positions())
    }

    /// How scores are computed, without sinks.
    pub fn scores(&self) -> Scores {
        Scores {
            softcap: self.softcap,
            slopes: self.slopes.clone(),
            dropout: self.dropout,
            ..Scores::from(self.scale())
        }
    }

    /// What happens to the scores of some heads before the softmax; None if nothing does.
    pub(super) fn transform(&self, heads: &[LaneHead]) -> Option<ScoreTransform> {
        let of_heads = |slopes: &Arc<[f64]>| heads.iter().map(|of| slopes[of.head]).collect();
        let transform = ScoreTransform {
            softcap: self.softcap,
            slopes: self.slopes.as_ref().map(of_heads),
        };
        (self.softcap.is_some() || self.slopes.is_some()).then_some(transform)
    }

    /// The type of out. Slots that are combined after attention are not rounded before that.
    pub fn out_dtype(&self) -> DType {
        if self.pattern.splits_slots() {
            self.dtype.sum()
        } else {
            self.dtype
        }
    }

    /// Whether a job may write out directly: kernels write the type they read.
    pub(super) fn jobs_write_output(&self) -> bool {
        self.out_dtype() == self.dtype
    }

    /// Which tensors rotate.
    pub fn rotating(&self) -> Rotating {
        match (self.queries, self.pass) {
            (Queries::Sharded, Pass::Forward) => Rotating::Keys,
            (Queries::Sharded, Pass::Backward { .. }) => self.schedule.backward,
            (Queries::Sharded, Pass::BackwardByBranch) => Rotating::Keys,
            (Queries::Replicated, _) => Rotating::Queries,
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        self.pattern.check(&self.shape)?;
        self.sharding.check(self.shape.tokens)?;
        self.check_cost()?;
        let (got, dtype) = (self.scale(), self.dtype);
        let [least, most] = dtype.scales();
        if got != 0.0 && !(least..=most).contains(&got.abs()) {
            return Err(Error::Scale {
                got,
                dtype,
                least,
                most,
            });
        }
        self.check_transform()?;
        let (redundancy, ranks) = (self.redundancy, self.sharding.ranks());
        if redundancy >= ranks && redundancy > 0 {
            return Err(Error::Redundancy { redundancy, ranks });
        }
        if redundancy > 0 && self.queries == Queries::Replicated {
            return Err(Error::RedundantQueries { redundancy });
        }
        if self.schedule.width == 0 {
            return Err(Error::NoWidth);
        }
        if redundancy > 0 && self.schedule.backward == Rotating::Queries {
            return Err(Error::RedundantRotation { redundancy });
        }
        self.check_nodes()?;
        self.check_heads()?;
        self.check_deltas()?;
        self.check_bits()
    }

    /// Refuses what cannot be given the deltas of branches: they stay with the queries.
    fn check_deltas(&self) -> Result<()> {
        let refusals = [
            (self.pattern.splits_slots(), "slots for each branch"),
            (self.queries == Queries::Replicated, "replicated queries"),
            (
                self.schedule.backward == Rotating::Queries,
                "rotating queries",
            ),
            (self.schedule.node > 1, "rings of two levels"),
            (self.schedule.heads > 1, "ranks that divide heads"),
            (self.redundancy > 0, "redundancy"),
            (
                self.bits.tile().is_some(),
                "bits that do not depend on the ring",
            ),
        ];
        let refused = refusals.into_iter().find(|(refused, _)| *refused);
        match refused.filter(|_| self.pass == Pass::BackwardByBranch) {
            None => Ok(()),
            Some((_, other)) => Err(Error::Excludes {
                one: "a delta for each branch",
                other,
                reason: "deltas stay with the queries of one softmax; differentiate branch by \
                         branch",
            }),
        }
    }

    /// Refuses what a schedule of two levels does not do.
    fn check_nodes(&self) -> Result<()> {
        let node = self.schedule.node;
        let refusals = [
            (
                self.queries == Queries::Replicated,
                "replicated queries",
                "shard the queries",
            ),
            (
                self.schedule.width > 1,
                "rounds of several distances",
                "use a width of 1",
            ),
            (
                self.redundancy > 0,
                "redundancy",
                "use a schedule of one level to survive deaths",
            ),
            (
                self.bits.tile().is_some(),
                "bits that do not depend on the ring",
                "use a schedule of one level",
            ),
        ];
        match refusals.into_iter().find(|(refused, ..)| *refused) {
            _ if node == 0 => Err(Error::Zero {
                what: "the number of ranks in a node",
            }),
            Some((_, what, hint)) if node > 1 => Err(Error::NodeOption { node, what, hint }),
            _ => Ok(()),
        }
    }

    /// Refuses what ranks that divide heads do not do.
    fn check_heads(&self) -> Result<()> {
        let (group, ranks) = (self.schedule.heads, self.sharding.ranks());
        let Schedule { width, node, .. } = self.schedule;
        let one_level = "use a schedule of one level and one distance";
        let refusals = [
            (
                self.queries == Queries::Replicated,
                "replicated queries",
                "shard the queries",
            ),
            (width > 1, "rounds of several distances", one_level),
            (node > 1, "rings of two levels", one_level),
            (
                self.redundancy > 0,
                "redundancy",
                "use a ring to survive deaths",
            ),
            (
                self.bits.tile().is_some(),
                "bits that do not depend on the ring",
                "use a ring",
            ),
            (
                self.dropout.is_some(),
                "dropout, whose coins are of whole calls",
                "use a ring",
            ),
            (
                matches!(self.sharding.cut(), Cut::Striped),
                "striped shards",
                "cut contiguous or zigzag",
            ),
            (
                group > 1 && !ranks.is_multiple_of(group),
                "groups that the ranks do not fill",
                "use a group size that divides the number of ranks",
            ),
            (
                self.shape.kv_heads < group,
                "groups of more ranks than key heads",
                "use smaller groups",
            ),
        ];
        match refusals.into_iter().find(|(refused, ..)| *refused) {
            _ if group == 0 => Err(Error::Zero {
                what: "the number of ranks that divide the heads",
            }),
            Some((_, what, hint)) if group > 1 => Err(Error::HeadsOption { group, what, hint }),
            _ => Ok(()),
        }
    }

    /// Refuses what has no order of sums that is the same on every ring.
    fn check_bits(&self) -> Result<()> {
        self.bits.check()?;
        let Some(tile) = self.bits.tile() else {
            return Ok(());
        };
        let refusals = [
            (
                self.queries == Queries::Replicated,
                "replicated queries",
                "shard the queries",
            ),
            (
                self.schedule.width > 1 && self.sharding.ranks() > 2,
                "a schedule of several distances a round",
                "use a schedule of width 1",
            ),
        ];
        if let Some((_, what, hint)) = refusals.into_iter().find(|(refused, ..)| *refused) {
            return Err(Error::BitsOption { what, hint });
        }
        TileGrid::new(&self.pattern, &self.shape, tile)?.check(&self.sharding)
    }

    fn check_transform(&self) -> Result<()> {
        if let Some(got) = self.softcap
            && !(got.is_finite() && got > 0.0)
        {
            return Err(Error::Softcap { got });
        }
        self.pattern.check_slopes(self.slopes.is_some())?;
        if let Some(slopes) = &self.slopes {
            let (got, heads) = (slopes.len(), self.shape.heads);
            if got != heads {
                return Err(Error::SlopeCount { got, heads });
            }
            if let Some(head) = slopes.iter().position(|slope| !slope.is_finite()) {
                let got = slopes[head];
                return Err(Error::Slope { head, got });
            }
        }
        Ok(())
    }

    /// Refuses plans that would take too long to make, and sums of bytes that would overflow.
    fn check_cost(&self) -> Result<()> {
        let Shape {
            batch,
            tokens,
            heads,
            dim,
            ..
        } = self.shape;
        let (ranks, branches) = (self.sharding.ranks(), self.pattern.branches().len());
        // Keys and values with their gradients, of at most 8 bytes.
        let bytes = [batch, tokens, heads, dim, 4 * 8, ranks, branches];
        product("the number of bytes that all ranks send", &bytes)?;
        if let (Cut::Striped, Some(documents)) = (self.sharding.cut(), self.pattern.document_list())
        {
            // Every rank has rows of every document.
            let of_document = |length: usize| length.min(ranks).saturating_pow(2);
            let pairs = documents.lengths().map(of_document);
            let pairs = pairs.fold(0, usize::saturating_add);
            let pairs = (
                pairs,
                "pairs of ranks that share a document in striped shards",
            );
            check_steps(&[(PAIR_STEPS, "steps"), (branches, "branches"), pairs])?;
        }
        for branch in self.pattern.branches() {
            let segment = branch.segment.min(tokens);
            let lanes = match self.pattern.mode() {
                Mode::Mix { .. } => branch.dilation.min(heads).min(segment),
                Mode::Group { .. } | Mode::Fkodom => 1,
            };
            let (groups, members) = match self.sharding.cut() {
                Cut::Striped => {
                    let groups = ranks / gcd(segment, ranks);
                    (groups.min(tokens / segment + 1), ranks.min(segment))
                }
                Cut::Firsts(_) | Cut::Ranges(_) => (1, ranks),
                Cut::Contiguous | Cut::Zigzag => {
                    let shard = (tokens / ranks).max(1);
                    (1, ranks.min(segment / shard + 2))
                }
            };
            let branches = (branches, "branches");
            let lanes = (lanes, "offsets of their heads");
            let members = (members, "ranks that share a segment");
            let groups = (groups, "ways to share one");
            check_steps(&[(PAIR_STEPS, "steps"), branches, lanes, groups, members])?;
            check_steps(&[members, members])?;
            check_steps(&[(RANK_STEPS, "steps"), branches, lanes, (ranks, "ranks")])?;
        }
        Ok(())
    }
}
