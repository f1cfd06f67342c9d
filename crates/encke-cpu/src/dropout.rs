//! Dropout: the factors of a tile's weights after the softmax.
//!
//! The decision here: coins are drawn for many queries at once, one query in each lane, and for
//! four keys at a time. Like the transform of scores, this is a task of its own, compiled
//! for the instruction set and called only by jobs that have dropout.

use encke_core::job::{Job, Piece};

use crate::grid::Tile;
use crate::philox::{COUNTERS, Words};
use crate::real::Real;
use crate::shape::{MAX_LANES, VECTORS, lanes};
use crate::vector::{SimdTask, Vector};

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

/// Multiplies the weights of a tile by their factors.
pub(crate) struct DropWeights<'a, X: Vector> {
    pub x: X,
    pub dropout: &'a TileDropout<X::A>,
    pub weights: &'a mut [X::V],
}

impl<X: Vector> SimdTask for DropWeights<'_, X> {
    #[inline(always)]
    fn run(self) {
        let DropWeights {
            x,
            dropout,
            weights,
        } = self;
        let (zero, gain) = (x.zero(), x.splat(dropout.gain));
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
                *weight = x.select_above(&coins[..X::WIDTH], dropout.limit, kept, zero);
            }
        }
    }
}

/// Multiplies vectors by factors.
pub(crate) struct MultiplyFactors<'a, X: Vector> {
    pub x: X,
    pub factors: &'a [X::V],
    pub weights: &'a mut [X::V],
}

impl<X: Vector> SimdTask for MultiplyFactors<'_, X> {
    #[inline(always)]
    fn run(self) {
        for (weight, factor) in self.weights.iter_mut().zip(self.factors) {
            *weight = self.x.mul(*weight, *factor);
        }
    }
}
