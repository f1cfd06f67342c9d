//! The data that all tasks of a forward call share, and the layout of their scratch memory.

use encke_core::job::Job;

use super::super::config::AmxForwardConfig;
use super::super::element::{ScoreScale, TileElement};
use super::super::pack::WIDTH;
use super::super::scratch::RegionAllocator;
use super::super::softmax::{KeyBounds, TileSoftmax};
use super::super::tiles::SLAB_BYTES;
use crate::target::Target;

/// Tasks of fewer than twice as many tiles are not divided: keys are packed again for each task.
pub const MIN_TILES: usize = 8;
/// Tiles of the largest task: packing keys once for 2048 queries takes less time than for 1024, and
/// for 4096 it is no faster.
const MAX_TILES: usize = 64;

/// Offsets of the regions of scratch memory.
#[derive(Debug, Clone, Copy)]
pub struct AmxForwardLayout {
    /// The most tiles of a task.
    pub tiles: usize,
    /// [`AmxForwardTile`] of each tile.
    pub states: usize,
    pub queries: usize,
    pub sums: usize,
    pub keys: usize,
    pub values: usize,
    /// Values of one block with zeros in place of non-finite elements.
    pub finite_values: usize,
    pub scores: usize,
    pub weights: usize,
    /// Bytes of all regions.
    pub bytes: usize,
}

impl AmxForwardLayout {
    pub fn new<N: TileElement, S: AmxForwardConfig>(job: &Job) -> AmxForwardLayout {
        const { assert!(S::PACKED_KEYS.is_multiple_of(S::KEYS) && S::KEYS.is_multiple_of(WIDTH)) };
        const { assert!(S::PACKED_KEYS <= 64 * WIDTH) };
        let steps = job.dim.div_ceil(WIDTH);
        let width = steps * WIDTH;
        // No more than the job has, even if all heads share their keys.
        let tiles = (S::QUERY_ELEMENTS / width / WIDTH)
            .clamp(MIN_TILES, MAX_TILES)
            .min(job.queries.div_ceil(WIDTH) * job.heads);
        let [keys, packed] =
            [S::KEYS, S::PACKED_KEYS].map(|most| job.keys.min(most).div_ceil(WIDTH));
        let (slabs, stacks) = (
            |count: usize| count * SLAB_BYTES,
            |count: usize| count * N::STACK_BYTES,
        );
        let mut regions = RegionAllocator::default();
        let mut layout = AmxForwardLayout {
            tiles,
            states: regions.take(tiles * size_of::<AmxForwardTile>()),
            sums: regions.take(slabs(tiles * 2 * steps)),
            scores: regions.take(slabs(2 * keys)),
            queries: regions.take(stacks(tiles * steps)),
            keys: regions.take(stacks(packed * steps)),
            values: regions.take(stacks(packed * steps)),
            finite_values: regions.take(stacks(keys * steps)),
            weights: 0,
            bytes: 0,
        };
        layout.weights = match N::IN_PLACE {
            true => layout.scores,
            false => regions.take(stacks(keys)),
        };
        layout.bytes = regions.bytes();
        layout
    }
}

/// 32 queries of one head.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct AmxForwardTile {
    pub softmax: TileSoftmax,
    pub head: usize,
    pub first: usize,
    pub count: usize,
    /// The keys that some query sees, and those that every query sees.
    pub seen: KeyBounds,
    pub common: KeyBounds,
    /// Whether a query has a huge element.
    pub huge: u32,
}

/// The keys and values that are packed.
#[derive(Debug, Clone, Copy)]
pub struct PackedKeys {
    pub first: usize,
    pub count: usize,
    /// Bit i: one of the keys 32 i .. 32 i + 32 has a huge element.
    pub huge: u64,
    /// Bit i: one of the values 32 i .. 32 i + 32 is not finite.
    pub nonfinite: u64,
}

/// The data that all tasks of a call share.
pub struct AmxForwardCall<'a, N> {
    pub job: &'a Job,
    pub q: &'a [N],
    pub k: &'a [N],
    pub v: &'a [N],
    pub target: Target<'a, f32>,
    /// Steps of 32 channels.
    pub steps: usize,
    pub scale: ScoreScale,
    pub layout: AmxForwardLayout,
}

impl<N: TileElement> AmxForwardCall<'_, N> {
    #[inline]
    pub fn queries(&self, tile: usize, scratch: *mut u8) -> *mut u8 {
        scratch.wrapping_add(self.layout.queries + tile * self.steps * N::STACK_BYTES)
    }

    #[inline]
    pub fn sums(&self, tile: usize, scratch: *mut u8) -> *mut u8 {
        scratch.wrapping_add(self.layout.sums + tile * 2 * self.steps * SLAB_BYTES)
    }

    /// Keys of a block.
    #[inline]
    pub fn block_keys<S: AmxForwardConfig>(&self) -> usize {
        let tile = self.job.tiles.map_or(usize::MAX, |tiles| tiles.tile);
        S::KEYS.min(tile)
    }

    /// Packed keys (or values) from index `from` on, a multiple of 32.
    #[inline]
    pub fn packed(&self, region: usize, from: usize, scratch: *mut u8) -> *mut u8 {
        scratch.wrapping_add(region + from / WIDTH * self.steps * N::STACK_BYTES)
    }
}
