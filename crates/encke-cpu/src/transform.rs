//! Transforms of scores before the softmax: softcap and ALiBi slopes.
//!
//! The decision here: a tile's transform is a task of its own, compiled for the instruction set and
//! called only by jobs that have one, so that the loops of other jobs stay as they are.

use encke_core::job::{Job, Piece};

use crate::grid::Tile;
use crate::real::Real;
use crate::shape::{MAX_LANES, VECTORS};
use crate::vector::{SimdTask, Vector};

/// What happens to the scores of one tile and consecutive keys.
#[derive(Debug)]
pub(crate) struct TileTransform<A> {
    softcap: Option<A>,
    slope: A,
    /// The position of each query, less that of the first key.
    leads: [A; MAX_LANES],
    key_step: A,
}

impl<A: Real> TileTransform<A> {
    /// The transform of a tile and the keys from `key` on; `None` if the job has none.
    pub fn new(job: &Job, piece: &Piece, tile: Tile, key: usize) -> Option<TileTransform<A>> {
        let transform = job.transform.as_ref()?;
        let mut tile_transform = TileTransform {
            softcap: transform.softcap.map(A::from_f64),
            slope: A::ZERO,
            leads: [A::ZERO; MAX_LANES],
            key_step: A::ZERO,
        };
        if let (Some(slopes), Some(band)) = (&transform.slopes, &piece.band) {
            tile_transform.slope = A::from_f64(slopes[tile.head]);
            tile_transform.key_step = A::from_f64(band.key_step as f64);
            let key = band.key + (key - piece.keys.start) * band.key_step;
            for (lane, lead) in tile_transform.leads[..tile.count].iter_mut().enumerate() {
                let row = tile.first + lane - piece.queries.start;
                let query = band.query + row * band.query_step;
                *lead = A::from_f64(query as f64 - key as f64);
            }
        }
        Some(tile_transform)
    }

    /// A score, and its derivative by the score before. `lead` is the position of the query, less
    /// that of the key.
    #[inline(always)]
    fn score<X: Vector<A = A>>(&self, x: X, score: X::V, lead: X::V) -> (X::V, X::V) {
        let one = x.splat(A::ONE);
        let (score, derivative) = match self.softcap {
            None => (score, one),
            Some(softcap) => {
                let share = x.tanh(x.mul(score, x.splat(A::ONE / softcap)));
                let derivative = x.sub(one, x.mul(share, share));
                (x.mul(share, x.splat(softcap)), derivative)
            }
        };
        let distance = x.max(lead, x.sub(x.zero(), lead));
        let bias = x.mul(x.splat(self.slope), distance);
        (x.sub(score, bias), derivative)
    }

    /// The lead of each query over key `j`.
    #[inline(always)]
    fn leads<X: Vector<A = A>>(&self, x: X, j: usize) -> [X::V; VECTORS] {
        let before = x.splat(A::from_f64(j as f64) * self.key_step);
        let mut leads = [before; VECTORS];
        for (lead, first) in leads.iter_mut().zip(X::of(&self.leads)) {
            *lead = x.sub(*first, before);
        }
        leads
    }
}

/// Transforms the scores of a tile.
pub(crate) struct TransformScores<'a, X: Vector> {
    pub x: X,
    pub transform: &'a TileTransform<X::A>,
    pub scores: &'a mut [X::V],
}

impl<X: Vector> SimdTask for TransformScores<'_, X> {
    #[inline(always)]
    fn run(self) {
        let x = self.x;
        for (j, row) in self.scores.chunks_exact_mut(VECTORS).enumerate() {
            let leads = self.transform.leads(x, j);
            for n in 0..VECTORS {
                (row[n], _) = self.transform.score(x, row[n], leads[n]);
            }
        }
    }
}

/// Turns the scores of a tile into weights, and dp into gradients of the scores before the
/// transform.
pub(crate) struct TransformGradients<'a, X: Vector> {
    pub x: X,
    pub transform: &'a TileTransform<X::A>,
    pub scores: &'a mut [X::V],
    pub dp: &'a mut [X::V],
    pub lse: [X::V; VECTORS],
    pub delta: [X::V; VECTORS],
}

impl<X: Vector> SimdTask for TransformGradients<'_, X> {
    #[inline(always)]
    fn run(self) {
        let x = self.x;
        let scores = self.scores.chunks_exact_mut(VECTORS);
        let pairs = scores.zip(self.dp.chunks_exact_mut(VECTORS));
        for (j, (scores, dp)) in pairs.enumerate() {
            let leads = self.transform.leads(x, j);
            for n in 0..VECTORS {
                let (score, derivative) = self.transform.score(x, scores[n], leads[n]);
                let p = x.exp(x.sub(score, self.lse[n]));
                let ds = x.mul(p, x.sub(dp[n], self.delta[n]));
                dp[n] = x.mul(ds, derivative);
                scores[n] = p;
            }
        }
    }
}
