//! Dropout: the factors of a tile's weights after the softmax.
//!
//! The decision here: coins are drawn for all queries of a vector at once, one query in each lane,
//! and for four keys at a time. Like the transform of scores, this is a task of its own, compiled
//! for the instruction set and called only by jobs that have dropout.

use encke_core::job::{Job, Piece};

use crate::grid::Tile;
use crate::real::Real;
use crate::shape::{MAX_LANES, VECTORS};
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

    /// The coins of vector `n` of queries, one query in each lane, and four keys.
    #[inline(always)]
    fn coins<const W: usize>(&self, n: usize, keys: u32) -> [[u32; W]; 4] {
        let queries: [u32; W] = std::array::from_fn(|lane| self.queries[n * W + lane]);
        let mut words = [[keys; W], queries, [self.head; W], [self.document; W]];
        let mut seed = self.seed;
        // Philox4x32 with ten rounds, as `encke_core::dropout::philox`.
        for _ in 0..10 {
            for lane in 0..W {
                let [x0, x1, x2, x3] = words.map(|word| word[lane]);
                let low = 0xD251_1F53 * u64::from(x0);
                let high = 0xCD9E_8D57 * u64::from(x2);
                words[0][lane] = (high >> 32) as u32 ^ x1 ^ seed[0];
                words[1][lane] = high as u32;
                words[2][lane] = (low >> 32) as u32 ^ x3 ^ seed[1];
                words[3][lane] = low as u32;
            }
            seed[0] = seed[0].wrapping_add(0x9E37_79B9);
            seed[1] = seed[1].wrapping_add(0xBB67_AE85);
        }
        words
    }

    /// Multiplies vector `n` of each row of weights by its factors.
    #[inline(always)]
    fn drop_vector<X: Vector<A = A>, const W: usize>(&self, n: usize, weights: &mut [X::V]) {
        let (mut drawn, mut coins) = (None, [[0; W]; 4]);
        for (j, row) in weights.chunks_exact_mut(VECTORS).enumerate() {
            let token = self.token + j * self.key_step;
            if drawn != Some(token / 4) {
                drawn = Some(token / 4);
                coins = self.coins::<W>(n, (token / 4) as u32);
            }
            let row: &mut [A] = bytemuck::cast_slice_mut(&mut row[n..=n]);
            for (x, coin) in row.iter_mut().zip(coins[token % 4]) {
                *x = match coin > self.limit {
                    true => *x * self.gain,
                    false => A::ZERO,
                };
            }
        }
    }
}

/// Multiplies the weights of a tile by their factors.
pub(crate) struct DropWeights<'a, X: Vector> {
    pub dropout: &'a TileDropout<X::A>,
    pub weights: &'a mut [X::V],
}

impl<X: Vector> SimdTask for DropWeights<'_, X> {
    #[inline(always)]
    fn run(self) {
        for n in 0..VECTORS {
            match X::WIDTH {
                16 => self.dropout.drop_vector::<X, 16>(n, self.weights),
                8 => self.dropout.drop_vector::<X, 8>(n, self.weights),
                4 => self.dropout.drop_vector::<X, 4>(n, self.weights),
                width => unreachable!("vectors of {width} elements"),
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
