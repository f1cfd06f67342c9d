//! What a forward and a backward pass do around their ring: check tensors, combine branches that
//! keep separate slots (row by row, on the host; see `mixing`), name the results.
//!
//! The decision here: a ring is a function from inputs to an outcome, so that [`Attention`] with
//! all ranks and [`ShardAttention`] with one rank share this code.
//!
//! [`Attention`]: crate::Attention
//! [`ShardAttention`]: crate::ShardAttention

use std::sync::Arc;

use encke_core::denominator::Denominator;
use encke_core::mixing::{self, SlotBackward};
use encke_core::plan::Request;
use encke_core::plan::program::Role;
use encke_core::sharding::Run;
use encke_core::{DType, Error as RequestError, Shape, Tensor, View, sinks};
use encke_ring::{Outcome, RingError as Error};

use crate::checkpoint::{Checkpoint, CheckpointPolicy, SavedOutput, SlotResults};
use crate::results::{Backward, Forward, Report};

/// A forward pass's results, before the checkpoint policy is applied.
pub(crate) struct ForwardResult {
    pub saved: SlotResults,
    pub out: Arc<Tensor>,
    pub sinks: Option<Arc<[f64]>>,
    pub report: Report,
}

impl ForwardResult {
    pub(crate) fn into_forward(self, policy: CheckpointPolicy) -> Result<Forward, Error> {
        let lse = Arc::clone(&self.saved.lse);
        let mut checkpoint = Checkpoint::new(self.saved, policy)?;
        checkpoint.sinks = self.sinks;
        Ok(Forward {
            out: self.out,
            lse,
            checkpoint,
            report: self.report,
        })
    }
}

