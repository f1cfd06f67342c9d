//! The interface: a builder, a forward pass, a backward pass.
//!
//! Nothing is computed here except the combination of branches that keep slots of their own, which
//! is row by row and on the host (see `mixing`).

use std::sync::Arc;
use std::time::Duration;

use encke_core::kernel::Kernel;
use encke_core::mixing::{self, SlotBackward};
use encke_core::plan::program::Role;
use encke_core::plan::{Pass, Plan, Queries, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{DType, Error as RequestError, Pattern, Shape, Tensor, View};
use encke_cpu::CpuKernel;
use encke_ring::{
    CacheStats, Fault, Outcome, RankError, RankMemory, RingError as Error, ThreadRing, Trace,
};

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
}

/// What is kept from the forward pass for the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CheckpointPolicy {
    /// out and lse: the backward pass recomputes nothing and communicates nothing twice.
    #[default]
    KeepOutput,
    /// Nothing: the backward pass runs the forward pass again first.
    Recompute,
}

/// What a forward pass kept. Sharing `out` with the caller costs no memory.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    kept: Option<Slots>,
}

/// The output as the ring made it: by slot, which is by head except where branches stay apart
/// (see [`Pattern::splits_slots`]).
#[derive(Debug, Clone)]
struct Slots {
    slot_out: Arc<Tensor>,
    slot_lse: Arc<Tensor>,
    lse: Arc<Tensor>,
}

/// What a forward pass left, in memory of the caller: a checkpoint for those who keep tensors
/// themselves.
#[derive(Debug, Clone, Copy)]
pub struct Kept<'a> {
    /// The output by slot.
    pub slot_out: View<'a>,
    /// Its lse by slot.
    pub slot_lse: View<'a>,
    /// The lse by head.
    pub lse: View<'a>,
}

impl Checkpoint {
    /// Keeps nothing: the backward pass will run the forward pass again.
    pub fn nothing() -> Checkpoint {
        Checkpoint { kept: None }
    }

    /// What it holds, to be read.
    pub fn kept(&self) -> Option<Kept<'_>> {
        self.kept.as_ref().map(Slots::view)
    }

    /// Out and lse by slot, for a caller who keeps them in ways of its own.
    pub fn into_slots(self) -> Option<(Arc<Tensor>, Arc<Tensor>)> {
        self.kept.map(|kept| (kept.slot_out, kept.slot_lse))
    }
}

impl Slots {
    fn view(&self) -> Kept<'_> {
        Kept {
            slot_out: self.slot_out.view(),
            slot_lse: self.slot_lse.view(),
            lse: self.lse.view(),
        }
    }
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
    pattern: Pattern,
    ranks: usize,
    cut: Cut,
    queries: Queries,
    precision: Precision,
    scale: Option<f64>,
    policy: CheckpointPolicy,
    deadline: Duration,
    redundancy: usize,
    drill: Vec<Fault>,
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

    /// Ranks that die on purpose in every call, to see that it survives: a drill. Without
    /// redundancy nobody dies.
    pub fn drill(mut self, faults: Vec<Fault>) -> Builder {
        self.drill = faults;
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

    /// The attention with these settings, on any device that has a kernel.
    pub fn build_on<K: Kernel>(self, kernel: K) -> Result<Attention<K>, Error> {
        Ok(Attention {
            sharding: Sharding::new(self.ranks, self.cut.clone())?,
            ring: ThreadRing::new(kernel, self.deadline).with_faults(self.drill.clone()),
            settings: self,
        })
    }
}

/// Attention with fixed settings. Plans and buffers are kept between calls.
pub struct Attention<K: Kernel = CpuKernel> {
    settings: Builder,
    sharding: Sharding,
    ring: ThreadRing<K>,
}

