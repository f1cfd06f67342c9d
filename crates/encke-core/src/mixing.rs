//! What is combined after attention, where branches keep slots of their own.
//!
//! Most modes need none of this: their branches share one softmax, and one carry. Two do not:
//! torchscale's gradient wants each branch's own output, and fkodom normalises each branch over
//! the whole sequence. This file turns slots into heads after the forward pass ([`combine`]) and
//! heads into slots before the backward pass ([`spread`]).
//!
//! The decision here: both modes are brought to the ordinary backward pass. `spread` returns per
//! slot an out, lse, dout and dlse for which spec 3 yields the mode's gradients, so that kernels
//! and rings know nothing of modes.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::host;
use crate::partial::Partial;
use crate::pattern::{Mode, Pattern};
use crate::shape::Shape;
use crate::sharding::Run;
use crate::tensor::{Tensor, View};

/// The operands of one ordinary backward pass per slot.
#[derive(Debug, Clone, PartialEq)]
pub struct SlotBackward {
    /// What D is computed from, `[b, n, slots, d]`.
    pub out: Tensor,
    /// What P is computed from, `[b, n, slots, 1]`.
    pub lse: Tensor,
    /// The upstream gradient, `[b, n, slots, d]`.
    pub dout: Tensor,
    /// The upstream gradient of the lse, `[b, n, slots, 1]`.
    pub dlse: Option<Tensor>,
}

/// The slots of one call: whose they are.
struct Slots {
    batch: usize,
    tokens: usize,
    dim: usize,
    /// The head of each slot.
    head_of: Vec<usize>,
    /// The slots of each head: none, one or several, in the order they are merged in.
    slots_of: Vec<Vec<usize>>,
}