/// Runs the forward pass on these `queries` (by index in the whole q), adds the extra terms of the
/// denominators, and combines slots into heads where branches keep separate slots.
pub(crate) fn attend(
    request: &Request,
    queries: &[Run],
    [q, k, v]: [View<'_>; 3],
    sinks: Option<&[f64]>,
    ring: impl FnOnce(&[(Role, View<'_>)]) -> Result<Outcome, Error>,
) -> Result<ForwardResult, Error> {
    let pattern = &request.pattern;
    let extra = Denominator::new(pattern, &request.shape, sinks)?;
    let mut outcome = ring(&[(Role::Q, q), (Role::K, k), (Role::V, v)])?;
    let mut slot_out = take_output(&mut outcome, Role::Out);
    let mut slot_lse = take_output(&mut outcome, Role::Lse);
    extra.apply(queries, &mut slot_out, &mut slot_lse);
    let (slot_out, slot_lse) = (Arc::new(slot_out), Arc::new(slot_lse));
    let (out, lse) = if pattern.splits_slots() {
        let shape = local_shape(request, &q);
        let (out, lse) = mixing::combine(pattern, &shape, &slot_out, &slot_lse, request.dtype)?;
        (Arc::new(out), Arc::new(lse))
    } else {
        (Arc::clone(&slot_out), Arc::clone(&slot_lse))
    };
    let saved = SlotResults {
        slot_out,
        slot_lse,
        lse,
    };
    Ok(ForwardResult {
        saved,
        out,
        sinks: sinks.map(Arc::from),
        report: report(outcome),
    })
}

/// Runs the backward pass, given the saved forward output and the gradients of out and the lse.
pub(crate) fn differentiate(
    request: &Request,
    qkv: [View<'_>; 3],
    saved: &SavedOutput<'_>,
    (dout, dlse): (&View<'_>, Option<&View<'_>>),
    ring: impl FnOnce(&[(Role, View<'_>)]) -> Result<Outcome, Error>,
) -> Result<Backward, Error> {
    let SavedOutput {
        slot_out,
        slot_lse,
        lse,
    } = saved;
    let q = &qkv[0];
    let shape = local_shape(request, q);
    let queries = [shape.batch, shape.queries, shape.heads];
    let row = |width: usize| [queries[0], queries[1], queries[2], width];
    same_shape("dout", dout.dims(), row(shape.value_dim))?;
    if dout.dtype() != request.dtype {
        same_type("dout", dout.dtype(), q.dtype())?;
    }
    same_shape("lse", lse.dims(), row(1))?;
    if let Some(dlse) = dlse {
        same_shape("dlse", dlse.dims(), row(1))?;
    }
    let pattern = &request.pattern;
    let mut outcome = if pattern.splits_slots() {
        let slots = mixing::spread(pattern, &shape, (slot_out, slot_lse), lse, dout, dlse)?;
        let SlotBackward {
            out,
            lse,
            dout,
            dlse,
        } = &slots;
        let dlse = dlse.as_ref().map(Tensor::view);
        let results = [out.view(), lse.view(), dout.view()];
        ring(&backward_inputs(qkv, results, dlse))?
    } else {
        let results = [*slot_out, *slot_lse, *dout];
        ring(&backward_inputs(qkv, results, dlse.copied()))?
    };
    Ok(Backward {
        dq: take_output(&mut outcome, Role::Dq),
        dk: take_output(&mut outcome, Role::Dk),
        dv: take_output(&mut outcome, Role::Dv),
        dsinks: None,
        report: report(outcome),
    })
}

/// A backward pass with the gradient of its sinks, if it has any.
pub(crate) fn with_dsinks(
    backward: Backward,
    sinks: Option<&[f64]>,
    saved: &SavedOutput<'_>,
    (dout, dlse): (&View<'_>, Option<&View<'_>>),
) -> Result<Backward, Error> {
    let of = |sinks| sinks::gradient(sinks, [&saved.slot_out, &saved.slot_lse, dout], dlse);
    Ok(Backward {
        dsinks: sinks.map(of).transpose()?,
        ..backward
    })
}

/// The inputs of a backward pass by role.
pub(crate) fn backward_inputs<T>(
    [q, k, v]: [T; 3],
    [out, lse, dout]: [T; 3],
    dlse: Option<T>,
) -> Vec<(Role, T)> {
    let mut inputs = vec![
        (Role::Q, q),
        (Role::K, k),
        (Role::V, v),
        (Role::Out, out),
        (Role::Lse, lse),
        (Role::Dout, dout),
    ];
    inputs.extend(dlse.map(|dlse| (Role::Dlse, dlse)));
    inputs
}

/// The shape of the queries given: those of the whole sequence, or of one rank.
fn local_shape(request: &Request, q: &View<'_>) -> Shape {
    Shape {
        queries: q.dims()[1],
        ..request.shape
    }
}

pub(crate) fn take_output<T>(outcome: &mut Outcome<T>, role: Role) -> T {
    let tensor = outcome.take(role);
    tensor.expect("a pass returns all its outputs")
}

pub(crate) fn report<T>(outcome: Outcome<T>) -> Report {
    Report {
        plan: outcome.plan,
        trace: outcome.trace,
        memory: outcome.memory,
        deaths: outcome.deaths,
    }
}

/// Dimensions and type of a tensor.
pub(crate) fn signature(view: &View<'_>) -> ([usize; 4], DType) {
    (view.dims(), view.dtype())
}

/// The shape of a call on these q, k and v, if they agree with one another.
pub(crate) fn shape_of([q, k, v]: [([usize; 4], DType); 3]) -> Result<Shape, RequestError> {
    let ([batch, queries, heads, dim], dtype) = q;
    let [_, tokens, kv_heads, _] = k.0;
    let value_dim = v.0[3];
    for (name, (dims, of), width) in [("k", k, dim), ("v", v, value_dim)] {
        same_shape(name, dims, [batch, tokens, kv_heads, width])?;
        same_type(name, of, dtype)?;
    }
    let shape = Shape::new(batch, tokens, heads, kv_heads, dim)?;
    shape.with_queries(queries)?.with_value_dim(value_dim)
}

pub(crate) fn same_shape(
    tensor: &'static str,
    got: [usize; 4],
    expected: [usize; 4],
) -> Result<(), RequestError> {
    if got == expected {
        return Ok(());
    }
    Err(RequestError::ShapeMismatch {
        tensor,
        got: got.to_vec(),
        expected: expected.to_vec(),
    })
}

fn same_type(tensor: &'static str, got: DType, expected: DType) -> Result<(), RequestError> {
    if got == expected {
        return Ok(());
    }
    Err(RequestError::DTypeMismatch {
        tensor,
        got,
        expected,
    })
}
