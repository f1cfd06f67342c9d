//! The inputs of a backward call, the data that its tasks share, and the layout of their scratch
//! memory.

use std::ops::Range;

use encke_core::dtype::Slice;
use encke_core::job::Job;
use encke_core::kernel::Upstream;

use super::super::config::AmxBackwardConfig;
use super::super::element::TileElement;
use super::super::gradient::{Factors, QueryStats};
use super::super::pack::WIDTH;
use super::super::scratch::RegionAllocator;
use super::super::softmax::KeyBounds;
use super::super::tiles::SLAB_BYTES;
use crate::shared::SharedRows;

/// The tensors that the backward pass reads.
#[derive(Debug, Clone, Copy)]
pub struct AmxBackwardInputs<'a, N> {
    /// Queries.
    pub q: &'a [N],
    /// Keys.
    pub k: &'a [N],
    /// Values.
    pub v: &'a [N],
    /// Gradient of the output.
    pub dout: &'a [N],
    /// The final lse.
    pub lse: &'a [f32],
    /// dout·out − dlse.
    pub delta: &'a [f32],
}

impl<'a, N: TileElement> AmxBackwardInputs<'a, N> {
    /// The inputs as slices of `N`; `None` unless q, k, v and dout are `N`, and lse and delta are
    /// f32.
    pub fn of(
        [q, k, v]: [Slice<'a>; 3],
        upstream: Upstream<Slice<'a>>,
    ) -> Option<AmxBackwardInputs<'a, N>> {
        Some(AmxBackwardInputs {
            q: N::of_slice(q)?,
            k: N::of_slice(k)?,
            v: N::of_slice(v)?,
            dout: N::of_slice(upstream.dout)?,
            lse: f32::of_slice(upstream.lse)?,
            delta: f32::of_slice(upstream.delta)?,
        })
    }
}

/// Offsets of the regions of scratch memory.
#[derive(Debug, Clone, Copy)]
pub struct AmxBackwardLayout {
    /// The most tiles that are packed at once.
    pub tiles: usize,
    /// [`AmxBackwardTile`] of each packed tile.
    pub states: usize,
    /// Stacks of the packed tiles: q as lanes and as pairs, dout likewise; slabs of the sums of dq.
    pub q_lanes: usize,
    pub q_pairs: usize,
    pub dout_lanes: usize,
    pub dout_pairs: usize,
    pub dq: usize,
    /// Stacks of the block of keys: k and v as rows, k as columns; slabs of the sums of dk and dv.
    pub k_rows: usize,
    pub k_columns: usize,
    pub v_rows: usize,
    pub dk: usize,
    pub dv: usize,
    /// Slabs of the current tile: scores, and dp = dout·v.
    pub scores: usize,
    pub dp: usize,
    /// Stacks of the current group of tiles: weights and ds as left factors, ds as right factor.
    pub weights: usize,
    pub ds: usize,
    pub ds_right: usize,
    /// Copies of k, q and dout with zeros in place of non-finite elements.
    pub finite: [usize; 3],
    /// Bytes of all regions.
    pub bytes: usize,
}

impl AmxBackwardLayout {
    pub fn new<N: TileElement, S: AmxBackwardConfig>(job: &Job) -> AmxBackwardLayout {
        const { assert!(S::KEYS.is_multiple_of(WIDTH)) };
        let steps = job.dim.div_ceil(WIDTH);
        let limit = S::QUERY_ELEMENTS / (steps * WIDTH) / WIDTH;
        // No more than the job has.
        let available = job.queries.div_ceil(WIDTH).next_multiple_of(S::QUERY_TILES);
        let tiles = (limit / S::QUERY_TILES * S::QUERY_TILES)
            .clamp(S::QUERY_TILES, 32)
            .min(available);
        let key_steps = S::KEYS / WIDTH;
        let mut regions = RegionAllocator::default();
        let mut slabs = |count: usize| regions.take(count * SLAB_BYTES);
        let splits = N::SPLITS;
        let mut layout = AmxBackwardLayout {
            tiles,
            q_lanes: slabs(splits * tiles * steps),
            q_pairs: slabs(splits * tiles * steps),
            dout_lanes: slabs(splits * tiles * steps),
            dout_pairs: slabs(splits * tiles * steps),
            dq: slabs(tiles * 2 * steps),
            k_rows: slabs(splits * key_steps * steps),
            k_columns: slabs(splits * key_steps * steps),
            v_rows: slabs(splits * key_steps * steps),
            dk: slabs(key_steps * 2 * steps),
            dv: slabs(key_steps * 2 * steps),
            scores: slabs(2 * key_steps),
            dp: slabs(2 * key_steps),
            weights: slabs(splits * key_steps * S::QUERY_TILES),
            ds: slabs(splits * key_steps * S::QUERY_TILES),
            ds_right: slabs(splits * key_steps * S::QUERY_TILES),
            finite: [
                slabs(splits * key_steps * steps),
                slabs(splits * S::QUERY_TILES * steps),
                slabs(splits * S::QUERY_TILES * steps),
            ],
            states: 0,
            bytes: 0,
        };
        layout.states = regions.take(tiles * size_of::<AmxBackwardTile>());
        layout.bytes = regions.bytes();
        layout
    }
}

/// 32 queries of one head.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct AmxBackwardTile {
    pub stats: QueryStats,
    pub first: usize,
    pub count: usize,
    /// The keys that some of the 32 lanes sees, and those that all of them see.
    pub seen: KeyBounds,
    pub common: KeyBounds,
    /// Whether a query has a huge element.
    pub huge: u32,
    /// Whether q, or dout, has an element that is not finite.
    pub nonfinite: [u32; 2],
    /// Whether the sums of dq hold something.
    pub dq_started: u32,
}

impl AmxBackwardTile {
    /// Whether some lane sees one of `count` keys from `start` on.
    pub fn sees(&self, start: usize, count: usize) -> bool {
        self.seen.meets(start..start + count)
    }

    /// The groups of 32 keys of a block from the first to the last one that some lane sees.
    pub fn steps(&self, keys: PackedKeyBlock) -> Range<usize> {
        if !self.sees(keys.start, keys.count) {
            return 0..0;
        }
        let first = self.seen.start.saturating_sub(keys.start) / WIDTH;
        let end = (self.seen.end - keys.start).min(keys.count);
        first..end.div_ceil(WIDTH)
    }

    /// Whether some key of these groups of a block is hidden from some lane.
    pub fn masked(&self, keys: PackedKeyBlock, steps: Range<usize>) -> bool {
        let key = |step: usize| keys.start + step * WIDTH;
        !self.common.cover(key(steps.start)..key(steps.end))
    }
}

/// The block of keys that is packed.
#[derive(Debug, Clone, Copy)]
pub struct PackedKeyBlock {
    pub start: usize,
    pub count: usize,
    /// Whether an element of k is huge.
    pub huge: bool,
    /// Whether an element of k is not finite.
    pub nonfinite: bool,
}

/// The data that all tasks of a call share.
pub struct AmxBackwardCall<'a, N> {
    pub job: &'a Job,
    pub inputs: AmxBackwardInputs<'a, N>,
    pub dq: SharedRows<'a, f32>,
    pub dk: SharedRows<'a, f32>,
    pub dv: SharedRows<'a, f32>,
    /// Steps of 32 channels.
    pub steps: usize,
    pub factors: Factors,
    pub layout: AmxBackwardLayout,
}
