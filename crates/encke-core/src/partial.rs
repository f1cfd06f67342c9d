//! Attention over part of the keys, and the merge of such partial results (spec section 2), in f64.
//!
//! This is the arithmetic of the reference and of the host-side combination of slots. Kernels have
//! carries of their own, in their own types, and are tested against this one.
//!
//! The decision here: the code tests whether any key was seen before it subtracts maxima, so it
//! never forms a difference of two infinities and needs no epsilon.

/// A running (online) softmax: weights are relative to the largest score so far.
#[derive(Debug, Clone, PartialEq)]
pub struct OnlineSoftmax {
    /// Sum of `exp(score - m)` times the value.
    pub acc: Vec<f64>,
    /// The largest score; minus infinity before the first key.
    pub m: f64,
    /// Sum of `exp(score - m)`: at least 1 after the first key.
    pub l: f64,
}

impl OnlineSoftmax {
    /// Over no keys.
    pub fn new(dim: usize) -> OnlineSoftmax {
        OnlineSoftmax {
            acc: vec![0.0; dim],
            m: f64::NEG_INFINITY,
            l: 0.0,
        }
    }

    /// Starts with a sink: a score without a value (spec section 10).
    pub fn start_at(&mut self, sink: f64) {
        if sink > f64::NEG_INFINITY {
            (self.m, self.l) = (sink, 1.0);
        }
    }

    /// Adds `count` keys with score 0 and value 0 (phantom keys, spec section 10).
    pub fn add_phantoms(&mut self, count: usize) {
        if count > 0 {
            self.raise_max(0.0);
            self.l += count as f64 * (-self.m).exp();
        }
    }

    /// Adds one key. A score of minus infinity marks a masked key.
    pub fn absorb(&mut self, score: f64, v: &[f64]) {
        self.absorb_dropped(score, 1.0, v);
    }

    /// Adds one key whose value counts `factor` times: 0 if its pair is dropped (spec section 11).
    pub fn absorb_dropped(&mut self, score: f64, factor: f64, v: &[f64]) {
        assert_eq!(v.len(), self.acc.len(), "a value of another dimension");
        if score == f64::NEG_INFINITY {
            return;
        }
        self.raise_max(score);
        let weight = (score - self.m).exp();
        match factor {
            0.0 => self.l += weight,
            _ => self.add(weight * factor, weight, v),
        }
    }

    /// Adds the keys of `other`. A fixed merge order gives fixed bits; another order may not.
    pub fn merge(&mut self, other: &OnlineSoftmax) {
        assert_eq!(
            other.acc.len(),
            self.acc.len(),
            "a carry of another dimension"
        );
        if other.l == 0.0 {
            return; // `other` has no keys, and its m is minus infinity
        }
        self.raise_max(other.m);
        let weight = (other.m - self.m).exp();
        self.add(weight, weight * other.l, &other.acc);
    }

    /// Attention over the keys so far.
    pub fn finish(&self) -> Partial {
        if self.l == 0.0 {
            return Partial::empty(self.acc.len());
        }
        Partial {
            out: self.acc.iter().map(|x| x / self.l).collect(),
            lse: self.m + self.l.ln(),
        }
    }

    /// Rescales the weights if `score` is a new maximum.
    fn raise_max(&mut self, score: f64) {
        if score > self.m {
            let rescale = if self.l == 0.0 {
                0.0
            } else {
                (self.m - score).exp()
            };
            self.acc.iter_mut().for_each(|x| *x *= rescale);
            self.l *= rescale;
            self.m = score;
        }
    }

    fn add(&mut self, weight: f64, mass: f64, values: &[f64]) {
        for (x, value) in self.acc.iter_mut().zip(values) {
            *x += weight * value;
        }
        self.l += mass;
    }
}

/// Finished attention over some of the keys.
#[derive(Debug, Clone, PartialEq)]
pub struct Partial {
    /// The weighted mean of the values; zeros if there were no keys.
    pub out: Vec<f64>,
    /// Natural logarithm of the sum of `exp(score)`; minus infinity if there were no keys.
    pub lse: f64,
}

impl Partial {
    /// Attention over no keys.
    pub fn empty(dim: usize) -> Partial {
        Partial {
            out: vec![0.0; dim],
            lse: f64::NEG_INFINITY,
        }
    }

