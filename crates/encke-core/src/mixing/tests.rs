//! Slots combined and spread against the reference.

use super::*;
use crate::pattern::{Branch, MixingGradient, OffsetRule};
use crate::reference;

/// One call with all its operands, in f64 and row-major.
struct MixingCase {
    shape: Shape,
    pattern: Pattern,
    scale: f64,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    dout: Vec<f64>,
    dlse: Vec<f64>,
}

/// The results of all slots, and the (branch, head, offset) of each slot.
struct SlotForward {
    slots: Vec<(usize, usize, usize)>,
    out: Tensor,
    lse: Tensor,
}

impl MixingCase {
    fn new(shape: Shape, segments: &[usize], dilations: &[usize], mode: Mode) -> MixingCase {
        let pattern = Pattern::dilated(segments, dilations, mode).unwrap();
        let Shape {
            batch,
            tokens,
            heads,
            kv_heads,
            dim,
            ..
        } = shape;
        let values = |seed: usize, width: usize| -> Vec<f64> {
            let wave = |i: usize| ((i * i % 1009 + seed) as f64 * 1.7).sin();
            (0..batch * tokens * width).map(wave).collect()
        };
        MixingCase {
            shape,
            pattern,
            scale: shape.default_scale(),
            q: values(1, heads * dim),
            k: values(2, kv_heads * dim),
            v: values(3, kv_heads * dim).iter().map(|x| x + 0.3).collect(),
            dout: values(4, heads * dim),
            dlse: values(5, heads),
        }
    }

    fn causal(mut self) -> MixingCase {
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

    /// Attention of each slot separately.
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

    /// The backward pass of spec section 3 per slot, independent of modes.
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

    /// Combined and spread slots must match the reference.
    fn check(&self, dlse: Option<&[f64]>) {
        let MixingCase {
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
        let (out, lse) = combine(pattern, shape, &slots.out, &slots.lse, DType::F64).unwrap();
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
        let expected = reference::backward(shape, pattern, *scale, q, k, v, dout, dlse).unwrap();
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
fn detached_mixing_matches_the_reference() {
    for offsets in [OffsetRule::HeadMod, OffsetRule::HeadBlock] {
        // Lengths are ragged and no branch has r = 1, so some tokens are in no branch.
        let shape = Shape::new(2, 11, 4, 2, 3).unwrap();
        let case = || MixingCase::new(shape, &[4, 6, 32], &[2, 3, 4], detached(offsets));
        for case in [case(), case().causal()] {
            case.check(None);
            case.check(Some(&case.dlse));
        }
    }
}

#[test]
fn fkodom_matches_the_reference() {
    // Three branches over seven heads: head 2 has two slots and head 6 has none.
    let shape = Shape::new(2, 12, 7, 7, 3).unwrap();
    let case = || MixingCase::new(shape, &[4, 6, 12], &[1, 2, 5], Mode::Fkodom);
    assert_eq!(case().pattern.slots(7), [0, 1, 2, 2, 3, 4, 5]);
    case().check(None);
    case().causal().check(None);
}

#[test]
fn a_slot_without_tokens_is_zero_and_not_nan() {
    // Branch 1 has phase 1, and segments of one token have only phase 0.
    let shape = Shape::new(1, 6, 2, 1, 2).unwrap();
    let case = MixingCase::new(shape, &[3, 1], &[1, 2], Mode::Fkodom);
    case.check(None);
    let slots = case.slot_forward();
    let (out, lse) = combine(&case.pattern, &shape, &slots.out, &slots.lse, DType::F64).unwrap();
    for token in 0..6 {
        assert_eq!(read(&out.view(), 0, token, 1), [0.0, 0.0]);
        assert_eq!(read_lse(&lse.view(), 0, token, 1), f64::NEG_INFINITY);
    }
}

#[test]
fn results_have_the_documented_types() {
    let shape = Shape::new(1, 8, 2, 2, 2).unwrap();
    for mode in [detached(OffsetRule::HeadMod), Mode::Fkodom] {
        let case = MixingCase::new(shape, &[4, 8], &[1, 2], mode);
        let slots = case.slot_forward();
        let narrow = |from: &Tensor, dtype: DType| {
            Tensor::from_f64(dtype, from.dims(), &from.to_f64()).unwrap()
        };
        let slot_out = narrow(&slots.out, DType::Bf16);
        let slot_lse = narrow(&slots.lse, DType::F32);
        let (out, lse) = combine(&case.pattern, &shape, &slot_out, &slot_lse, DType::F16).unwrap();
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
fn spread_refuses_a_gradient_of_the_lse_in_fkodom_mode_and_wrong_shapes() {
    let shape = Shape::new(1, 8, 2, 2, 2).unwrap();
    let case = MixingCase::new(shape, &[4, 8], &[1, 2], Mode::Fkodom);
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
