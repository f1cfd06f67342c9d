//! The interface: a builder, a forward pass, a backward pass.
//!
//! Nothing is computed here: what a pass is beside its ring is in `passes`.

use std::sync::Arc;
use std::time::Duration;

use encke_core::kernel::Kernel;
use encke_core::plan::{Pass, Plan, Queries, Request, Schedule};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{DType, Error as RequestError, Pattern, Shape, Tensor, View};
use encke_cpu::CpuKernel;
use encke_ring::{
    CacheLimits, CacheStats, Fault, RankError, RankMemory, RingError as Error, ThreadRing, Trace,
};

use crate::auto::{Auto, Choices, Way};
use crate::checkpoint::{Checkpoint, CheckpointPolicy, Kept};
use crate::passes::{self, Attended};
use crate::shard::ShardAttention;

/// How long an exchange waits for a neighbour unless told otherwise. A neighbour may be busy with
/// a long job of its own, so this is a guard against hanging for ever, not against slowness.
const DEADLINE: Duration = Duration::from_secs(600);

/// The type that numbers are computed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// The type the inputs are stored in.
    #[default]
    Stored,
    /// This one; inputs are rounded or widened to it.
    Compute(DType),
    /// For inputs in f32 the type that the kernel's hardware multiplies fastest, sums staying in
    /// f32; for all others the type they are stored in. What it was is in the plan of the report.
    Fastest,
}

/// What a forward pass returns.
#[derive(Debug)]
pub struct Forward {
    /// The output, `[b, n, heads, d]`, in the compute type.
    pub out: Arc<Tensor>,
    /// The log-sum-exp of each row, `[b, n, heads, 1]`, in f32 (f64 for f64).
    pub lse: Arc<Tensor>,
    /// What the backward pass wants.
    pub checkpoint: Checkpoint,
    /// What happened.
    pub report: Report,
}

impl Forward {
    pub(crate) fn new(attended: Attended, policy: CheckpointPolicy) -> Result<Forward, Error> {
        let Attended { kept, out, report } = attended;
        let lse = Arc::clone(&kept.lse);
        Ok(Forward {
            out,
            lse,
            checkpoint: Checkpoint::new(kept, policy)?,
            report,
        })
    }
}

/// What a backward pass returns.
#[derive(Debug)]
pub struct Backward {
    /// Gradient of q.
    pub dq: Tensor,
    /// Gradient of k.
    pub dk: Tensor,
    /// Gradient of v.
    pub dv: Tensor,
    /// What happened; with [`CheckpointPolicy::Recompute`], in the backward pass proper.
    pub report: Report,
}

/// What a call did, beside its results.
#[derive(Debug)]
pub struct Report {
    /// The plan it carried out.
    pub plan: Arc<Plan>,
    /// Times and bytes.
    pub trace: Trace,
    /// Memory of each rank, planned and allocated; after a death, of those that lived.
    pub memory: Vec<RankMemory>,
    /// The ranks that died and were survived, and how.
    pub deaths: Vec<(usize, RankError)>,
}

/// Settings of an [`Attention`]; each has a default, dense attention on one rank.
#[derive(Debug, Clone)]
pub struct Builder {
    pub(crate) pattern: Pattern,
    pub(crate) ranks: usize,
    pub(crate) cut: Cut,
    pub(crate) queries: Queries,
    pub(crate) auto: Option<Auto>,
    precision: Precision,
    scale: Option<f64>,
    pub(crate) policy: CheckpointPolicy,
    pub(crate) deadline: Duration,
    pub(crate) redundancy: usize,
    pub(crate) schedule: Schedule,
    drill: Vec<Fault>,
    limits: CacheLimits,
}

impl Builder {
    /// Which query sees which key.
    pub fn pattern(mut self, pattern: Pattern) -> Builder {
        self.pattern = pattern;
        self
    }

    /// How many ranks the tokens are spread over.
    pub fn ranks(mut self, ranks: usize) -> Builder {
        self.ranks = ranks;
        self
    }

    /// How the tokens are cut.
    pub fn sharding(mut self, cut: Cut) -> Builder {
        self.cut = cut;
        self
    }

    /// Leaves choices to Encke: for each shape, alternatives are planned and timed, and the best of
    /// those that fit is carried out. What is left open there is not taken from here.
    pub fn auto(mut self, auto: Auto) -> Builder {
        self.auto = Some(auto);
        self
    }

    /// Whether each rank holds its own queries or all of them.
    pub fn queries(mut self, queries: Queries) -> Builder {
        self.queries = queries;
        self
    }

    /// The type that numbers are computed in.
    pub fn precision(mut self, precision: Precision) -> Builder {
        self.precision = precision;
        self
    }

    /// The softmax scale, instead of 1/sqrt(d).
    pub fn scale(mut self, scale: f64) -> Builder {
        self.scale = Some(scale);
        self
    }

    /// What is kept for the backward pass.
    pub fn checkpoint(mut self, policy: CheckpointPolicy) -> Builder {
        self.policy = policy;
        self
    }

