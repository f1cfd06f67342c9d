//! The tilings of Hopper's forward kernel, and the choice among them.
//!
//! Nothing is launched here, so that all of it is tested without a GPU. The decision: a tiling is
//! chosen by an estimate of the makespan, since a tile that is fastest for a long sequence leaves
//! most multiprocessors idle in the last wave of a short one.

use encke_core::DType;
use encke_core::job::Job;

use super::row_dims::RowDims;
use crate::program::Program;
use crate::wgmma::Wgmma;

/// Rows of a warpgroup.
const GROUP_ROWS: usize = 64;
/// The longest rows.
pub(crate) const MAX_DIM: usize = 256;
/// Chunks of keys of one launch at most: as many as fit into the 4 KiB of kernel arguments.
pub(crate) const MAX_CHUNKS: usize = 13;

/// A tiling of the kernel for rows up to `dims`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Tiling {
    /// The largest rows.
    pub dims: RowDims,
    /// Consumer warpgroups.
    pub consumers: usize,
    /// Keys of a block.
    pub keys: usize,
    /// Pipeline stages for blocks of keys, and for blocks of values.
    pub stages: usize,
    /// Pipeline stages for tiles of queries.
    pub q_stages: usize,
    /// Whether warpgroups alternate between softmax and products (ping-pong).
    pub pingpong: bool,
    /// Whether queries are kept in registers.
    pub q_registers: bool,
    /// Whether shared memory has room for a tile's sums, so that those of a carry are stored while
    /// the next tile is computed.
    pub staged: bool,
    /// Registers of a producer thread and of a consumer thread. Their sum must not exceed the
    /// block's registers at its start, or `setmaxnreg.inc` waits forever.
    pub registers: (usize, usize),
    /// Whether it supports causal jobs.
    pub causal: bool,
    /// Its speed with many tiles, relative to the best for its head dimensions.
    pub rate: f64,
    /// The cost of a tile's prologue and epilogue, in keys.
    pub overhead: usize,
}

/// Rows of one length.
const fn both(dim: usize) -> RowDims {
    RowDims {
        keys: dim,
        values: dim,
    }
}

/// The common values of the tilings.
const COMMON: Tiling = Tiling {
    dims: both(0),
    consumers: 2,
    keys: 128,
    stages: 2,
    q_stages: 1,
    pingpong: true,
    q_registers: false,
    staged: false,
    registers: (40, 232),
    causal: true,
    rate: 1.0,
    overhead: 256,
};

/// The common values of the tilings with room for a tile's sums.
const STAGED: Tiling = Tiling {
    q_stages: 2,
    staged: true,
    overhead: 128,
    ..COMMON
};

/// All tilings, by the lengths of rows.
pub(crate) const TILINGS: &[Tiling] = &[
    Tiling {
        dims: both(64),
        consumers: 3,
        registers: (32, 160),
        ..STAGED
    },
    Tiling {
        dims: both(64),
        rate: 0.87,
        ..STAGED
    },
    Tiling {
        dims: both(128),
        q_registers: true,
        rate: 0.99,
        ..STAGED
    },
    Tiling {
        dims: both(128),
        keys: 176,
        causal: false,
        ..COMMON
    },
    Tiling {
        dims: RowDims {
            keys: 192,
            values: 128,
        },
        ..COMMON
    },
    Tiling {
        dims: both(192),
        keys: 112,
        ..COMMON
    },
    Tiling {
        dims: both(256),
        keys: 64,
        ..COMMON
    },
];

/// What a program computes, beside its tiling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ForwardMode {
    pub dtype: DType,
    /// Whether rows see different keys.
    pub causal: bool,
    /// Whether it continues a carry rather than starting a softmax.
    pub load_carry: bool,
    /// Whether it leaves a carry rather than finishing in out and lse.
    pub store_carry: bool,
    /// Whether the scale is negative.
    pub negative: bool,
    /// Whether rows see ranges of keys rather than the first ones; `causal` is set too.
    pub windowed: bool,
    /// Whether scores are capped, and whether they have slopes; `windowed` is set too.
    pub softcap: bool,
    pub slopes: bool,
    /// Rows of a tile of the grid; 0 if the kernel decides the order of sums.
    pub grid_tile: usize,
}

