//! The data that all tasks of a forward call share, and the layout of their scratch memory.

use encke_core::job::{Band, Job, Mask, Piece};

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

/// [`PackedKeys`] has a bit for each 32 of them.
const MOST_PACKED_KEYS: usize = 128 * WIDTH;

/// Tiles of the largest task whose packed keys stay while its queries advance: the keys around its
/// first queries are packed by the task before it too.
const ADVANCING_TILES: usize = 256;
/// The most tiles that advance at once, and the fewest.
const ADVANCE: [usize; 2] = [4, 16];

/// Queries of a window that advance, and the keys that stay packed meanwhile.
struct Advance {
    /// How many tiles of queries advance at once.
    tiles: usize,
    /// Keys that are packed at once: all that these queries see.
    packed_keys: usize,
}

impl Advance {
    /// `most` is the most keys that can stay packed, in blocks of `block`. None if keys do not stay
    /// packed: not every query sees a window, or it has too many keys.
    fn new(job: &Job, most: usize, block: usize) -> Option<Advance> {
        let [least_tiles, most_tiles] = ADVANCE;
        let of_band = |band: &Band| {
            let (left, right) = (band.window.left?, band.window.right?);
            // The window of a query, and keys at both ends that are packed with a visible one.
            let around = (left + right + 1).div_ceil(band.key_step) + 2 * WIDTH;
            let room = most.checked_sub(around)?;
            let tiles = (room * band.key_step / band.query_step / WIDTH).min(most_tiles);
            let keys = around + (tiles * WIDTH * band.query_step).div_ceil(band.key_step);
            (tiles >= least_tiles).then(|| Advance {
                tiles,
                packed_keys: keys.next_multiple_of(block).min(most),
            })
        };
        match (&job.mask, &job.tiles) {
            (Some(Mask::Band(band)), None) => of_band(band),
            (Some(Mask::Documents(pieces)), None) => {
                let of_piece = |piece: &Piece| piece.band.as_ref().and_then(of_band);
                let pieces: Option<Vec<Advance>> = pieces.iter().map(of_piece).collect();
                pieces?.into_iter().reduce(|a, b| Advance {
                    tiles: a.tiles.min(b.tiles),
                    packed_keys: a.packed_keys.max(b.packed_keys),
                })
            }
            _ => None,
        }
    }
}

/// Offsets of the regions of scratch memory.
#[derive(Debug, Clone, Copy)]
pub struct AmxForwardLayout {
    /// The most tiles whose queries are packed at once.
    pub tiles: usize,
    /// Whether packed keys stay while the queries of a task advance.
    pub advances: bool,
    /// The most tiles of a task: those of `tiles`, unless its queries advance.
    pub task_tiles: usize,
    /// Keys and values that are packed at once.
    pub packed_keys: usize,
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
        const { assert!(S::PACKED_KEYS <= MOST_PACKED_KEYS) };
        let steps = job.dim.div_ceil(WIDTH);
        let width = steps * WIDTH;
        // No more than the job has, even if all heads share their keys.
        let available = job.queries.div_ceil(WIDTH) * job.heads;
        let limit = (S::QUERY_ELEMENTS / width / WIDTH).clamp(MIN_TILES, MAX_TILES);
        let most_keys = (S::WINDOW_ELEMENTS / width).min(MOST_PACKED_KEYS) / S::KEYS * S::KEYS;
        let advance = Advance::new(job, most_keys, S::KEYS);
        let (tiles, task_tiles, packed_keys) = match &advance {
            Some(advance) => (advance.tiles, ADVANCING_TILES, advance.packed_keys),
            None => (limit, limit, S::PACKED_KEYS),
        };
        let [tiles, task_tiles] = [tiles, task_tiles].map(|tiles| tiles.min(available));
        let [keys, packed] = [S::KEYS, packed_keys].map(|most| job.keys.min(most).div_ceil(WIDTH));
        let (slabs, stacks) = (
            |count: usize| count * SLAB_BYTES,
            |count: usize| count * N::STACK_BYTES,
        );
        let mut regions = RegionAllocator::default();
        let mut layout = AmxForwardLayout {
            tiles,
            advances: advance.is_some(),
            task_tiles,
            packed_keys,
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
///
/// Key j is at index (j - origin) modulo [`AmxForwardLayout::packed_keys`]: the next keys replace
/// the first ones.
#[derive(Debug, Clone, Copy)]
pub struct PackedKeys {
    pub origin: usize,
    /// One past the last packed key.
    pub end: usize,
    /// Bit i: one of the keys at indices 32 i .. 32 i + 32 has a huge element.
    pub huge: u128,
    /// Bit i: one of the values at indices 32 i .. 32 i + 32 is not finite.
    pub nonfinite: u128,
}

impl PackedKeys {
    /// None yet; blocks begin at multiples of their size from `origin` on.
    pub fn new(origin: usize) -> PackedKeys {
        PackedKeys {
            origin,
            end: origin,
            huge: 0,
            nonfinite: 0,
        }
    }
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
