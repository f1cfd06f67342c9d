//! Jobs: the unit of work of a kernel, one strided batched attention with its mask.
//!
//! The decision here: a job consists of addresses. Each operand is an affine view of a buffer, so
//! dilation, segments, grouped heads and packed parcels are all just strides to a kernel, and no
//! rows are gathered before they are attended to.

use std::ops::Range;
use std::sync::Arc;

use serde::Serialize;

pub use crate::dropout::JobDropout;
pub use crate::mask::{Band, Mask, Piece, Window};
pub use crate::tiles::{JobTiles, TilePart};

/// An affine view of a buffer: maps (batch, segment, row, head) to an address in elements.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Operand {
    /// Address of the first row of the first segment and batch entry, before `heads` is added.
    pub offset: usize,
    /// Stride between batch entries.
    pub batch: usize,
    /// Stride between segments.
    pub segment: usize,
    /// Stride between rows.
    pub row: usize,
    /// The offset of each head.
    pub heads: Arc<[usize]>,
}

impl Operand {
    /// The address of the first element of one row of one head.
    #[inline]
    pub fn at(&self, batch: usize, segment: usize, row: usize, head: usize) -> usize {
        self.offset
            + batch * self.batch
            + segment * self.segment
            + row * self.row
            + self.heads[head]
    }
}

/// What happens to a score q·k·scale before the softmax (spec section 11).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScoreTransform {
    /// Scores x become `softcap * tanh(x / softcap)`.
    pub softcap: Option<f64>,
    /// The ALiBi slope of each head of the job: slope times distance is subtracted. The job has a
    /// mask then, which holds the positions.
    pub slopes: Option<Arc<[f64]>>,
}

/// One strided batched attention: in every segment of every batch entry, for every head, `queries`
/// rows against `keys` rows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Job {
    /// Batch entries.
    pub batch: usize,
    /// Segments.
    pub segments: usize,
    /// Query rows in a segment.
    pub queries: usize,
    /// Key rows in a segment.
    pub keys: usize,
    /// Heads.
    pub heads: usize,
    /// Elements of a row of q and k.
    pub dim: usize,
    /// Elements of a row of v, acc and out.
    pub value_dim: usize,
    /// Addresses in q, in elements.
    pub q: Operand,
    /// Addresses in k and dk, in elements. Those in v and dv are [`Job::value`] of them.
    pub k: Operand,
    /// Addresses of cells. A cell is one query of one head slot: m, l, lse and delta hold one
    /// element per cell; acc, out and dout hold `value_dim` elements per cell, at `value_dim`
    /// times the address.
    pub cells: Operand,
    /// Addresses in delta, if they differ from those of the other cells.
    pub delta: Option<Operand>,
    /// Addresses in dq, if they differ from those in q.
    pub dq: Option<Operand>,
    /// Which keys each query sees; None if every query sees every key.
    pub mask: Option<Mask>,
    /// What happens to the scores; None if nothing does.
    pub transform: Option<ScoreTransform>,
    /// Which pairs are dropped after the softmax; None if none are. A job with dropout has a band
    /// as its mask, which holds the positions.
    pub dropout: Option<JobDropout>,
    /// The softmax scale: factor of q·k.
    pub scale: f64,
    /// Factor of the output after the softmax. The backward pass needs it too.
    pub gain: f64,
    /// The tiles in whose order it is summed; None if the kernel decides the order.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tiles: Option<JobTiles>,
}

impl Job {
    /// The address in v of the row whose address in k is `key`: rows and heads are in the same
    /// order in both.
    #[inline]
    pub fn value(&self, key: usize) -> usize {
        match self.value_dim == self.dim {
            true => key,
            false => key / self.dim * self.value_dim,
        }
    }

    /// Addresses in v and dv.
    pub fn values(&self) -> Operand {
        Operand {
            offset: self.value(self.k.offset),
            batch: self.value(self.k.batch),
            segment: self.value(self.k.segment),
            row: self.value(self.k.row),
            heads: self.k.heads.iter().map(|&at| self.value(at)).collect(),
        }
    }

    /// Addresses in delta.
    #[inline]
    pub fn delta(&self) -> &Operand {
        self.delta.as_ref().unwrap_or(&self.cells)
    }

    /// The factor of the weight of query row `i` and key row `j` after the softmax: 0 if the pair
    /// is dropped.
    pub fn dropout_factor(&self, at: (usize, usize, usize), i: usize, j: usize) -> f64 {
        let Some(of) = &self.dropout else {
            return 1.0;
        };
        let Some(Mask::Band(band)) = &self.mask else {
            unreachable!("the mask of a job with dropout is a band")
        };
        let (query, key) = (
            band.query + i * band.query_step,
            band.key + j * band.key_step,
        );
        let (pairs, index) = of.pairs(at, query, key);
        of.dropout.factors(pairs)[index]
    }

    /// The keys that query row `i` sees.
    #[inline]
    pub fn visible(&self, i: usize) -> Range<usize> {
        let visible = match &self.mask {
            None => 0..self.keys,
            Some(mask) => mask.visible(i, self.keys),
        };
        match &self.tiles {
            None => visible,
            Some(tiles) => tiles.visible(i, visible),
        }
    }

