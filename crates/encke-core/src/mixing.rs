//! Combines slots into heads, for the two modes whose branches have slots of their own.
//!
//! In most modes the branches of a head share one softmax and one carry, and nothing here runs. Two
//! modes differ: torchscale's gradient needs each branch's own output, and fkodom normalises each
//! branch over the whole sequence. [`combine`] turns slots into heads after the forward pass, and
//! [`spread`] turns heads into slots before the backward pass.
//!
//! The decision here: both modes use the ordinary backward pass. `spread` returns, per slot, an
//! out, lse, dout and dlse for which the backward pass of spec section 3 yields the mode's
//! gradients, so kernels and rings are independent of modes.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::host;
use crate::partial::Partial;
use crate::pattern::{Mode, Pattern};
use crate::shape::Shape;
use crate::sharding::Run;
use crate::tensor::{Tensor, View};

/// The operands of an ordinary backward pass over slots.
#[derive(Debug, Clone, PartialEq)]
pub struct SlotBackward {
    /// The output, from which delta is computed, `[b, n, slots, d]`.
    pub out: Tensor,
    /// The lse, from which P is computed, `[b, n, slots, 1]`.
    pub lse: Tensor,
    /// The upstream gradient, `[b, n, slots, d]`.
    pub dout: Tensor,
    /// The upstream gradient of the lse, `[b, n, slots, 1]`.
    pub dlse: Option<Tensor>,
}

/// The slots of one call, and the heads they belong to.
struct Slots {
    batch: usize,
    queries: usize,
    dim: usize,
    /// The head of each slot.
    head_of: Vec<usize>,
    /// The slots of each head: none, one or several, in merge order.
    slots_of: Vec<Vec<usize>>,
}

/// Combines the results of slots into those of heads: out `[b, n, heads, d]` in `dtype`, and lse
/// `[b, n, heads, 1]` in the accumulation type of `dtype`. A token that no branch of a head selects
/// gets zeros and minus infinity.
pub fn combine(
    pattern: &Pattern,
    shape: &Shape,
    slot_out: &Tensor,
    slot_lse: &Tensor,
    dtype: DType,
) -> Result<(Tensor, Tensor)> {
    let slots = Slots::new(pattern, shape);
    let (slot_out, slot_lse) = (&slot_out.view(), &slot_lse.view());
    let count = slots.head_of.len();
    assert_eq!(
        slot_out.dims(),
        slots.dims(count, shape.value_dim),
        "the outputs of the slots"
    );
    assert_eq!(
        slot_lse.dims(),
        slots.dims(count, 1),
        "the lse of the slots"
    );
    let mut out = Tensor::try_zeros(dtype, slots.dims(shape.heads, shape.value_dim))?;
    let mut lse = Tensor::try_zeros(dtype.sum(), slots.dims(shape.heads, 1))?;
    let groups = pattern.branches().len() as f64;
    for batch in 0..shape.batch {
        let sigma = (pattern.mode() == Mode::Fkodom)
            .then(|| slots.sums(batch, slot_out, slot_lse, |_, _, _| 1.0));
        for token in 0..shape.queries {
            for (head, own) in slots.slots_of.iter().enumerate() {
                let part = |slot: usize| Partial {
                    out: read(slot_out, batch, token, slot),
                    lse: read_lse(slot_lse, batch, token, slot),
                };
                let parts: Vec<Partial> = own.iter().map(|&slot| part(slot)).collect();
                let whole = parts
                    .iter()
                    .fold(Partial::empty(shape.value_dim), |whole, part| {
                        whole.merge(part)
                    });
                let row = match &sigma {
                    None => whole.out,
                    Some(sigma) => {
                        let sigmas = own.iter().map(|&slot| &sigma[slot]);
                        normalise(&parts, sigmas, groups, shape.value_dim)
                    }
                };
                write(&mut out, batch, token, head, &row);
                write(&mut lse, batch, token, head, &[whole.lse]);
            }
        }
    }
    Ok((out, lse))
}

