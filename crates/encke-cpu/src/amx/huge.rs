//! Scores of rows with huge elements, computed in f64.
//!
//! The tiles take subnormal values as 0, and they sum q·k without the scale. Neither matters as
//! long as all elements are below [`HUGE`]: what is lost is far below the rounding of a score, and
//! no sum overflows. So the scores of rows with larger elements are computed once more here. Which
//! scores are, and so which bits a query gets, depends on its own row and on keys visible to it.
//! This is slow, but hardly any data comes here. Rows with infinities or NaN stay with the tiles.

use encke_core::job::Job;

use super::element::{ScoreScale, TileElement};
use super::pack::WIDTH;
use super::softmax::VisibleKeys;
use super::tiles::{ROW_BYTES, SLAB_BYTES};

/// Elements from 2⁵⁶ on are huge.
pub const HUGE: f32 = (1u64 << 56) as f32;

/// The queries of a tile and the keys of a block.
pub struct ScoreRows<'a, N> {
    pub job: &'a Job,
    pub q: &'a [N],
    pub k: &'a [N],
    pub batch: usize,
    pub segment: usize,
    pub head: usize,
    /// The first query and the number of queries.
    pub queries: (usize, usize),
    /// The first key.
    pub key: usize,
    /// The number of groups of 32 keys.
    pub steps: usize,
}

/// Scores that are computed in f64.
pub struct HugeScores<'a, N> {
    rows: ScoreRows<'a, N>,
    /// Bit i: query i is huge.
    queries: u32,
    /// Whether each key is huge.
    keys: Vec<bool>,
    /// The lanes with such a score: bit i for query i.
    pub lanes: u32,
}

impl<'a, N: TileElement> ScoreRows<'a, N> {
    fn query(&self, lane: usize) -> &'a [N] {
        let row = self.queries.0 + lane;
        let at = self.job.q.at(self.batch, self.segment, row, self.head);
        &self.q[at..at + self.job.dim]
    }

    fn key(&self, index: usize) -> &'a [N] {
        let row = self.key + index;
        let at = self.job.k.at(self.batch, self.segment, row, self.head);
        &self.k[at..at + self.job.dim]
    }

    /// The scores of huge rows, among the keys that are visible to each query.
    pub fn huge_scores(self, visible: &VisibleKeys) -> HugeScores<'a, N> {
        let huge = |row: &[N]| {
            let sizes = row.iter().map(|x| x.to_f64().abs());
            let largest = sizes.fold(0.0, |most, x| if x > most || x.is_nan() { x } else { most });
            (f64::from(HUGE)..f64::INFINITY).contains(&largest)
        };
        let count = (self.job.keys - self.key).min(self.steps * WIDTH);
        let keys: Vec<bool> = (0..count).map(|index| huge(self.key(index))).collect();
        let (mut queries, mut lanes) = (0, 0);
        for lane in 0..self.queries.1 {
            let [start, end] = [visible.starts.0[lane], visible.ends.0[lane]]
                .map(|key| (key as usize).saturating_sub(self.key).min(count));
            let own = start < end && huge(self.query(lane));
            let other = keys[start..end.max(start)].contains(&true);
            queries |= u32::from(own) << lane;
            lanes |= u32::from(own || other) << lane;
        }
        HugeScores {
            rows: self,
            queries,
            keys,
            lanes,
        }
    }
}

impl<N: TileElement> HugeScores<'_, N> {
    /// Replaces q·k by the score, scale included, in all of `lanes`.
    ///
    /// # Safety
    /// The slabs of the block can be read and written at `scores`.
    pub unsafe fn store(&self, scale: ScoreScale, scores: *mut u8) {
        let dot = |q: &[N], k: &[N]| -> f64 {
            let terms = q.iter().zip(k).map(|(q, k)| q.to_f64() * k.to_f64());
            terms.sum()
        };
        for lane in (0..WIDTH).filter(|lane| self.lanes >> lane & 1 != 0) {
            let (query, own) = (self.rows.query(lane), self.queries >> lane & 1 != 0);
            for (index, &huge) in self.keys.iter().enumerate() {
                let slab = (index / WIDTH * 2 + lane / 16) * SLAB_BYTES;
                let at = slab + index % WIDTH * ROW_BYTES + lane % 16 * 4;
                // SAFETY: the score lies in a slab of the block.
                let score = unsafe { &mut *scores.add(at).cast::<f32>() };
                *score = match own || huge {
                    true => (self.rows.job.scale * dot(query, self.rows.key(index))) as f32,
                    false => *score * scale.natural,
                };
            }
        }
    }
}