impl Attention {
    /// Dense attention on one rank, to be changed.
    pub fn builder() -> Builder {
        Builder {
            pattern: Pattern::dense(),
            ranks: 1,
            cut: Cut::Contiguous,
            queries: Queries::Sharded,
            precision: Precision::Stored,
            scale: None,
            policy: CheckpointPolicy::KeepOutput,
            deadline: DEADLINE,
            redundancy: 0,
            drill: Vec::new(),
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
        self.ring.plan(&self.request(shape, dtype, pass))
    }

    /// Attention.
    pub fn forward(&self, q: &View<'_>, k: &View<'_>, v: &View<'_>) -> Result<Forward, Error> {
        let request = self.request_for(q, k, v, Pass::Forward)?;
        let (kept, out, report) = self.attend(&request, q, k, v)?;
        let lse = Arc::clone(&kept.lse);
        let kept = (self.settings.policy == CheckpointPolicy::KeepOutput).then_some(kept);
        Ok(Forward {
            out,
            lse,
            checkpoint: Checkpoint { kept },
            report,
        })
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
        if let Some(kept) = checkpoint.kept() {
            return self.backward_from(q, k, v, &kept, dout, dlse);
        }
        let forward = self.request_for(q, k, v, Pass::Forward)?;
        let (recomputed, ..) = self.attend(&forward, q, k, v)?;
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
        let shape = &request.shape;
        let Kept {
            slot_out,
            slot_lse,
            lse,
        } = kept;
        same_shape("dout", dout, q.dims())?;
        if dout.dtype() != request.dtype {
            same_type("dout", dout, q)?;
        }
        let cells = [shape.batch, shape.tokens, shape.heads, 1];
        same_shape("lse", lse, cells)?;
        if let Some(dlse) = dlse {
            same_shape("dlse", dlse, cells)?;
        }
        let pattern = &self.settings.pattern;
        if pattern.splits_slots() {
            let slots = mixing::spread(pattern, shape, (slot_out, slot_lse), lse, dout, dlse)?;
            let SlotBackward {
                out,
                lse,
                dout,
                dlse,
            } = &slots;
            let dlse = dlse.as_ref().map(Tensor::view);
            let upstream = (&out.view(), &lse.view(), &dout.view(), dlse.as_ref());
            self.differentiate(&request, (q, k, v), upstream)
        } else {
            self.differentiate(&request, (q, k, v), (slot_out, slot_lse, dout, dlse))
        }
    }

    /// Runs the forward pass and combines slots into heads where they are apart.
    fn attend(
        &self,
        request: &Request,
        q: &View<'_>,
        k: &View<'_>,
        v: &View<'_>,
    ) -> Result<(Slots, Arc<Tensor>, Report), Error> {
        let inputs = [(Role::Q, *q), (Role::K, *k), (Role::V, *v)];
        let mut outcome = self.ring.run(request, &inputs)?;
        let slot_out = Arc::new(taken(&mut outcome, Role::Out));
        let slot_lse = Arc::new(taken(&mut outcome, Role::Lse));
        let pattern = &request.pattern;
        let (out, lse) = if pattern.splits_slots() {
            let dtype = request.dtype;
            let (out, lse) = mixing::combine(pattern, &request.shape, &slot_out, &slot_lse, dtype);
            (Arc::new(out), Arc::new(lse))
        } else {
            (Arc::clone(&slot_out), Arc::clone(&slot_lse))
        };
        let kept = Slots {
            slot_out,
            slot_lse,
            lse,
        };
        Ok((kept, out, report(outcome)))
    }

    /// Runs the backward pass on operands given by slot.
    fn differentiate(
        &self,
        request: &Request,
        (q, k, v): (&View<'_>, &View<'_>, &View<'_>),
        (out, lse, dout, dlse): (&View<'_>, &View<'_>, &View<'_>, Option<&View<'_>>),
    ) -> Result<Backward, Error> {
        let mut inputs = vec![
            (Role::Q, *q),
            (Role::K, *k),
            (Role::V, *v),
            (Role::Out, *out),
            (Role::Lse, *lse),
            (Role::Dout, *dout),
        ];
        inputs.extend(dlse.map(|dlse| (Role::Dlse, *dlse)));
        let mut outcome = self.ring.run(request, &inputs)?;
        Ok(Backward {
            dq: taken(&mut outcome, Role::Dq),
            dk: taken(&mut outcome, Role::Dk),
            dv: taken(&mut outcome, Role::Dv),
            report: report(outcome),
        })
    }

    fn request(&self, shape: Shape, dtype: DType, pass: Pass) -> Request {
        // One rank has all queries either way, and needs no second copy of its output.
        let queries = match self.sharding.ranks() {
            1 => Queries::Sharded,
            _ => self.settings.queries,
        };
        Request {
            shape,
            pattern: self.settings.pattern.clone(),
            sharding: self.sharding.clone(),
            queries,
            dtype: match self.settings.precision {
                Precision::Stored => dtype,
                Precision::Compute(dtype) => dtype,
            },
            scale: self.settings.scale,
            pass,
            redundancy: self.settings.redundancy,
        }
    }

    /// The request that tensors amount to, if they agree with one another.
    fn request_for(
        &self,
        q: &View<'_>,
        k: &View<'_>,
        v: &View<'_>,
        pass: Pass,
    ) -> Result<Request, Error> {
        let [batch, tokens, heads, dim] = q.dims();
        let kv_heads = k.dims()[2];
        let kv = [batch, tokens, kv_heads, dim];
        for (name, view) in [("k", k), ("v", v)] {
            same_shape(name, view, kv)?;
            same_type(name, view, q)?;
        }
        let shape = Shape::new(batch, tokens, heads, kv_heads, dim)?;
        Ok(self.request(shape, q.dtype(), pass))
    }
}

fn taken(outcome: &mut Outcome, role: Role) -> Tensor {
    let tensor = outcome.take(role);
    tensor.expect("a pass returns every output it has")
}

fn report(outcome: Outcome) -> Report {
    Report {
        plan: outcome.plan,
        trace: outcome.trace,
        memory: outcome.memory,
        deaths: outcome.deaths,
    }
}

fn same_shape(
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

fn same_type(tensor: &'static str, view: &View<'_>, q: &View<'_>) -> Result<(), RequestError> {
    if view.dtype() == q.dtype() {
        return Ok(());
    }
    Err(RequestError::DTypeMismatch {
        tensor,
        got: view.dtype(),
        expected: q.dtype(),
    })
}
