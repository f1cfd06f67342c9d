//! Dropout: the factors of a tile's weights after the softmax.
//!
//! The decision here: coins are drawn for many queries at once, one query in each lane, and for
//! four keys at a time. Like the transform of scores, this is a task of its own, compiled
//! for the instruction set and called only by jobs that have dropout.
//!
//! A weight of 0 hides finite values only. Where one is not finite, the weights of pairs that are
//! dropped or masked are [`LEFT_OUT`], and sums leave them out ([`accumulate_marked`]). These
//! sums are not inlined: inside the loops of calls without dropout they cost a backward pass a
//! tenth.

use encke_core::Element;
use encke_core::job::{Job, Piece};

use crate::grid::Tile;
use crate::philox::{COUNTERS, Words};
use crate::real::Real;
use crate::shape::{MAX_LANES, VECTORS, lanes};
use crate::vector::{SimdTask, Vector};

/// Marks a pair that no sum contains. Weights are at least 0.
pub(crate) const LEFT_OUT: f64 = -1.0;

/// Which pairs of one tile and consecutive keys are dropped.
#[derive(Debug)]
pub(crate) struct TileDropout<A> {
    /// The counter of each query and, for all of them, of the head and the document.
    queries: [u32; MAX_LANES],
    head: u32,
    document: u32,
    /// The token of the first key, and the distance to the next.
    token: usize,
    key_step: usize,
    /// The key of the generator.
    seed: [u32; 2],
    /// A pair is kept if its coin is above this.
    limit: u32,
    /// The factor of pairs that are kept.
    gain: A,
}

impl<A: Real> TileDropout<A> {
    /// The dropout of a tile and the keys from `key` on; `None` if the job drops nothing.
    pub fn new(
        job: &Job,
        piece: &Piece,
        (batch, segment): (usize, usize),
        tile: Tile,
        key: usize,
    ) -> Option<TileDropout<A>> {
        let of = job.dropout.as_ref()?;
        let band = piece.band.as_ref()?;
        let limit = of.dropout.threshold().checked_sub(1)?;
        let key = band.key + (key - piece.keys.start) * band.key_step;
        let at = (batch, segment, tile.head);
        let (first, index) = of.pairs(at, band.query, key);
        let mut dropout = TileDropout {
            queries: [0; MAX_LANES],
            head: first.head as u32,
            document: first.document as u32,
            token: 4 * first.keys + index,
            key_step: band.key_step,
            seed: of.dropout.seed_words(),
            limit: u32::try_from(limit).expect("a threshold of at most 2^32"),
            gain: A::from_f64(of.dropout.gain()),
        };
        for (lane, query) in dropout.queries[..tile.count].iter_mut().enumerate() {
            let row = tile.first + lane - piece.queries.start;
            *query = (first.query + row * band.query_step) as u32;
        }
        Some(dropout)
    }

    /// The coins of queries from `lane` on, and of four keys.
    #[inline(always)]
    fn coins<X: Vector<A = A>>(&self, x: X, lane: usize, keys: usize) -> Words {
        let queries = std::array::from_fn(|i| self.queries[lane + i]);
        let [keys, head, document] =
            [keys as u32, self.head, self.document].map(|word| [word; COUNTERS]);
        x.philox([keys, queries, head, document], self.seed)
    }
}

/// Multiplies the weights of a tile by their factors; those of dropped pairs become `dropped`.
pub(crate) struct DropWeights<'a, X: Vector> {
    pub x: X,
    pub dropout: &'a TileDropout<X::A>,
    pub weights: &'a mut [X::V],
    /// The weight of dropped pairs.
    pub dropped: f64,
}

impl<X: Vector> SimdTask for DropWeights<'_, X> {
    #[inline(always)]
    fn run(self) {
        let DropWeights {
            x,
            dropout,
            weights,
            dropped,
        } = self;
        let gain = x.splat(dropout.gain);
        let dropped = x.splat(X::A::from_f64(dropped));
        let (mut drawn, mut coins) = (None, [[[0; COUNTERS]; 4]; MAX_LANES / COUNTERS]);
        for (j, row) in weights.chunks_exact_mut(VECTORS).enumerate() {
            let token = dropout.token + j * dropout.key_step;
            if drawn != Some(token / 4) {
                drawn = Some(token / 4);
                let groups = coins.iter_mut().take(lanes::<X>().div_ceil(COUNTERS));
                for (group, coins) in groups.enumerate() {
                    *coins = dropout.coins(x, group * COUNTERS, token / 4);
                }
            }
            for (n, weight) in row.iter_mut().enumerate() {
                let lane = n * X::WIDTH;
                let coins = &coins[lane / COUNTERS][token % 4][lane % COUNTERS..];
                let kept = x.mul(*weight, gain);
                *weight = x.select_above(&coins[..X::WIDTH], dropout.limit, kept, dropped);
            }
        }
    }
}

