//! The backward pass: five products of tiles for each pair of blocks, one exponential.
//!
//! A task packs some hundred queries of a head, keeps their dq, and meets them with all keys they see,
//! block by block; dk and dv of a block are summed over the queries at hand and then added to their
//! rows.

mod block;
mod chain;
mod rows;

use encke_core::dtype::Slice;
use encke_core::job::Job;
use encke_core::kernel::Upstream;

use super::gradient::{Factors, Known};
use super::number::{Number, Scale};
use super::pack::WIDTH;
use super::schedule;
use super::scratch::{Divider, Pool};
use super::shape::{BackwardShape, MOST_OF_SHORT};
use super::tiles::{SLAB_BYTES, Tiles};
use crate::shared::Shared;
use chain::{Running, Task, tasks};

/// Everything backward reads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Given<'a, N> {
    pub q: &'a [N],
    pub k: &'a [N],
    pub v: &'a [N],
    /// Gradient of the output.
    pub dout: &'a [N],
    /// The final lse.
    pub lse: &'a [f32],
    /// dout·out − dlse.
    pub delta: &'a [f32],
}

impl<'a, N: Number> Given<'a, N> {
    /// From buffers, where their numbers are of this type and sums are f32.
    pub(crate) fn of(
        [q, k, v]: [Slice<'a>; 3],
        upstream: Upstream<Slice<'a>>,
    ) -> Option<Given<'a, N>> {
        Some(Given {
            q: N::of(q)?,
            k: N::of(k)?,
            v: N::of(v)?,
            dout: N::of(upstream.dout)?,
            lse: f32::of(upstream.lse)?,
            delta: f32::of(upstream.delta)?,
        })
    }
}

/// Adds the job's share of the gradients.
///
/// Rows of different batch entries and segments, query rows of different heads and key rows at
/// different addresses of heads must be different rows, without an overlap. Panics if the
/// tiles are not available, or if a row lies outside its buffer.
pub(crate) fn backward<T: Tiles, N: Number>(
    pool: &Pool,
    job: &Job,
    given: Given<'_, N>,
    dq: &mut [f32],
    dk: &mut [f32],
    dv: &mut [f32],
) {
    if job.dim <= MOST_OF_SHORT {
        backward_shaped::<T, N, N::Short>(pool, job, given, dq, dk, dv);
    } else {
        backward_shaped::<T, N, N::Long>(pool, job, given, dq, dk, dv);
    }
}

/// The same with sizes of one's own choice.
pub(crate) fn backward_shaped<T: Tiles, N: Number, S: BackwardShape>(
    pool: &Pool,
    job: &Job,
    given: Given<'_, N>,
    dq: &mut [f32],
    dk: &mut [f32],
    dv: &mut [f32],
) {
    assert!(T::available(), "{} tiles are not available here", T::NAME);
    let run = Run {
        job,
        given,
        dq: Shared::new(dq),
        dk: Shared::new(dk),
        dv: Shared::new(dv),
        steps: job.dim.div_ceil(WIDTH),
        factors: Factors {
            scale: Scale::new(job.scale),
            gain: job.gain as f32,
        },
        layout: Layout::new::<N, S>(job),
    };
    let groups = schedule::groups(job);
    let tasks = tasks(job, &groups, run.layout.tiles);
    schedule::run::<T, Task<'_>>(pool, run.layout.bytes, &tasks, |task, scratch| {
        // SAFETY: the tiles are available and configured, scratch memory is as large as the layout
        // says, tasks have no query row in common, and those with the same keys are a chain, which
        // begin in its order.
        unsafe { run.task::<T, S>(task, scratch) };
    });
}

/// Scratch bytes of one thread.
pub(crate) fn bytes<N: Number>(job: &Job) -> usize {
    if job.dim <= MOST_OF_SHORT {
        Layout::new::<N, N::Short>(job).bytes
    } else {
        Layout::new::<N, N::Long>(job).bytes
    }
}

/// Where things lie in scratch memory.
#[derive(Debug, Clone, Copy)]
struct Layout {
    /// The most tiles that are packed at once.
    tiles: usize,
    states: usize,
    /// Stacks of each packed tile: q as lanes and in pairs, dout likewise, and slabs of the sums of dq.
    q_lanes: usize,
    q_pairs: usize,
    dout_lanes: usize,
    dout_pairs: usize,
    dq: usize,
    /// Stacks of the block of keys: k and v as rows, k as columns; slabs of the sums of dk and dv.
    k_rows: usize,
    k_columns: usize,
    v_rows: usize,
    dk: usize,
    dv: usize,
    /// Slabs of the tile at hand, stacks of those at hand.
    scores: usize,
    products: usize,
    weights: usize,
    gradients: usize,
    turned: usize,
    /// Factors without what is not finite.
    clean: [usize; 3],
    bytes: usize,
}

