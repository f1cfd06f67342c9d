//! A forward and a backward pass, whoever runs the ring: what goes in, what comes out, and the
//! combination of branches that keep slots of their own, which is row by row and on the host (see
//! `mixing`).
//!
//! The decision here: a ring is a function from inputs to an outcome, so that all ranks in this
//! process and one rank with its shard are the same to everything above them.

use std::sync::Arc;

use encke_core::mixing::{self, SlotBackward};
use encke_core::plan::Request;
use encke_core::plan::program::Role;
use encke_core::{Shape, Tensor, View};
use encke_ring::{Outcome, RingError as Error};

use crate::attention::{Backward, Report, same_shape, same_type};
use crate::checkpoint::{Kept, Slots};

/// What a forward pass made.
pub(crate) struct Attended {
    pub kept: Slots,
    pub out: Arc<Tensor>,
    pub report: Report,
}

/// Runs the forward pass and combines slots into heads where they are apart.
pub(crate) fn attend(
    request: &Request,
    [q, k, v]: [View<'_>; 3],
    ring: impl FnOnce(&[(Role, View<'_>)]) -> Result<Outcome, Error>,
) -> Result<Attended, Error> {
    let mut outcome = ring(&[(Role::Q, q), (Role::K, k), (Role::V, v)])?;
    let slot_out = Arc::new(taken(&mut outcome, Role::Out));
    let slot_lse = Arc::new(taken(&mut outcome, Role::Lse));
    let pattern = &request.pattern;
    let (out, lse) = if pattern.splits_slots() {
        let shape = shape_here(request, &q);
        let (out, lse) = mixing::combine(pattern, &shape, &slot_out, &slot_lse, request.dtype);
        (Arc::new(out), Arc::new(lse))
    } else {
        (Arc::clone(&slot_out), Arc::clone(&slot_lse))
    };
    let kept = Slots {
        slot_out,
        slot_lse,
        lse,
    };
    Ok(Attended {
        kept,
        out,
        report: report(outcome),
    })
}

/// Runs the backward pass, given what the forward pass left and the gradients of out and the lse.
pub(crate) fn differentiate(
    request: &Request,
    [q, k, v]: [View<'_>; 3],
    kept: &Kept<'_>,
    (dout, dlse): (&View<'_>, Option<&View<'_>>),
    ring: impl FnOnce(&[(Role, View<'_>)]) -> Result<Outcome, Error>,
) -> Result<Backward, Error> {
    let Kept {
        slot_out,
        slot_lse,
        lse,
    } = kept;
    let shape = shape_here(request, &q);
    same_shape("dout", dout, q.dims())?;
    if dout.dtype() != request.dtype {
        same_type("dout", dout, &q)?;
    }
    let cells = [shape.batch, shape.tokens, shape.heads, 1];
    same_shape("lse", lse, cells)?;
    if let Some(dlse) = dlse {
        same_shape("dlse", dlse, cells)?;
    }
    let run = |out: &View<'_>, lse: &View<'_>, dout: &View<'_>, dlse: Option<&View<'_>>| {
        let mut inputs = vec![
            (Role::Q, q),
            (Role::K, k),
            (Role::V, v),
            (Role::Out, *out),
            (Role::Lse, *lse),
            (Role::Dout, *dout),
        ];
        inputs.extend(dlse.map(|dlse| (Role::Dlse, *dlse)));
        ring(&inputs)
    };
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
        run(&out.view(), &lse.view(), &dout.view(), dlse.as_ref())?
    } else {
        run(slot_out, slot_lse, dout, dlse)?
    };
    Ok(Backward {
        dq: taken(&mut outcome, Role::Dq),
        dk: taken(&mut outcome, Role::Dk),
        dv: taken(&mut outcome, Role::Dv),
        report: report(outcome),
    })
}

/// The shape of the rows that are here, which may be all or a rank's.
fn shape_here(request: &Request, q: &View<'_>) -> Shape {
    Shape {
        tokens: q.dims()[1],
        ..request.shape
    }
}

fn taken(outcome: &mut Outcome, role: Role) -> Tensor {
    let tensor = outcome.take(role);
    tensor.expect("a pass returns every output it has")
}

pub(crate) fn report<T>(outcome: Outcome<T>) -> Report {
    Report {
        plan: outcome.plan,
        trace: outcome.trace,
        memory: outcome.memory,
        deaths: outcome.deaths,
    }
}