/// Multiplies vectors by factors. A factor of 0 gives 0, also of what is not finite.
pub(crate) struct MultiplyFactors<'a, X: Vector> {
    pub x: X,
    pub factors: &'a [X::V],
    pub weights: &'a mut [X::V],
}

impl<X: Vector> SimdTask for MultiplyFactors<'_, X> {
    #[inline(always)]
    fn run(self) {
        let (x, zero) = (self.x, self.x.zero());
        for (weight, factor) in self.weights.iter_mut().zip(self.factors) {
            let product = x.mul(*weight, *factor);
            *weight = x.select_less(zero, *factor, product, zero);
        }
    }
}

/// Marks the weights of pairs with a factor of 0.
pub(crate) struct MarkDropped<'a, X: Vector> {
    pub x: X,
    pub factors: &'a [X::V],
    pub weights: &'a mut [X::V],
}

impl<X: Vector> SimdTask for MarkDropped<'_, X> {
    #[inline(always)]
    fn run(self) {
        let x = self.x;
        let (zero, left_out) = (x.zero(), x.splat(X::A::from_f64(LEFT_OUT)));
        for (weight, factor) in self.weights.iter_mut().zip(self.factors) {
            *weight = x.select_less(zero, *factor, *weight, left_out);
        }
    }
}

/// out = keep · out + the sum of the terms that are not left out. They are summed as the fast path
/// sums them, to the last bit.
#[cold]
#[inline(never)]
pub(crate) fn accumulate_marked<X: Vector>(
    x: X,
    rows: &[X::A],
    width: usize,
    weights: &[X::V],
    keep: &[X::V; VECTORS],
    out: &mut [X::V],
) {
    x.run(AccumulateMarked {
        x,
        rows,
        width,
        weights,
        keep,
        out,
    });
}

struct AccumulateMarked<'a, X: Vector> {
    x: X,
    rows: &'a [X::A],
    width: usize,
    weights: &'a [X::V],
    keep: &'a [X::V; VECTORS],
    out: &'a mut [X::V],
}

impl<X: Vector> SimdTask for AccumulateMarked<'_, X> {
    #[inline(always)]
    fn run(self) {
        let (x, zero) = (self.x, self.x.zero());
        for (c, out) in self.out.chunks_exact_mut(VECTORS).enumerate() {
            let mut sums = [zero; VECTORS];
            let rows = self.rows.chunks_exact(self.width);
            for (row, weights) in rows.zip(self.weights.chunks_exact(VECTORS)) {
                let factor = x.splat(row[c]);
                for n in 0..VECTORS {
                    let sum = x.mul_add(factor, weights[n], sums[n]);
                    sums[n] = x.select_less(weights[n], zero, sums[n], sum);
                }
            }
            for n in 0..VECTORS {
                out[n] = x.mul_add(self.keep[n], out[n], sums[n]);
            }
        }
    }
}

/// sums[j] += Σ_i weights[j][i] · rows[i] over the lanes i that are not left out, summed as the
/// fast path sums them.
#[cold]
#[inline(never)]
pub(crate) fn accumulate_marked_keys<X: Vector>(
    x: X,
    weights: &[X::A],
    rows: &[X::A],
    width: usize,
    sums: &mut [X::A],
) {
    x.run(AccumulateMarkedKeys {
        x,
        weights,
        rows,
        width,
        sums,
    });
}

struct AccumulateMarkedKeys<'a, X: Vector> {
    x: X,
    weights: &'a [X::A],
    rows: &'a [X::A],
    width: usize,
    sums: &'a mut [X::A],
}

impl<X: Vector> SimdTask for AccumulateMarkedKeys<'_, X> {
    #[inline(always)]
    fn run(self) {
        let (x, step) = (self.x, self.width / X::WIDTH);
        let (rows, sums) = (X::of(self.rows), X::of_mut(self.sums));
        let weights = self.weights.chunks_exact(lanes::<X>());
        for (weights, sums) in weights.zip(sums.chunks_exact_mut(step)) {
            for (c, sum) in sums.iter_mut().enumerate() {
                let mut found = x.zero();
                for (weight, row) in weights.iter().zip(rows.chunks_exact(step)) {
                    if *weight < X::A::ZERO {
                        continue;
                    }
                    found = x.mul_add(x.splat(*weight), row[c], found);
                }
                *sum = x.add(*sum, found);
            }
        }
    }
}