    /// The score of query row `i` and key row `j` of head `head`, given q·k, and its derivative by
    /// scale·q·k (spec section 11). The query sees the key.
    pub fn score(&self, head: usize, i: usize, j: usize, product: f64) -> (f64, f64) {
        let plain = self.scale * product;
        let Some(transform) = &self.transform else {
            return (plain, 1.0);
        };
        let (mut score, mut derivative) = (plain, 1.0);
        if let Some(softcap) = transform.softcap {
            let share = (plain / softcap).tanh();
            (score, derivative) = (softcap * share, 1.0 - share * share);
        }
        if let Some(slopes) = &transform.slopes {
            let mask = self.mask.as_ref();
            let distance = mask.and_then(|mask| mask.distance(i, j));
            let distance = distance.expect("the mask of a job with slopes has positions");
            score -= slopes[head] * distance as f64;
        }
        (score, derivative)
    }

    /// Whether some query does not see some key.
    pub fn hides(&self) -> bool {
        let hides = |i: usize| self.visible(i) != (0..self.keys);
        match &self.mask {
            None => false,
            // A band moves in one direction, so its first and last query see the extremes.
            Some(Mask::Band(_)) => hides(0) || hides(self.queries - 1),
            Some(Mask::Documents(_)) => true,
        }
    }

    /// The band of a causal mask; None if there is no mask or another one.
    pub fn causal(&self) -> Option<Band> {
        match self.mask {
            Some(Mask::Band(band)) if band.window == Window::CAUSAL => Some(band),
            _ => None,
        }
    }

    /// Whether the job has no other mask than a causal one, plain scores, no dropout, and values
    /// as wide as keys.
    pub fn is_plain(&self) -> bool {
        self.transform.is_none()
            && self.dropout.is_none()
            && self.dim == self.value_dim
            && (self.mask.is_none() || self.causal().is_some())
    }

    /// (query, key) pairs the job computes, over all batch entries, segments and heads.
    pub fn pairs(&self) -> u128 {
        let each = (self.batch * self.segments * self.heads) as u128;
        let one: u128 = match (&self.mask, self.tiles) {
            (_, Some(tiles)) if tiles.part != TilePart::All => {
                return self.tile_steps().map(|step| step.pairs()).sum();
            }
            (None, _) => self.queries as u128 * self.keys as u128,
            (Some(mask), _) => mask.pairs(self.queries, self.keys),
        };
        each * one
    }

    /// This job restricted to some of its query rows.
    pub fn of_queries(&self, rows: std::ops::Range<usize>) -> Job {
        let of = |operand: &Operand| Operand {
            offset: operand.offset + rows.start * operand.row,
            ..operand.clone()
        };
        Job {
            queries: rows.len(),
            q: of(&self.q),
            cells: of(&self.cells),
            delta: self.delta.as_ref().map(of),
            dq: self.dq.as_ref().map(of),
            tiles: self.tiles.map(|tiles| JobTiles {
                query: tiles.query + rows.start,
                ..tiles
            }),
            mask: self.mask.as_ref().map(|mask| mask.of_queries(rows)),
            ..self.clone()
        }
    }
}

/// Rows to copy, add or merge from one buffer into another; addresses as in [`Job`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Block {
    /// Batch entries.
    pub batch: usize,
    /// Segments.
    pub segments: usize,
    /// Rows in a segment.
    pub rows: usize,
    /// Heads.
    pub heads: usize,
    /// Contiguous elements of one row of one head.
    pub width: usize,
    /// The source.
    pub from: Operand,
    /// The destination.
    pub to: Operand,
}

impl Block {
    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.batch * self.segments * self.rows * self.heads * self.width
    }

    /// `elements` contiguous elements, from one address to another.
    pub fn contiguous(elements: usize, from: usize, to: usize) -> Block {
        let at = |offset: usize| Operand {
            offset,
            batch: 0,
            segment: 0,
            row: 0,
            heads: Arc::new([0]),
        };
        Block {
            batch: 1,
            segments: 1,
            rows: 1,
            heads: 1,
            width: elements,
            from: at(from),
            to: at(to),
        }
    }

    /// Every pair of addresses (from, to), in storage order of the source.
    pub fn addresses(&self) -> impl Iterator<Item = (usize, usize)> {
        let each = |count: usize| 0..count;
        each(self.batch).flat_map(move |b| {
            each(self.segments).flat_map(move |s| {
                each(self.rows).flat_map(move |i| {
                    each(self.heads)
                        .map(move |h| (self.from.at(b, s, i, h), self.to.at(b, s, i, h)))
                })
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_are_capped_and_slope_with_positions() {
        let rows = |row: usize| Operand {
            offset: 0,
            batch: 0,
            segment: 0,
            row,
            heads: [0, 0].into(),
        };
        let mut job = Job {
            batch: 1,
            segments: 1,
            queries: 4,
            keys: 4,
            heads: 2,
            dim: 1,
            value_dim: 1,
            q: rows(1),
            k: rows(1),
            cells: rows(1),
            delta: None,
            dq: None,
            mask: Some(Mask::Band(Band::causal((10, 2), (3, 5)))),
            transform: None,
            dropout: None,
            scale: 0.5,
            gain: 1.0,
            tiles: None,
        };
        assert_eq!(job.score(1, 2, 1, 6.0), (3.0, 1.0));
        job.transform = Some(ScoreTransform {
            softcap: Some(2.0),
            slopes: Some([0.25, 0.5].into()),
        });
        // The query is at 14, the key at 8.
        let (score, derivative) = job.score(1, 2, 1, 6.0);
        assert_eq!(score, 2.0 * 1.5f64.tanh() - 3.0);
        let step = 1e-6;
        let [low, high] = [6.0 - step, 6.0 + step].map(|x| job.score(1, 2, 1, x).0);
        assert!((derivative - (high - low) / step).abs() < 1e-8);
    }
}