impl ForwardMode {
    /// Whether it loads or stores a carry.
    pub fn uses_carry(&self) -> bool {
        self.load_carry || self.store_carry
    }
}

const TEXTS: &[fn() -> String] = &[
    || include_str!("../kernels/arithmetic.cuh").into(),
    || include_str!("../kernels/hopper.cuh").into(),
    wrappers,
    || include_str!("../kernels/hopper_tiles.cuh").into(),
    || include_str!("../kernels/hopper_forward.cuh").into(),
    || include_str!("../kernels/hopper_forward.cu").into(),
];

/// Wrappers for all tilings and head dimensions; the compiler drops the unused ones.
fn wrappers() -> String {
    let mut keys: Vec<usize> = TILINGS.iter().map(|tiling| tiling.keys).collect();
    keys.sort_unstable();
    keys.dedup();
    let scores = keys.iter().flat_map(|&n| {
        let both = [Wgmma::shared(n), Wgmma::registers(n)];
        both.into_iter().flat_map(|plain| {
            let negate = Wgmma {
                negate: true,
                ..plain
            };
            [plain, negate]
        })
    });
    let values = (1..=MAX_DIM / 16).map(|steps| Wgmma {
        transpose_b: true,
        ..Wgmma::registers(16 * steps)
    });
    scores.chain(values).map(|shape| shape.text()).collect()
}

impl Tiling {
    /// Query rows of a tile.
    pub fn rows(&self) -> usize {
        self.consumers * GROUP_ROWS
    }

    /// Threads of a block.
    pub fn threads(&self) -> u32 {
        (self.consumers as u32 + 1) * 128
    }

    /// Whether it has registers for caps of scores.
    pub fn caps(&self) -> bool {
        self.dims != both(192)
    }

    /// Whether queries are kept in registers: caps of scores need some of them.
    fn keeps_queries(&self, mode: ForwardMode) -> bool {
        self.q_registers && !mode.softcap
    }

    /// Stages for tiles of queries. Where sums need room and queries are in registers, one is
    /// enough.
    fn q_stages(&self, carry: bool) -> usize {
        if carry && self.staged && self.q_registers {
            1
        } else {
            self.q_stages
        }
    }

    /// Shared memory of a block for rows of these lengths, as hopper_tiles.cuh lays it out.
    pub fn shared_bytes(&self, dims: RowDims, mode: ForwardMode) -> usize {
        let carry = mode.uses_carry();
        let (slabs, q_stages) = (dims.slabs(), self.q_stages(carry));
        let queries = q_stages * self.rows() * slabs.longest();
        let tiles = queries + self.stages * self.keys * (slabs.keys + slabs.values);
        let staged = carry && self.staged;
        let arrivals = if staged { self.consumers * 4 + 2 } else { 0 };
        let barriers = 8 * (2 * q_stages + 6 * self.stages + 4 + arrivals);
        let descriptor = 48 + 16 * (usize::from(mode.windowed) + usize::from(mode.slopes));
        let descriptors = 16 * self.stages + 2 * descriptor;
        let sums = if staged {
            self.rows() * (dims.in_steps().values * 4 + 16)
        } else {
            0
        };
        tiles * 128 + sums + descriptors + barriers
    }

    /// The program for rows of these lengths.
    pub fn program(&self, dims: RowDims, mode: ForwardMode) -> Program {
        let mut program = Program::new("hopper_forward", TEXTS).stored(mode.dtype);
        program.specific = true;
        let macros = [
            ("HD", dims.in_steps().keys),
            ("CONSUMERS", self.consumers),
            ("KEYS", self.keys),
            ("STAGES", self.stages),
            ("Q_STAGES", self.q_stages(mode.uses_carry())),
            ("CHUNKS", MAX_CHUNKS),
            ("CAUSAL", mode.causal.into()),
            ("PINGPONG", self.pingpong.into()),
            ("LOAD_CARRY", mode.load_carry.into()),
            ("STORE_CARRY", mode.store_carry.into()),
            ("STAGED", (mode.uses_carry() && self.staged).into()),
            ("NEGATIVE", mode.negative.into()),
            ("LAZY", 1),
            ("POLYNOMIAL", 0),
            ("Q_REGISTERS", self.keeps_queries(mode).into()),
            ("PRODUCER_REGISTERS", self.registers.0),
            ("CONSUMER_REGISTERS", self.registers.1),
        ];
        let mut program = macros.iter().fold(program, |program, (name, value)| {
            program.define(name, value)
        });
        if dims.differ() {
            program = program.define("VD", dims.in_steps().values);
        }
        let program = program.define_present(&[
            ("WINDOWED", mode.windowed),
            ("SOFTCAP", mode.softcap),
            ("SLOPES", mode.slopes),
        ]);
        match mode.grid_tile {
            0 => program,
            tile => program.define("TILED", tile / self.keys),
        }
    }