/// Turns the upstream gradients of heads (`dout` `[b, n, heads, d]`, `dlse` `[b, n, heads, 1]`)
/// and the heads' `lse` into the operands of an ordinary backward pass per slot.
pub fn spread(
    pattern: &Pattern,
    shape: &Shape,
    (slot_out, slot_lse): (&View<'_>, &View<'_>),
    lse: &View<'_>,
    dout: &View<'_>,
    dlse: Option<&View<'_>>,
) -> Result<SlotBackward> {
    let slots = Slots::new(pattern, shape);
    let count = slots.head_of.len();
    check_dims(
        "out by slot",
        slot_out.dims(),
        slots.dims(count, shape.value_dim),
    )?;
    check_dims("lse by slot", slot_lse.dims(), slots.dims(count, 1))?;
    check_dims("lse", lse.dims(), slots.dims(shape.heads, 1))?;
    check_dims(
        "dout",
        dout.dims(),
        slots.dims(shape.heads, shape.value_dim),
    )?;
    if let Some(dlse) = dlse {
        check_dims("dlse", dlse.dims(), slots.dims(shape.heads, 1))?;
    }
    if pattern.mode() != Mode::Fkodom {
        // The mixing weights are constants: P belongs to the softmax over all branches, hence the
        // head's lse, while delta belongs to the branch, hence the slot's out.
        return Ok(SlotBackward {
            out: slots.copied(slot_out)?,
            lse: slots.repeat(lse, slot_lse.dtype())?,
            dout: slots.repeat(dout, slot_out.dtype())?,
            dlse: dlse
                .map(|dlse| slots.repeat(dlse, slot_lse.dtype()))
                .transpose()?,
        });
    }
    if dlse.is_some() {
        pattern.check_dlse()?;
    }
    Ok(SlotBackward {
        out: slots.copied(slot_out)?,
        lse: slots.copied(slot_lse)?,
        dout: slots.normalise_backward(pattern, slot_out, slot_lse, dout)?,
        dlse: None,
    })
}

impl Slots {
    fn new(pattern: &Pattern, shape: &Shape) -> Slots {
        assert!(
            pattern.splits_slots(),
            "the slots of this pattern are its heads"
        );
        let head_of = pattern.slots(shape.heads);
        let mut slots_of = vec![Vec::new(); shape.heads];
        for (slot, &head) in head_of.iter().enumerate() {
            slots_of[head].push(slot);
        }
        Slots {
            batch: shape.batch,
            queries: shape.queries,
            dim: shape.value_dim,
            head_of,
            slots_of,
        }
    }

    fn dims(&self, heads: usize, dim: usize) -> [usize; 4] {
        [self.batch, self.queries, heads, dim]
    }

    /// A copy of a view.
    fn copied(&self, of_slots: &View<'_>) -> Result<Tensor> {
        let mut tensor = Tensor::try_zeros(of_slots.dtype(), of_slots.dims())?;
        let all = Run::leading(self.queries);
        // A rank may have no rows, and a run must not be empty.
        let runs = &[all][..usize::from(self.queries > 0)];
        host::upload(of_slots, runs, tensor.data_mut());
        Ok(tensor)
    }

    /// A tensor of slots from one of heads: each slot repeats its head.
    fn repeat(&self, of_heads: &View<'_>, dtype: DType) -> Result<Tensor> {
        let dims = self.dims(self.head_of.len(), of_heads.dims()[3]);
        let mut of_slots = Tensor::try_zeros(dtype, dims)?;
        for batch in 0..self.batch {
            for token in 0..self.queries {
                for (slot, &head) in self.head_of.iter().enumerate() {
                    let row = read(of_heads, batch, token, head);
                    write(&mut of_slots, batch, token, slot, &row);
                }
            }
        }
        Ok(of_slots)
    }

