//! Settings of an attention, and the [`Request`] that a call with them makes.
//!
//! The builder computes nothing. `build` and `build_on` are in `attention`, `build_shard` and
//! `build_shard_on` in `shard`, beside what they make.

use std::sync::Arc;
use std::time::Duration;

use encke_core::kernel::Kernel;
use encke_core::plan::balance::Balance;
use encke_core::plan::{Pass, Queries, Request, Schedule};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{
    Bits, DType, Dropout, Error as RequestError, KeyLengths, Mode, Pattern, Shape, alibi_slopes,
};
use encke_ring::{CacheLimits, Fault};

use crate::auto::Auto;
use crate::checkpoint::CheckpointPolicy;

/// Default limit for one exchange with a neighbour. A neighbour may be busy with a long job of its
/// own, so this guards against waiting for ever, not against slowness.
const DEADLINE: Duration = Duration::from_secs(600);

/// The compute type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// The type the inputs are stored in.
    #[default]
    Stored,
    /// This type; inputs are rounded or widened to it.
    Compute(DType),
    /// For f32 inputs, the type that the kernel's hardware multiplies fastest, with f32 sums; for
    /// other inputs, the type they are stored in. The plan of the report names the type.
    Fastest,
}

/// Settings of an [`Attention`](crate::Attention). The default is dense attention on one rank.
#[derive(Debug, Clone)]
pub struct Builder {
    pub(crate) pattern: Pattern,
    key_lengths: Option<KeyLengths>,
    pub(crate) ranks: usize,
    pub(crate) cut: Cut,
    pub(crate) balance: Option<Balance>,
    pub(crate) queries: Queries,
    pub(crate) auto: Option<Auto>,
    precision: Precision,
    scale: Option<f64>,
    softcap: Option<f64>,
    slopes: Option<Arc<[f64]>>,
    alibi: bool,
    dropout: Option<Dropout>,
    pub(crate) policy: CheckpointPolicy,
    pub(crate) deadline: Duration,
    pub(crate) redundancy: usize,
    pub(crate) schedule: Schedule,
    pub(crate) bits: Bits,
    pub(crate) drill: Vec<Fault>,
    pub(crate) limits: CacheLimits,
}

impl Default for Builder {
    fn default() -> Builder {
        Builder {
            pattern: Pattern::dense(),
            key_lengths: None,
            ranks: 1,
            cut: Cut::Contiguous,
            balance: None,
            queries: Queries::Sharded,
            auto: None,
            precision: Precision::Stored,
            scale: None,
            softcap: None,
            slopes: None,
            alibi: false,
            dropout: None,
            policy: CheckpointPolicy::KeepOutput,
            deadline: DEADLINE,
            redundancy: 0,
            schedule: Schedule::RING,
            bits: Bits::Planned,
            drill: Vec::new(),
            limits: CacheLimits::default(),
        }
    }
}

impl Builder {
    /// Which query attends to which key.
    pub fn pattern(mut self, pattern: Pattern) -> Builder {
        self.pattern = pattern;
        self
    }

    /// For the packed rows of right-padded batches: [`KeyLengths::pack`] what a call is given,
    /// [`KeyLengths::unpack`] what it returns. Each entry of the batch becomes a document, or those
    /// of the pattern that begin before its end.
    pub fn key_lengths(mut self, lengths: &KeyLengths) -> Result<Builder, RequestError> {
        lengths.pattern(&self.pattern)?;
        self.key_lengths = Some(lengths.clone());
        Ok(self)
    }

    /// Number of ranks that the tokens are sharded over.
    pub fn ranks(mut self, ranks: usize) -> Builder {
        self.ranks = ranks;
        self
    }

    /// How the tokens are divided among the ranks.
    pub fn sharding(mut self, cut: Cut) -> Builder {
        self.cut = cut;
        self
    }

    /// Cuts tokens so that all ranks have equal work, whatever the mask and the documents; leave
    /// the sharding at its default. None for the sharding that was given.
    pub fn balanced(mut self, balance: Option<Balance>) -> Builder {
        self.balance = balance;
        self
    }