impl Layout {
    fn new<N: Number, S: BackwardShape>(job: &Job) -> Layout {
        const { assert!(S::KEYS.is_multiple_of(WIDTH)) };
        let steps = job.dim.div_ceil(WIDTH);
        let limit = S::NUMBERS / (steps * WIDTH) / WIDTH;
        // No more than the job has.
        let there = job.queries.div_ceil(WIDTH).next_multiple_of(S::TILES);
        let tiles = (limit / S::TILES * S::TILES).clamp(S::TILES, 32).min(there);
        let blocks = S::KEYS / WIDTH;
        let mut divider = Divider::default();
        let mut slabs = |count: usize| divider.take(count * SLAB_BYTES);
        let pieces = N::PIECES;
        let mut layout = Layout {
            tiles,
            q_lanes: slabs(pieces * tiles * steps),
            q_pairs: slabs(pieces * tiles * steps),
            dout_lanes: slabs(pieces * tiles * steps),
            dout_pairs: slabs(pieces * tiles * steps),
            dq: slabs(tiles * 2 * steps),
            k_rows: slabs(pieces * blocks * steps),
            k_columns: slabs(pieces * blocks * steps),
            v_rows: slabs(pieces * blocks * steps),
            dk: slabs(blocks * 2 * steps),
            dv: slabs(blocks * 2 * steps),
            scores: slabs(2 * blocks),
            products: slabs(2 * blocks),
            weights: slabs(pieces * blocks * S::TILES),
            gradients: slabs(pieces * blocks * S::TILES),
            turned: slabs(pieces * blocks * S::TILES),
            clean: [
                slabs(pieces * blocks * steps),
                slabs(pieces * S::TILES * steps),
                slabs(pieces * S::TILES * steps),
            ],
            states: 0,
            bytes: 0,
        };
        layout.states = divider.take(tiles * size_of::<Tile>());
        layout.bytes = divider.bytes();
        layout
    }
}

/// 32 queries of one head.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Tile {
    known: Known,
    first: usize,
    count: usize,
    /// The fewest and the most keys that any of its 32 lanes sees.
    least: usize,
    most: usize,
    /// Whether its q, or its dout, has a number that is not finite.
    broken: [u32; 2],
    /// Whether its dq has been added to.
    summed: u32,
}

impl Tile {
    /// How many times 32 keys of a block any lane sees some of.
    fn steps(&self, keys: Keys) -> usize {
        let seen = self.most.saturating_sub(keys.start).min(keys.count);
        seen.div_ceil(WIDTH)
    }

    /// Whether some lane does not see all keys before `end`.
    fn masked(&self, end: usize) -> bool {
        self.least < end
    }
}

/// The block of keys at hand.
#[derive(Debug, Clone, Copy)]
struct Keys {
    start: usize,
    count: usize,
    /// Whether a number of k is not finite.
    broken: bool,
}

/// What all tasks of a call share.
struct Run<'a, N> {
    job: &'a Job,
    given: Given<'a, N>,
    dq: Shared<'a, f32>,
    dk: Shared<'a, f32>,
    dv: Shared<'a, f32>,
    /// Steps of 32 channels.
    steps: usize,
    factors: Factors,
    layout: Layout,
}

impl<N: Number> Run<'_, N> {
    /// Computes one task.
    ///
    /// # Safety
    /// The tiles are available and configured on this thread, `scratch` is memory as the layout
    /// says, no other task has these query rows, and those with these key rows are in its chain, of
    /// which the ones before it have begun.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn task<T: Tiles, S: BackwardShape>(&self, task: &Task<'_>, scratch: *mut u8) {
        let mut running = Running::new(task);
        // SAFETY: the caller's promise; what is added to keys waits for its turn.
        unsafe {
            let tiles = self.pack_queries(task, scratch);
            let most = tiles.iter().map(|tile| tile.most).max().unwrap_or(0);
            for start in (0..most).step_by(S::KEYS) {
                let count = S::KEYS.min(self.job.keys - start);
                let keys = self.pack_keys(task, start, count, scratch);
                self.block::<T, S>(tiles, keys, scratch);
                running.wait(start);
                self.add_keys(task, keys, scratch);
                running.pass(start + count);
            }
            drop(running);
            self.add_queries(task, tiles, scratch);
        }
    }
}