    /// For each slot and feature, the sum of `weight(token, slot, feature)` times the slot's output
    /// over the tokens that the slot's branch selects.
    fn sums(
        &self,
        batch: usize,
        slot_out: &View<'_>,
        slot_lse: &View<'_>,
        weight: impl Fn(usize, usize, usize) -> f64,
    ) -> Vec<Vec<f64>> {
        let mut sums = vec![vec![0.0; self.dim]; self.head_of.len()];
        for token in 0..self.queries {
            for (slot, sum) in sums.iter_mut().enumerate() {
                if read_lse(slot_lse, batch, token, slot) != f64::NEG_INFINITY {
                    let x = read(slot_out, batch, token, slot);
                    for (c, sum) in sum.iter_mut().enumerate() {
                        *sum += weight(token, slot, c) * x[c];
                    }
                }
            }
        }
        sums
    }

    /// The gradient of each slot's output in fkodom mode, through the division by the sum over the
    /// sequence: dX = dY / sigma - (sum of dY X) / sigma^2.
    fn normalise_backward(
        &self,
        pattern: &Pattern,
        slot_out: &View<'_>,
        slot_lse: &View<'_>,
        dout: &View<'_>,
    ) -> Result<Tensor> {
        let groups = pattern.branches().len() as f64;
        let mut dx = Tensor::try_zeros(slot_out.dtype(), slot_out.dims())?;
        for batch in 0..self.batch {
            let dy = |token: usize, slot: usize, c: usize| {
                dout.data()
                    .get(dout.row(batch, token, self.head_of[slot]) + c)
                    / groups
            };
            let sigma = self.sums(batch, slot_out, slot_lse, |_, _, _| 1.0);
            let dy_x = self.sums(batch, slot_out, slot_lse, dy);
            for token in 0..self.queries {
                for (slot, (sigma, dy_x)) in sigma.iter().zip(&dy_x).enumerate() {
                    if read_lse(slot_lse, batch, token, slot) != f64::NEG_INFINITY {
                        let row: Vec<f64> = (0..self.dim)
                            .map(|c| {
                                dy(token, slot, c) / sigma[c] - dy_x[c] / (sigma[c] * sigma[c])
                            })
                            .collect();
                        write(&mut dx, batch, token, slot, &row);
                    }
                }
            }
        }
        Ok(dx)
    }
}

/// One token's output of one head in fkodom mode: each branch divided by its sum over the sequence
/// and by the number of branches.
fn normalise<'a>(
    parts: &[Partial],
    sigmas: impl Iterator<Item = &'a Vec<f64>>,
    groups: f64,
    dim: usize,
) -> Vec<f64> {
    let mut out = vec![0.0; dim];
    // Rows that the branch does not select are skipped: a branch may select none, and 0/0 is NaN.
    let touched = parts
        .iter()
        .zip(sigmas)
        .filter(|(part, _)| part.lse != f64::NEG_INFINITY);
    for (part, sigma) in touched {
        for (c, y) in out.iter_mut().enumerate() {
            *y += part.out[c] / sigma[c] / groups;
        }
    }
    out
}

/// One lse; minus infinity if the slot's branch does not select the token.
fn read_lse(from: &View<'_>, batch: usize, token: usize, slot: usize) -> f64 {
    from.data().get(from.row(batch, token, slot))
}

/// One row, widened. Working by row avoids a widened copy of the whole tensor.
fn read(from: &View<'_>, batch: usize, token: usize, head: usize) -> Vec<f64> {
    let start = from.row(batch, token, head);
    (start..start + from.dims()[3])
        .map(|i| from.data().get(i))
        .collect()
}

fn write(to: &mut Tensor, batch: usize, token: usize, head: usize, values: &[f64]) {
    let start = to.view().row(batch, token, head);
    for (i, &value) in values.iter().enumerate() {
        to.data_mut().set(start + i, value);
    }
}

fn check_dims(tensor: &'static str, got: [usize; 4], expected: [usize; 4]) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    Err(Error::ShapeMismatch {
        tensor,
        got: got.to_vec(),
        expected: expected.to_vec(),
    })
}

#[cfg(test)]
mod tests;