/// Turns the results of slots into those of heads: out `[b, n, heads, d]` as `dtype`, and the lse
/// `[b, n, heads, 1]` as the type `dtype` is summed in. A token that no branch of a head touches
/// has zeros and minus infinity.
pub fn combine(
    pattern: &Pattern,
    shape: &Shape,
    slot_out: &Tensor,
    slot_lse: &Tensor,
    dtype: DType,
) -> (Tensor, Tensor) {
    let slots = Slots::new(pattern, shape);
    let (slot_out, slot_lse) = (&slot_out.view(), &slot_lse.view());
    let count = slots.head_of.len();
    assert_eq!(
        slot_out.dims(),
        slots.dims(count, shape.dim),
        "the outputs of the slots"
    );
    assert_eq!(
        slot_lse.dims(),
        slots.dims(count, 1),
        "the lses of the slots"
    );
    let mut out = Tensor::zeros(dtype, slots.dims(shape.heads, shape.dim));
    let mut lse = Tensor::zeros(dtype.sum(), slots.dims(shape.heads, 1));
    let groups = pattern.branches().len() as f64;
    for batch in 0..shape.batch {
        let sigma = (pattern.mode() == Mode::Fkodom)
            .then(|| slots.sums(batch, slot_out, slot_lse, |_, _, _| 1.0));
        for token in 0..shape.tokens {
            for (head, own) in slots.slots_of.iter().enumerate() {
                let part = |slot: usize| Partial {
                    out: read(slot_out, batch, token, slot),
                    lse: read_lse(slot_lse, batch, token, slot),
                };
                let parts: Vec<Partial> = own.iter().map(|&slot| part(slot)).collect();
                let whole = parts
                    .iter()
                    .fold(Partial::empty(shape.dim), |whole, part| whole.merge(part));
                let row = match &sigma {
                    None => whole.out,
                    Some(sigma) => {
                        let sigmas = own.iter().map(|&slot| &sigma[slot]);
                        normalise(&parts, sigmas, groups, shape.dim)
                    }
                };
                write(&mut out, batch, token, head, &row);
                write(&mut lse, batch, token, head, &[whole.lse]);
            }
        }
    }
    (out, lse)
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
    check_dims("out by slot", slot_out.dims(), slots.dims(count, shape.dim))?;
    check_dims("lse by slot", slot_lse.dims(), slots.dims(count, 1))?;
    check_dims("lse", lse.dims(), slots.dims(shape.heads, 1))?;
    check_dims("dout", dout.dims(), slots.dims(shape.heads, shape.dim))?;
    if let Some(dlse) = dlse {
        check_dims("dlse", dlse.dims(), slots.dims(shape.heads, 1))?;
    }
    if pattern.mode() != Mode::Fkodom {
        // The weights of the branches are constants: P is that of the one softmax over all of
        // them, hence the head's lse, while D is that of the branch, hence the slot's out.
        return Ok(SlotBackward {
            out: slots.owned(slot_out),
            lse: slots.repeat(lse, slot_lse.dtype()),
            dout: slots.repeat(dout, slot_out.dtype()),
            dlse: dlse.map(|dlse| slots.repeat(dlse, slot_lse.dtype())),
        });
    }
    if dlse.is_some() {
        return Err(Error::NotInMode {
            what: "a gradient of the lse",
            mode: pattern.mode().name(),
            hint: "its output is no softmax of its lse: leave the gradient out, or use group mode",
        });
    }
    Ok(SlotBackward {
        out: slots.owned(slot_out),
        lse: slots.owned(slot_lse),
        dout: slots.unnormalise(pattern, slot_out, slot_lse, dout),
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
            tokens: shape.tokens,
            dim: shape.dim,
            head_of,
            slots_of,
        }
    }

    fn dims(&self, heads: usize, dim: usize) -> [usize; 4] {
        [self.batch, self.tokens, heads, dim]
    }

    /// What the caller kept, as a tensor of its own.
    fn owned(&self, of_slots: &View<'_>) -> Tensor {
        let mut tensor = Tensor::zeros(of_slots.dtype(), of_slots.dims());
        let all = Run {
            first: 0,
            stride: 1,
            count: self.tokens,
        };
        // A rank may have no rows at all, and a run is never empty.
        let runs = &[all][..usize::from(self.tokens > 0)];
        host::upload(of_slots, runs, tensor.data_mut());
        tensor
    }

    /// A tensor of slots from one of heads: each slot has what its head has.
    fn repeat(&self, of_heads: &View<'_>, dtype: DType) -> Tensor {
        let dims = self.dims(self.head_of.len(), of_heads.dims()[3]);
        let mut of_slots = Tensor::zeros(dtype, dims);
        for batch in 0..self.batch {
            for token in 0..self.tokens {
                for (slot, &head) in self.head_of.iter().enumerate() {
                    let row = read(of_heads, batch, token, head);
                    write(&mut of_slots, batch, token, slot, &row);
                }
            }
        }
        of_slots
    }

    /// Sums over the touched tokens of a sequence of each slot's output times `weight(token, slot,
    /// feature)`: one for each slot and feature.
    fn sums(
        &self,
        batch: usize,
        slot_out: &View<'_>,
        slot_lse: &View<'_>,
        weight: impl Fn(usize, usize, usize) -> f64,
    ) -> Vec<Vec<f64>> {
        let mut sums = vec![vec![0.0; self.dim]; self.head_of.len()];
        for token in 0..self.tokens {
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

    /// The gradient of each slot's output in fkodom mode, back through its division by the sum
    /// over the sequence: dX = dY / sigma - (sum of dY X) / sigma^2.
    fn unnormalise(
        &self,
        pattern: &Pattern,
        slot_out: &View<'_>,
        slot_lse: &View<'_>,
        dout: &View<'_>,
    ) -> Tensor {
        let groups = pattern.branches().len() as f64;
        let mut dx = Tensor::zeros(slot_out.dtype(), slot_out.dims());
        for batch in 0..self.batch {
            let dy = |token: usize, slot: usize, c: usize| {
                dout.data()
                    .get(dout.row(batch, token, self.head_of[slot]) + c)
                    / groups
            };
            let sigma = self.sums(batch, slot_out, slot_lse, |_, _, _| 1.0);
            let dy_x = self.sums(batch, slot_out, slot_lse, dy);
            for token in 0..self.tokens {
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
        dx
    }
}

/// One token's output of one head in fkodom mode: its branches, each over its sum over the
/// sequence, and all over the number of branches.
fn normalise<'a>(
    parts: &[Partial],
    sigmas: impl Iterator<Item = &'a Vec<f64>>,
    groups: f64,
    dim: usize,
) -> Vec<f64> {
    let mut out = vec![0.0; dim];
    // A row that the branch does not touch is left alone: where the branch touches no row at all
    // its sums are zero, and zero over zero is not zero.
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

/// One lse; minus infinity where the slot's branch does not have the token as a query.
fn read_lse(from: &View<'_>, batch: usize, token: usize, slot: usize) -> f64 {
    from.data().get(from.row(batch, token, slot))
}

/// One row, widened. Rows and not whole tensors, so that nothing large is held beside the results.
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
mod tests {
    use super::*;
    use crate::pattern::{Branch, MixingGradient, OffsetRule};
    use crate::reference;

    /// One call with everything it needs, in f64 and row-major.
    struct Case {
        shape: Shape,
        pattern: Pattern,
        scale: f64,
        q: Vec<f64>,
        k: Vec<f64>,
        v: Vec<f64>,
        dout: Vec<f64>,
        dlse: Vec<f64>,
    }

    /// The slots' results, and the (branch, head, offset) behind each slot.
    struct SlotForward {
        slots: Vec<(usize, usize, usize)>,
        out: Tensor,
        lse: Tensor,
    }

    impl Case {
        fn new(shape: Shape, segments: &[usize], dilations: &[usize], mode: Mode) -> Case {
            let pattern = Pattern::dilated(segments, dilations, mode).unwrap();
            let Shape {
                batch,
                tokens,
                heads,
                kv_heads,
                dim,
            } = shape;
            let numbers = |seed: usize, width: usize| -> Vec<f64> {
                let wave = |i: usize| ((i * i % 1009 + seed) as f64 * 1.7).sin();
                (0..batch * tokens * width).map(wave).collect()
            };
            Case {
                shape,
                pattern,
                scale: shape.default_scale(),
                q: numbers(1, heads * dim),
                k: numbers(2, kv_heads * dim),
                v: numbers(3, kv_heads * dim).iter().map(|x| x + 0.3).collect(),
                dout: numbers(4, heads * dim),
                dlse: numbers(5, heads),
            }
        }

        fn causal(mut self) -> Case {
            self.pattern = self.pattern.causal(true);
            self
        }

        fn query(&self, batch: usize, token: usize, head: usize) -> usize {
            ((batch * self.shape.tokens + token) * self.shape.heads + head) * self.shape.dim
        }

        fn key(&self, batch: usize, token: usize, head: usize) -> usize {
            let Shape {
                tokens,
                kv_heads,
                dim,
                ..
            } = self.shape;
            ((batch * tokens + token) * kv_heads + self.shape.kv_head(head)) * dim
        }

        fn score(&self, query: usize, key: usize) -> f64 {
            let products = (0..self.shape.dim).map(|c| self.q[query + c] * self.k[key + c]);
            self.scale * products.sum::<f64>()
        }

        /// Whether `key` is visible to `query` in one branch, from the definition.
        fn sees(&self, branch: usize, offset: usize, query: usize, key: usize) -> bool {
            let Branch { segment, dilation } = self.pattern.branches()[branch];
            let has = |t: usize| t % segment % dilation == offset;
            let causal = self.pattern.is_causal();
            query / segment == key / segment && has(query) && has(key) && !(causal && key > query)
        }

        /// Every pair that attends: the slot's row, and where the query and the key start.
        fn pairs(&self, slots: &[(usize, usize, usize)]) -> Vec<[usize; 3]> {
            let Shape { batch, tokens, .. } = self.shape;
            let mut pairs = Vec::new();
            for (b, t) in (0..batch).flat_map(|b| (0..tokens).map(move |t| (b, t))) {
                for (slot, &(branch, head, offset)) in slots.iter().enumerate() {
                    let row = (b * tokens + t) * slots.len() + slot;
                    let query = self.query(b, t, head);
                    let keys = (0..tokens).filter(|&j| self.sees(branch, offset, t, j));
                    pairs.extend(keys.map(|j| [row, query, self.key(b, j, head)]));
                }
            }
            pairs
        }

        /// Attention of every slot by itself.
        fn slot_forward(&self) -> SlotForward {
            let Shape {
                batch,
                tokens,
                heads,
                dim,
                ..
            } = self.shape;
            let slots: Vec<_> = (0..self.pattern.branches().len())
                .flat_map(|branch| {
                    let heads = self.pattern.heads_of(branch, heads).into_iter();
                    heads.map(move |(head, offset)| (branch, head, offset))
                })
                .collect();
            let rows = batch * tokens * slots.len();
            let mut sums = vec![0.0; rows];
            let mut out = vec![0.0; rows * dim];
            for [row, query, key] in self.pairs(&slots) {
                let weight = self.score(query, key).exp();
                sums[row] += weight;
                (0..dim).for_each(|c| out[row * dim + c] += weight * self.v[key + c]);
            }
            for (i, x) in out.iter_mut().enumerate() {
                *x /= if sums[i / dim] == 0.0 {
                    1.0
                } else {
                    sums[i / dim]
                };
            }
            let lse: Vec<f64> = sums.iter().map(|sum| sum.ln()).collect();
            let dims = |dim: usize| [batch, tokens, slots.len(), dim];
            SlotForward {
                out: Tensor::from_f64(DType::F64, dims(dim), &out).unwrap(),
                lse: Tensor::from_f64(DType::F64, dims(1), &lse).unwrap(),
                slots,
            }
        }

        /// Spec 3 run per slot, knowing nothing of modes.
        fn slot_backward(&self, slots: &SlotForward, with: &SlotBackward) -> [Vec<f64>; 3] {
            let dim = self.shape.dim;
            let (out, lse) = (with.out.to_f64(), with.lse.to_f64());
            let dout = with.dout.to_f64();
            let dlse = with.dlse.as_ref().map(Tensor::to_f64);
            let mut dq = vec![0.0; self.q.len()];
            let mut dk = vec![0.0; self.k.len()];
            let mut dv = vec![0.0; self.v.len()];
            for [row, query, key] in self.pairs(&slots.slots) {
                let dout = &dout[row * dim..(row + 1) * dim];
                let delta: f64 = (0..dim).map(|c| dout[c] * out[row * dim + c]).sum();
                let dp: f64 = (0..dim).map(|c| dout[c] * self.v[key + c]).sum();
                let p = (self.score(query, key) - lse[row]).exp();
                let ds = p * (dp - delta + dlse.as_ref().map_or(0.0, |g| g[row]));
                for c in 0..dim {
                    dv[key + c] += p * dout[c];
                    dq[query + c] += self.scale * ds * self.k[key + c];
                    dk[key + c] += self.scale * ds * self.q[query + c];
                }
            }
            [dq, dk, dv]
        }

        /// Slots combined and spread must give what the reference gives.
        fn check(&self, dlse: Option<&[f64]>) {
            let Case {
                shape,
                pattern,
                scale,
                q,
                k,
                v,
                dout,
                ..
            } = self;
            let dims = |dim: usize| [shape.batch, shape.tokens, shape.heads, dim];
            let slots = self.slot_forward();
            let (out, lse) = combine(pattern, shape, &slots.out, &slots.lse, DType::F64);
            assert_eq!((out.dims(), lse.dims()), (dims(shape.dim), dims(1)));
            let expected = reference::forward(shape, pattern, *scale, q, k, v).unwrap();
            assert_close(&out.to_f64(), &expected.out);
            assert_close(&lse.to_f64(), &expected.lse);

            let dout_view = View::contiguous(dout, dims(shape.dim)).unwrap();
            let dlse_view = dlse.map(|dlse| View::contiguous(dlse, dims(1)).unwrap());
            let kept = (&slots.out.view(), &slots.lse.view());
            let dlse_view = dlse_view.as_ref();
            let with = spread(pattern, shape, kept, &lse.view(), &dout_view, dlse_view);
            let [dq, dk, dv] = self.slot_backward(&slots, &with.unwrap());
            let expected =
                reference::backward(shape, pattern, *scale, q, k, v, dout, dlse).unwrap();
            assert_close(&dq, &expected.dq);
            assert_close(&dk, &expected.dk);
            assert_close(&dv, &expected.dv);
        }
    }

    fn assert_close(got: &[f64], expected: &[f64]) {
        assert_eq!(got.len(), expected.len());
        let finite = expected.iter().filter(|x| x.is_finite());
        let largest = finite.fold(0.0, |a: f64, x| a.max(x.abs()));
        for (x, y) in got.iter().zip(expected) {
            assert!(x == y || (x - y).abs() <= 1e-12 * largest, "{x} is not {y}");
        }
    }

    fn detached(offsets: OffsetRule) -> Mode {
        let gradient = MixingGradient::Detached;
        Mode::Mix { offsets, gradient }
    }

    #[test]
    fn detached_mixing_is_the_reference() {
        for offsets in [OffsetRule::HeadMod, OffsetRule::HeadBlock] {
            // The lengths are ragged and no branch has r = 1, so that some tokens stay untouched.
            let shape = Shape::new(2, 11, 4, 2, 3).unwrap();
            let case = || Case::new(shape, &[4, 6, 32], &[2, 3, 4], detached(offsets));
            for case in [case(), case().causal()] {
                case.check(None);
                case.check(Some(&case.dlse));
            }
        }
    }

    #[test]
    fn fkodom_is_the_reference() {
        // Three branches over seven heads: head 2 is written twice and head 6 by none.
        let shape = Shape::new(2, 12, 7, 7, 3).unwrap();
        let case = || Case::new(shape, &[4, 6, 12], &[1, 2, 5], Mode::Fkodom);
        assert_eq!(case().pattern.slots(7), [0, 1, 2, 2, 3, 4, 5]);
        case().check(None);
        case().causal().check(None);
    }

    #[test]
    fn a_slot_that_touches_nothing_is_zero_and_not_nan() {
        // Branch 1 has phase 1, and segments of one token have only phase 0.
        let shape = Shape::new(1, 6, 2, 1, 2).unwrap();
        let case = Case::new(shape, &[3, 1], &[1, 2], Mode::Fkodom);
        case.check(None);
        let slots = case.slot_forward();
        let (out, lse) = combine(&case.pattern, &shape, &slots.out, &slots.lse, DType::F64);
        for token in 0..6 {
            assert_eq!(read(&out.view(), 0, token, 1), [0.0, 0.0]);
            assert_eq!(read_lse(&lse.view(), 0, token, 1), f64::NEG_INFINITY);
        }
    }

    #[test]
    fn types_are_those_promised() {
        let shape = Shape::new(1, 8, 2, 2, 2).unwrap();
        for mode in [detached(OffsetRule::HeadMod), Mode::Fkodom] {
            let case = Case::new(shape, &[4, 8], &[1, 2], mode);
            let slots = case.slot_forward();
            let narrow = |from: &Tensor, dtype: DType| {
                Tensor::from_f64(dtype, from.dims(), &from.to_f64()).unwrap()
            };
            let slot_out = narrow(&slots.out, DType::Bf16);
            let slot_lse = narrow(&slots.lse, DType::F32);
            let (out, lse) = combine(&case.pattern, &shape, &slot_out, &slot_lse, DType::F16);
            assert_eq!((out.dtype(), lse.dtype()), (DType::F16, DType::F32));
            let dout = View::contiguous(&case.dout, [1, 8, 2, 2]).unwrap();
            let kept = (&slot_out.view(), &slot_lse.view());
            let with = spread(&case.pattern, &shape, kept, &lse.view(), &dout, None);
            let with = with.unwrap();
            assert_eq!(
                (with.out.dtype(), with.lse.dtype()),
                (DType::Bf16, DType::F32)
            );
            assert_eq!((with.dout.dtype(), with.dlse), (DType::Bf16, None));
        }
    }

    #[test]
    fn what_cannot_be_spread_is_refused() {
        let shape = Shape::new(1, 8, 2, 2, 2).unwrap();
        let case = Case::new(shape, &[4, 8], &[1, 2], Mode::Fkodom);
        let slots = case.slot_forward();
        let lse = Tensor::zeros(DType::F64, [1, 8, 2, 1]);
        let dout = View::contiguous(&case.dout, [1, 8, 2, 2]).unwrap();
        let dlse = View::contiguous(&case.dlse, [1, 8, 2, 1]).unwrap();
        let try_with = |dout: &View<'_>, dlse: Option<&View<'_>>| {
            let kept = (&slots.out.view(), &slots.lse.view());
            spread(&case.pattern, &shape, kept, &lse.view(), dout, dlse)
        };
        assert!(try_with(&dout, None).is_ok());
        let refused = try_with(&dout, Some(&dlse));
        assert!(matches!(
            refused,
            Err(Error::NotInMode { mode: "fkodom", .. })
        ));
        let refused = try_with(&dlse, None);
        assert!(matches!(
            refused,
            Err(Error::ShapeMismatch { tensor: "dout", .. })
        ));
    }
}