    /// The estimated makespan of a job with `rest` further keys that all its rows see, in keys
    /// times rows at full speed.
    fn makespan(&self, job: &Job, rest: usize, causal: bool, multiprocessors: usize) -> f64 {
        let tiles = job.queries.div_ceil(self.rows());
        let sequences = job.batch * job.segments * job.heads;
        let cost = |row: usize| {
            let visible = if causal {
                job.visible(row).end
            } else {
                job.keys
            };
            (visible.next_multiple_of(self.keys) + rest + self.overhead) as f64
        };
        let last = |tile: usize| ((tile + 1) * self.rows()).min(job.queries) - 1;
        let longest = cost(job.queries - 1);
        let waves = if causal {
            // Longest first: the imbalance at the end is about a third of an average tile.
            let samples = tiles.min(64);
            let sum: f64 = (0..samples).map(|i| cost(last(i * tiles / samples))).sum();
            let average = sum / samples as f64;
            let even = (tiles * sequences) as f64 / multiprocessors as f64 * average;
            (even + 0.3 * average).max(longest)
        } else {
            (tiles * sequences).div_ceil(multiprocessors) as f64 * longest
        };
        waves * self.rows() as f64 / self.rate
    }
}

/// The tilings for rows of these lengths; for a carry, those with room for its sums, if there are
/// any.
pub(crate) fn candidates(
    dims: RowDims,
    causal: bool,
    carry: bool,
) -> impl Iterator<Item = &'static Tiling> {
    let supported = move |tiling: &&Tiling| dims.fit(tiling.dims) && (tiling.causal || !causal);
    let size = |tiling: &Tiling| (tiling.dims.keys, tiling.dims.values);
    let smallest = TILINGS.iter().filter(supported).map(size).min();
    let all = move || {
        let all = TILINGS.iter().filter(supported);
        all.filter(move |x| Some(size(x)) == smallest)
    };
    let staged = carry && all().any(|x| x.staged);
    all().filter(move |x| x.staged || !staged)
}

/// Which tilings suit a job on a grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GridJob {
    /// It has a causal mask, and starts and finishes its softmax.
    CausalWhole,
    /// Its tiles of rows must end with the grid's.
    WithinTiles,
    Other,
}

/// The tilings for jobs on a grid of tiles of `tile` rows: their blocks of keys end with its tiles.
/// For one head dimension they compute the same bits. They have two consumer warpgroups, except
/// for whole causal jobs: others need registers that a thread of three does not have.
pub(crate) fn grid_candidates(
    dim: usize,
    tile: usize,
    of: GridJob,
) -> impl Iterator<Item = &'static Tiling> {
    let dims = RowDims::same(dim);
    let supported = move |x: &&Tiling| x.causal && dims.fit(x.dims) && tile.is_multiple_of(x.keys);
    let size = |tiling: &Tiling| (tiling.dims.keys, tiling.dims.values);
    let smallest = TILINGS.iter().filter(supported).map(size).min();
    let all = TILINGS.iter().filter(supported);
    let all = all.filter(move |x| Some(size(x)) == smallest);
    let all = all.filter(move |x| x.consumers <= 2 || of == GridJob::CausalWhole);
    all.filter(move |x| of != GridJob::WithinTiles || tile.is_multiple_of(x.rows()))
}

/// The one of these with the smallest makespan for a job.
pub(crate) fn choose_on_grid(
    job: &Job,
    tile: usize,
    of: GridJob,
    multiprocessors: usize,
) -> Option<&'static Tiling> {
    grid_candidates(job.dim, tile, of).min_by(|x, y| {
        let makespan = |tiling: &Tiling| tiling.makespan(job, 0, true, multiprocessors);
        makespan(x).total_cmp(&makespan(y))
    })
}