    /// Chooses settings automatically: for each shape, Encke plans and times the alternatives and
    /// runs the fastest that fits. A setting that `auto` leaves open overrides the one given here.
    pub fn auto(mut self, auto: Auto) -> Builder {
        self.auto = Some(auto);
        self
    }

    /// Whether each rank holds its own queries or all of them.
    pub fn queries(mut self, queries: Queries) -> Builder {
        self.queries = queries;
        self
    }

    /// The compute type.
    pub fn precision(mut self, precision: Precision) -> Builder {
        self.precision = precision;
        self
    }

    /// The softmax scale; the default is 1/sqrt(d). A call is refused unless it is 0 or its size is
    /// within [`DType::scales`](encke_core::DType::scales).
    pub fn scale(mut self, scale: f64) -> Builder {
        self.scale = Some(scale);
        self
    }

    /// Limits scores to this size: x becomes `softcap * tanh(x / softcap)`. None for no limit.
    pub fn softcap(mut self, softcap: Option<f64>) -> Builder {
        self.softcap = softcap;
        self
    }

    /// Drops pairs after the softmax, and divides the others by the probability to be kept. A pair
    /// has one coin of the seed, on every rank: the result does not depend on the ring. Pass
    /// another seed with every call, and the same one to its backward pass: `with_seed` of what is
    /// built shares its plans and buffers. None for no dropout.
    pub fn dropout(mut self, dropout: Option<Dropout>) -> Builder {
        self.dropout = dropout;
        self
    }

    /// ALiBi slopes, one for each query head: slope times distance is subtracted from the score.
    /// None for no slopes. [`alibi_slopes`](encke_core::alibi_slopes) makes the usual ones.
    pub fn slopes(mut self, slopes: Option<Arc<[f64]>>) -> Builder {
        self.slopes = slopes;
        self
    }

    /// The usual ALiBi slopes for any number of heads, where [`Builder::slopes`] gives none.
    pub fn alibi(mut self, alibi: bool) -> Builder {
        self.alibi = alibi;
        self
    }

    /// What the forward pass saves for the backward pass.
    pub fn checkpoint(mut self, policy: CheckpointPolicy) -> Builder {
        self.policy = policy;
        self
    }

    /// Number of other ranks that hold a copy of each rank's inputs: a call survives the deaths of
    /// that many neighbouring ranks. Needs more ranks than that, and sharded queries.
    pub fn redundancy(mut self, redundancy: usize) -> Builder {
        self.redundancy = redundancy;
        self
    }

    /// How parcels travel: one at a time (the default), or several at once for more memory.
    pub fn schedule(mut self, schedule: Schedule) -> Builder {
        self.schedule = schedule;
        self
    }

    /// What the bits of results may depend on: the plan (the default), or the call alone, so that
    /// every ring has the same bits ([`Bits::Invariant`]). That takes a contiguous sharding; one
    /// of whole tensors is cut between tiles, one of shards that the caller cuts must be.
    pub fn bits(mut self, bits: Bits) -> Builder {
        self.bits = bits;
        self
    }

    /// Fault injection: these ranks die in every call, which needs redundancy.
    pub fn drill(mut self, faults: Vec<Fault>) -> Builder {
        self.drill = faults;
        self
    }

    /// Limits of the plans and buffers that are cached between calls.
    pub fn keep_at_most(mut self, limits: CacheLimits) -> Builder {
        self.limits = limits;
        self
    }

    /// How long an exchange may wait for another rank before the call fails.
    pub fn deadline(mut self, deadline: Duration) -> Builder {
        self.deadline = deadline;
        self
    }