    /// How many other ranks keep each rank's inputs: so many neighbours may die in a call, and it
    /// still ends with the right result. Needs more ranks than that, each with its own queries.
    pub fn redundancy(mut self, redundancy: usize) -> Builder {
        self.redundancy = redundancy;
        self
    }

    /// How parcels go round: one at a time (the default), or more of them at once for more memory.
    pub fn schedule(mut self, schedule: Schedule) -> Builder {
        self.schedule = schedule;
        self
    }

    /// Ranks that die on purpose in every call, to see that it survives: a drill. Without
    /// redundancy nobody dies.
    pub fn drill(mut self, faults: Vec<Fault>) -> Builder {
        self.drill = faults;
        self
    }

    /// What is kept between calls at most: plans, and buffers.
    pub fn keep_at_most(mut self, limits: CacheLimits) -> Builder {
        self.limits = limits;
        self
    }

    /// How long an exchange may wait for another rank before the call ends with an error.
    pub fn deadline(mut self, deadline: Duration) -> Builder {
        self.deadline = deadline;
        self
    }

    /// The attention with these settings, on the CPU.
    pub fn build(self) -> Result<Attention, Error> {
        self.build_on(CpuKernel::new()?)
    }

    /// One rank of the attention with these settings, on the CPU, where the other ranks are
    /// elsewhere.
    pub fn build_shard(self, rank: usize) -> Result<ShardAttention, Error> {
        self.build_shard_on(CpuKernel::new()?, rank)
    }

    /// One rank of the attention with these settings, where the other ranks are elsewhere.
    pub fn build_shard_on<K: Kernel>(
        self,
        kernel: K,
        rank: usize,
    ) -> Result<ShardAttention<K>, Error> {
        ShardAttention::new(self, kernel, rank)
    }

    /// The attention with these settings, on any device that has a kernel.
    pub fn build_on<K: Kernel>(self, kernel: K) -> Result<Attention<K>, Error> {
        Ok(Attention {
            sharding: self.new_sharding()?,
            ring: ThreadRing::new(kernel, self.deadline)
                .with_faults(self.drill.clone())
                .with_limits(self.limits),
            settings: self,
            choices: Choices::default(),
        })
    }
}

impl Builder {
    pub(crate) fn new_sharding(&self) -> Result<Sharding, RequestError> {
        Sharding::new(self.ranks, self.cut.clone())
    }

    /// The type that inputs of a type are computed in on a kernel.
    pub(crate) fn compute_dtype<K: Kernel>(&self, stored: DType, kernel: &K) -> DType {
        match (self.precision, stored) {
            (Precision::Compute(dtype), _) => dtype,
            (Precision::Fastest, DType::F32) => kernel.fastest_dtype(),
            (Precision::Stored | Precision::Fastest, stored) => stored,
        }
    }

    /// How a call is done where nothing is left open.
    pub(crate) fn way(&self, sharding: &Sharding) -> Way {
        Way {
            sharding: sharding.clone(),
            queries: self.queries,
            schedule: self.schedule,
        }
    }

    /// What a call with these settings asks for, in the type it computes in.
    pub(crate) fn request(&self, way: Way, shape: Shape, dtype: DType, pass: Pass) -> Request {
        let Way {
            sharding,
            queries,
            schedule,
        } = way;
        // One rank has all queries either way, and needs no second copy of its output.
        let queries = match sharding.ranks() {
            1 => Queries::Sharded,
            _ => queries,
        };
        Request {
            schedule: schedule.on(sharding.ranks()),
            shape,
            pattern: self.pattern.clone(),
            sharding,
            queries,
            dtype,
            scale: self.scale,
            pass,
            redundancy: self.redundancy,
        }
    }
}

/// Attention with fixed settings. Plans and buffers are kept between calls.
pub struct Attention<K: Kernel = CpuKernel> {
    pub(crate) settings: Builder,
    pub(crate) choices: Choices,
    pub(crate) sharding: Sharding,
    pub(crate) ring: ThreadRing<K>,
}

impl Attention {
    /// Dense attention on one rank, to be changed.
    pub fn builder() -> Builder {
        Builder {
            pattern: Pattern::dense(),
            ranks: 1,
            cut: Cut::Contiguous,
            queries: Queries::Sharded,
            auto: None,
            precision: Precision::Stored,
            scale: None,
            policy: CheckpointPolicy::KeepOutput,
            deadline: DEADLINE,
            redundancy: 0,
            schedule: Schedule::RING,
            drill: Vec::new(),
            limits: CacheLimits::default(),
        }
    }
}

impl<K: Kernel> Attention<K> {
    /// Which query sees which key.
    pub fn pattern(&self) -> &Pattern {
        &self.settings.pattern
    }

    /// How often plans and buffers were found rather than made.
    pub fn stats(&self) -> CacheStats {
        self.ring.stats()
    }

    /// What is kept between calls at most.
    pub fn limits(&self) -> CacheLimits {
        self.ring.limits()
    }