/// The tiling with the smallest makespan for a job with `rest` further keys that all its rows see.
pub(crate) fn choose(
    job: &Job,
    rest: usize,
    causal: bool,
    carry: bool,
    multiprocessors: usize,
) -> Option<&'static Tiling> {
    candidates(RowDims::of(job), causal, carry).min_by(|x, y| {
        let makespan = |tiling: &Tiling| tiling.makespan(job, rest, causal, multiprocessors);
        makespan(x).total_cmp(&makespan(y))
    })
}

/// Keys of a block in every tiling for a carry: chunks after the first are multiples of it.
pub(crate) fn carry_block_keys(dims: RowDims) -> Option<usize> {
    candidates(dims, true, true)
        .map(|tiling| tiling.keys)
        .next()
}

#[cfg(test)]
mod tests {
    use super::super::hopper_tiles::tests::{causal, job};
    use super::*;

    #[test]
    fn every_tiling_fits_into_a_multiprocessor() {
        for tiling in TILINGS {
            for carry in [false, true] {
                let mode = ForwardMode {
                    dtype: DType::Bf16,
                    causal: true,
                    load_carry: carry,
                    store_carry: carry,
                    negative: false,
                    windowed: true,
                    softcap: true,
                    slopes: true,
                    grid_tile: 0,
                };
                let bytes = tiling.shared_bytes(tiling.dims, mode);
                assert!(bytes <= 227 * 1024, "{tiling:?}: {bytes}");
            }
            // The block gets its registers at its start, in multiples of eight per thread.
            let (producer, consumer) = tiling.registers;
            let threads = tiling.threads() as usize;
            let available = 65_536 / threads / 8 * 8 * threads;
            let needed = 128 * (producer + tiling.consumers * consumer);
            assert!(needed <= available, "{tiling:?}: {needed} of {available}");
        }
    }

    #[test]
    fn short_jobs_get_tiles_that_fill_the_gpu() {
        let mut short = job(2048, 2048, 16, None);
        (short.dim, short.value_dim) = (64, 64);
        // 176 tiles of 192 rows are two rounds of 132, as 256 tiles of 128 rows are.
        assert_eq!(
            choose(&short, 0, false, false, 132).map(Tiling::rows),
            Some(128)
        );
        let mut long = job(65_536, 65_536, 16, None);
        (long.dim, long.value_dim) = (64, 64);
        assert_eq!(
            choose(&long, 0, false, false, 132).map(Tiling::rows),
            Some(192)
        );
        let causal = job(4096, 4096, 16, Some(causal(0, 1, 0, 1)));
        assert_eq!(
            choose(&causal, 0, true, false, 132).map(|tiling| tiling.keys),
            Some(128)
        );
    }

    #[test]
    fn all_tilings_for_a_carry_have_the_same_block_size() {
        for dim in (16..=MAX_DIM).step_by(16) {
            for causal in [false, true] {
                for values in (16..=MAX_DIM).step_by(16) {
                    let dims = RowDims { keys: dim, values };
                    let mut all = candidates(dims, causal, true);
                    assert!(all.all(|tiling| Some(tiling.keys) == carry_block_keys(dims)));
                }
            }
        }
        assert_eq!(carry_block_keys(RowDims::same(MAX_DIM + 16)), None);
    }

    #[test]
    fn tilings_of_a_grid_have_the_same_blocks() {
        for dim in (8..=MAX_DIM).step_by(8) {
            for tile in [128, 256, 512] {
                let all: Vec<_> = grid_candidates(dim, tile, GridJob::CausalWhole).collect();
                let alike = |x: &Tiling| (x.keys, x.q_registers, x.staged);
                assert!(all.iter().all(|x| alike(x) == alike(all[0])), "{dim}");
                let least = grid_candidates(dim, tile, GridJob::WithinTiles).count();
                assert!(least > 0, "{dim} {tile}");
            }
        }
    }

    #[test]
    fn carries_get_tilings_with_room_for_their_sums() {
        let long = job(65_536, 65_536, 16, None);
        let keys = |carry| choose(&long, 0, false, carry, 132).map(|tiling| tiling.keys);
        assert_eq!((keys(false), keys(true)), (Some(176), Some(128)));
    }
}