    /// The settings with the documents of their key lengths, or which of them do not go together
    /// for any call.
    pub(crate) fn complete(mut self) -> Result<Builder, RequestError> {
        let firsts = matches!(self.cut, Cut::Firsts(_) | Cut::Ranges(_));
        let refusals = [
            (
                self.key_lengths.is_some() && firsts,
                "key lengths",
                "first tokens of ranks",
                "rows are packed before they are divided, so that first tokens would be others; \
                 use the balanced sharding",
            ),
            (
                self.key_lengths.is_some() && self.pattern.mode() == Mode::Fkodom,
                "key lengths",
                "fkodom mode",
                "its rows are divided by sums over the whole sequence; use group mode",
            ),
            (
                self.balance.is_some() && self.cut != Cut::Contiguous,
                "a balanced sharding",
                "another sharding",
                "the first one decides the cut; leave one of them out",
            ),
            (
                self.balance.is_some() && self.bits.tile().is_some(),
                "a balanced sharding",
                "invariant bits",
                "equal work cuts inside of tiles; use the contiguous sharding",
            ),
            (
                !self.drill.is_empty() && self.redundancy == 0,
                "injected deaths (a drill)",
                "redundancy 0",
                "no call survives them; give a redundancy of at least 1",
            ),
        ];
        let found = refusals.into_iter().find(|(refused, ..)| *refused);
        if let Some((_, one, other, reason)) = found {
            return Err(RequestError::Excludes { one, other, reason });
        }
        if let Some(lengths) = self.key_lengths.take() {
            self.pattern = lengths.pattern(&self.pattern)?;
        }
        Ok(self)
    }

    pub(crate) fn new_sharding(&self) -> Result<Sharding, RequestError> {
        Sharding::new(self.ranks, self.cut.clone())
    }

    /// The compute type for inputs stored as `stored`.
    pub(crate) fn compute_dtype<K: Kernel>(&self, stored: DType, kernel: &K) -> DType {
        match (self.precision, stored) {
            (Precision::Compute(dtype), _) => dtype,
            (Precision::Fastest, DType::F32) => kernel.fastest_dtype(),
            (Precision::Stored | Precision::Fastest, stored) => stored,
        }
    }

    /// These settings with another seed of the dropout, if there is any.
    pub(crate) fn with_seed(mut self, seed: u64) -> Builder {
        self.dropout = self.dropout.map(|dropout| dropout.with_seed(seed));
        self
    }

    /// The ring of a call where no setting is chosen automatically.
    pub(crate) fn ring_config(&self, sharding: &Sharding) -> RingConfig {
        RingConfig {
            sharding: sharding.clone(),
            queries: self.queries,
            schedule: self.schedule,
        }
    }

    /// The request of a call with these settings; `dtype` is the compute type.
    pub(crate) fn request(
        &self,
        ring_config: RingConfig,
        shape: Shape,
        dtype: DType,
        pass: Pass,
    ) -> Request {
        let RingConfig {
            sharding,
            queries,
            schedule,
        } = ring_config;
        // One rank has all queries either way, and needs no second copy of its output.
        let queries = match sharding.ranks() {
            1 => Queries::Sharded,
            _ => queries,
        };
        // Equal speeds are never refused.
        let even = self
            .balance
            .map(|balance| balance.cut(&self.pattern, &shape, sharding.ranks()));
        let sharding = match even {
            Some(Ok(cut)) => Sharding::new(sharding.ranks(), cut).unwrap_or(sharding),
            _ => sharding,
        };
        let usual = || self.alibi.then(|| alibi_slopes(shape.heads));
        let slopes = self.slopes.clone().or_else(usual);
        Request {
            schedule: schedule.on(sharding.ranks()),
            shape,
            pattern: self.pattern.clone(),
            sharding,
            queries,
            dtype,
            scale: self.scale,
            softcap: self.softcap,
            slopes,
            dropout: self.dropout,
            pass,
            redundancy: self.redundancy,
            bits: self.bits,
        }
    }
}

/// The settings of one call that [`Auto`] can choose.
#[derive(Debug, Clone)]
pub(crate) struct RingConfig {
    pub sharding: Sharding,
    pub queries: Queries,
    pub schedule: Schedule,
}