    /// Attention over the keys of both; a key in both counts twice.
    pub fn merge(&self, other: &Partial) -> Partial {
        assert_eq!(
            other.out.len(),
            self.out.len(),
            "a partial of another dimension"
        );
        // Tests both instead of their maximum: `max` drops a NaN, and a NaN must propagate.
        if self.lse == f64::NEG_INFINITY && other.lse == f64::NEG_INFINITY {
            return Partial::empty(self.out.len());
        }
        let largest = self.lse.max(other.lse);
        let (e1, e2) = ((self.lse - largest).exp(), (other.lse - largest).exp());
        let both = e1 + e2;
        let pairs = self.out.iter().zip(&other.out);
        Partial {
            out: pairs.map(|(o1, o2)| (e1 * o1 + e2 * o2) / both).collect(),
            lse: largest + both.ln(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIM: usize = 3;

    /// Scores of both signs, up to `spread` in size, and values, from a fixed sequence.
    fn keys(count: usize, spread: f64) -> Vec<(f64, Vec<f64>)> {
        let wave = |i: usize| ((i * i + 3 * i) as f64 * 0.7).sin();
        (0..count)
            .map(|i| {
                let v = (0..DIM).map(|c| wave(100 + DIM * i + c)).collect();
                (spread * wave(i), v)
            })
            .collect()
    }

    fn carry(keys: &[(f64, Vec<f64>)]) -> OnlineSoftmax {
        let mut carry = OnlineSoftmax::new(DIM);
        keys.iter().for_each(|(score, v)| carry.absorb(*score, v));
        carry
    }

    /// The two-pass softmax: the maximum first, then weights relative to it.
    fn softmax(keys: &[(f64, Vec<f64>)]) -> Partial {
        let largest = keys.iter().map(|k| k.0).fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = keys.iter().map(|k| (k.0 - largest).exp()).sum();
        let mean = |c: usize| {
            let sum: f64 = keys.iter().map(|(s, v)| (s - largest).exp() * v[c]).sum();
            sum / total
        };
        Partial {
            out: (0..DIM).map(mean).collect(),
            lse: largest + total.ln(),
        }
    }

    fn assert_close(got: &Partial, expected: &Partial) {
        assert!((got.lse - expected.lse).abs() <= 1e-14 * expected.lse.abs().max(1.0));
        for (x, y) in got.out.iter().zip(&expected.out) {
            assert!((x - y).abs() <= 1e-14, "{x} is not {y}");
        }
    }

    #[test]
    fn attention_over_no_keys_is_zero_with_lse_minus_infinity() {
        let mut none = OnlineSoftmax::new(DIM);
        none.absorb(f64::NEG_INFINITY, &[1.0, 2.0, 3.0]);
        none.merge(&OnlineSoftmax::new(DIM));
        assert_eq!(none, OnlineSoftmax::new(DIM));
        assert_eq!(none.finish(), Partial::empty(DIM));
        assert_eq!(
            none.finish().merge(&Partial::empty(DIM)),
            Partial::empty(DIM)
        );
    }

    #[test]
    fn merging_with_an_empty_carry_changes_nothing() {
        let keys = keys(5, 3.0);
        let whole = carry(&keys);
        let mut after = whole.clone();
        after.merge(&OnlineSoftmax::new(DIM));
        let mut before = OnlineSoftmax::new(DIM);
        before.merge(&whole);
        assert_eq!(after, whole);
        assert_eq!(before, whole);
        let part = whole.finish();
        assert_eq!(part.merge(&Partial::empty(DIM)), part);
        assert_eq!(Partial::empty(DIM).merge(&part), part);
    }

    #[test]
    fn partials_of_any_split_merge_to_one_softmax() {
        for spread in [0.0, 1.0, 30.0, 1e4] {
            let keys = keys(17, spread);
            let expected = softmax(&keys);
            assert_close(&carry(&keys).finish(), &expected);
            for cut in 0..=keys.len() {
                let (left, right) = keys.split_at(cut);
                let mut streamed = carry(left);
                streamed.merge(&carry(right));
                assert_close(&streamed.finish(), &expected);
                let parts = carry(left).finish().merge(&carry(right).finish());
                assert_close(&parts, &expected);
            }
        }
    }

    #[test]
    fn scores_of_ten_thousand_neither_overflow_nor_vanish() {
        let one = |score: f64| carry(&[(score, vec![score; DIM])]).finish();
        for (high, low) in [(1e4, -1e4), (1e4, 0.0), (0.0, -1e4)] {
            for merged in [one(high).merge(&one(low)), one(low).merge(&one(high))] {
                assert_eq!(merged, one(high));
            }
        }
        let twice = one(-1e4).merge(&one(-1e4));
        assert_eq!(twice.out, vec![-1e4; DIM]);
        assert_eq!(twice.lse, -1e4 + 2f64.ln());
    }

    #[test]
    fn fixed_order_gives_fixed_bits() {
        let keys = keys(40, 8.0);
        let run = || {
            let mut total = OnlineSoftmax::new(DIM);
            keys.chunks(7).for_each(|chunk| total.merge(&carry(chunk)));
            let parts = keys.chunks(7).map(|chunk| carry(chunk).finish());
            (total, parts.reduce(|a, b| a.merge(&b)))
        };
        // Equality of floats, none of them NaN or zero, is equality of bits.
        assert_eq!(run(), run());
    }

    #[test]
    fn a_nan_propagates() {
        let mut poisoned = OnlineSoftmax::new(DIM);
        poisoned.absorb(f64::NAN, &[1.0; DIM]);
        poisoned.absorb(0.0, &[1.0; DIM]);
        assert!(poisoned.finish().lse.is_nan());
        let part = Partial {
            out: vec![f64::NAN; DIM],
            lse: f64::NAN,
        };
        assert!(part.merge(&Partial::empty(DIM)).lse.is_nan());
        assert!(Partial::empty(DIM).merge(&part).lse.is_nan());
    }
}