    /// The kernel that computes.
    pub fn kernel(&self) -> &K {
        self.ring.kernel()
    }

    /// The kernel back, when nothing else is wanted.
    pub fn into_kernel(self) -> K {
        self.ring.into_kernel()
    }

    /// The plan for a shape: what would be computed, held and sent. Nothing is allocated.
    pub fn plan(&self, shape: Shape, dtype: DType, pass: Pass) -> Result<Arc<Plan>, Error> {
        self.ring.plan(&self.request(shape, dtype, pass)?)
    }

    /// Attention.
    pub fn forward(&self, q: &View<'_>, k: &View<'_>, v: &View<'_>) -> Result<Forward, Error> {
        let request = self.request_for(q, k, v, Pass::Forward)?;
        let attended = self.attend(&request, q, k, v)?;
        Forward::new(attended, self.settings.policy)
    }

    /// Gradients of a loss with respect to q, k and v, given those with respect to out (`dout`)
    /// and, if the loss uses it, to the lse (`dlse`, `[b, n, heads, 1]`).
    pub fn backward(
        &self,
        q: &View<'_>,
        k: &View<'_>,
        v: &View<'_>,
        checkpoint: &Checkpoint,
        dout: &View<'_>,
        dlse: Option<&View<'_>>,
    ) -> Result<Backward, Error> {
        if let Some(kept) = checkpoint.fetch()? {
            return self.backward_from(q, k, v, &kept.view(), dout, dlse);
        }
        let forward = self.request_for(q, k, v, Pass::Forward)?;
        let recomputed = self.attend(&forward, q, k, v)?.kept;
        self.backward_from(q, k, v, &recomputed.view(), dout, dlse)
    }

    /// The same from what the caller kept of the forward pass. `dout` has the type of q, or that of
    /// out where another one was computed in.
    pub fn backward_from(
        &self,
        q: &View<'_>,
        k: &View<'_>,
        v: &View<'_>,
        kept: &Kept<'_>,
        dout: &View<'_>,
        dlse: Option<&View<'_>>,
    ) -> Result<Backward, Error> {
        let pass = Pass::Backward {
            dlse: dlse.is_some(),
        };
        let request = self.request_for(q, k, v, pass)?;
        passes::differentiate(&request, [*q, *k, *v], kept, (dout, dlse), |inputs| {
            self.ring.run(&request, inputs)
        })
    }

    /// Runs the forward pass and combines slots into heads where they are apart.
    fn attend(
        &self,
        request: &Request,
        q: &View<'_>,
        k: &View<'_>,
        v: &View<'_>,
    ) -> Result<Attended, Error> {
        passes::attend(request, [*q, *k, *v], |inputs| {
            self.ring.run(request, inputs)
        })
    }

    fn request(&self, shape: Shape, dtype: DType, pass: Pass) -> Result<Request, Error> {
        let way = self.ring_for(shape, dtype, pass)?;
        Ok(self.request_on(way, shape, dtype, pass))
    }

    /// The type that inputs of a type are computed in.
    pub fn compute_dtype(&self, stored: DType) -> DType {
        self.settings.compute_dtype(stored, self.kernel())
    }

    pub(crate) fn request_on(&self, way: Way, shape: Shape, dtype: DType, pass: Pass) -> Request {
        let dtype = self.compute_dtype(dtype);
        self.settings.request(way, shape, dtype, pass)
    }

    /// The request that tensors amount to, if they agree with one another.
    fn request_for(
        &self,
        q: &View<'_>,
        k: &View<'_>,
        v: &View<'_>,
        pass: Pass,
    ) -> Result<Request, Error> {
        let shape = shape_of(q, k, v, q.dims()[1])?;
        self.request(shape, q.dtype(), pass)
    }
}

/// The shape of a call on `tokens` tokens whose rows these are, if they agree with one another.
pub(crate) fn shape_of(
    q: &View<'_>,
    k: &View<'_>,
    v: &View<'_>,
    tokens: usize,
) -> Result<Shape, RequestError> {
    let [batch, rows, heads, dim] = q.dims();
    let kv_heads = k.dims()[2];
    for (name, view) in [("k", k), ("v", v)] {
        same_shape(name, view, [batch, rows, kv_heads, dim])?;
        same_type(name, view, q)?;
    }
    Shape::new(batch, tokens, heads, kv_heads, dim)
}

pub(crate) fn same_shape(
    tensor: &'static str,
    view: &View<'_>,
    expected: [usize; 4],
) -> Result<(), RequestError> {
    if view.dims() == expected {
        return Ok(());
    }
    Err(RequestError::ShapeMismatch {
        tensor,
        got: view.dims().to_vec(),
        expected: expected.to_vec(),
    })
}

pub(crate) fn same_type(
    tensor: &'static str,
    view: &View<'_>,
    q: &View<'_>,
) -> Result<(), RequestError> {
    if view.dtype() == q.dtype() {
        return Ok(());
    }
    Err(RequestError::DTypeMismatch {
        tensor,
        got: view.dtype(),
        expected: q.dtype(),
    })
}
