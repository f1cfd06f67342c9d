//! How a forward pass on Hopper may be cut: the variants of the kernel, and which of them a job gets.
//!
//! Nothing is launched here, so that all of it is tested without a GPU. The decision: a variant is
//! chosen by an estimate of when the last multiprocessor ends, since a tile that is fastest for
//! a long sequence leaves most of the GPU idle in the last round of a short one.

use encke_core::DType;
use encke_core::job::Job;

use crate::program::Program;
use crate::wgmma::Wgmma;

/// Rows of a warpgroup.
const GROUP_ROWS: usize = 64;
/// The largest head dimension.
pub(crate) const DIM: usize = 256;
/// Pieces of memory that the keys of one launch may be in: as many as fit into the 4 KiB that a
/// launch may be told.
pub(crate) const LINKS: usize = 13;

/// How a variant of the kernel cuts its work, for head dimensions up to `dim`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Tiling {
    /// The largest head dimension it is for.
    pub dim: usize,
    /// Warpgroups that compute.
    pub consumers: usize,
    /// Keys of a block.
    pub keys: usize,
    /// Blocks of keys, and of values, in shared memory.
    pub stages: usize,
    /// Tiles of queries in shared memory.
    pub q_stages: usize,
    /// Whether warpgroups take turns.
    pub pingpong: bool,
    /// Whether queries are held in registers.
    pub q_registers: bool,
    /// Whether there is room for a tile's sums in shared memory, so that those of a carry leave
    /// while the next tile is computed.
    pub staged: bool,
    /// Registers of a thread that loads and of one that computes. All of them must fit into what
    /// the block has at its start, or the raise waits for ever.
    pub registers: (usize, usize),
    /// For causal jobs as well as for those that see everything.
    pub causal: bool,
    /// Its speed where tiles are plenty, as a share of the best for its head dimensions.
    pub rate: f64,
    /// What beginning and ending a tile costs, in keys.
    pub overhead: usize,
}

/// Every variant, by head dimension.
pub(crate) const TILINGS: &[Tiling] = &[
    Tiling {
        dim: 64,
        consumers: 3,
        keys: 128,
        stages: 2,
        q_stages: 2,
        pingpong: true,
        q_registers: false,
        staged: true,
        registers: (32, 160),
        causal: true,
        rate: 1.0,
        overhead: 128,
    },
    Tiling {
        dim: 64,
        consumers: 2,
        keys: 128,
        stages: 2,
        q_stages: 2,
        pingpong: true,
        q_registers: false,
        staged: true,
        registers: (40, 232),
        causal: true,
        rate: 0.87,
        overhead: 128,
    },
    Tiling {
        dim: 128,
        consumers: 2,
        keys: 128,
        stages: 2,
        q_stages: 2,
        pingpong: true,
        q_registers: true,
        staged: true,
        registers: (40, 232),
        causal: true,
        rate: 0.99,
        overhead: 128,
    },
    Tiling {
        dim: 128,
        consumers: 2,
        keys: 176,
        stages: 2,
        q_stages: 1,
        pingpong: true,
        q_registers: false,
        staged: false,
        registers: (40, 232),
        causal: false,
        rate: 1.0,
        overhead: 256,
    },
    Tiling {
        dim: 192,
        consumers: 2,
        keys: 112,
        stages: 2,
        q_stages: 1,
        pingpong: true,
        q_registers: false,
        staged: false,
        registers: (40, 232),
        causal: true,
        rate: 1.0,
        overhead: 256,
    },
    Tiling {
        dim: 256,
        consumers: 2,
        keys: 64,
        stages: 2,
        q_stages: 1,
        pingpong: true,
        q_registers: false,
        staged: false,
        registers: (40, 232),
        causal: true,
        rate: 1.0,
        overhead: 256,
    },
];

/// What a program does beside how it is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mode {
    pub dtype: DType,
    /// Whether rows see different keys.
    pub causal: bool,
    /// Whether it continues a carry rather than beginning with nothing.
    pub before: bool,
    /// Whether it leaves a carry rather than ending in out and lse.
    pub after: bool,
    /// Whether the scale is below zero.
    pub negative: bool,
}

impl Mode {
    /// Whether it has to do with a carry.
    pub fn carry(&self) -> bool {
        self.before || self.after
    }
}

const TEXTS: &[fn() -> String] = &[
    || include_str!("../kernels/arithmetic.cuh").into(),
    || include_str!("../kernels/hopper.cuh").into(),
    wrappers,
    || include_str!("../kernels/hopper_tiles.cuh").into(),
    || include_str!("../kernels/hopper_forward.cu").into(),
];

/// Wrappers for all tilings and head dimensions; the compiler drops those a variant does not call.
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
    let values = (1..=DIM / 16).map(|steps| Wgmma {
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

    /// Tiles of queries in shared memory. Where sums take room and queries go to registers at once,
    /// one is enough.
    fn q_stages(&self, carry: bool) -> usize {
        if carry && self.staged && self.q_registers {
            1
        } else {
            self.q_stages
        }
    }

    /// Shared memory of a block for a head dimension, as hopper_tiles.cuh cuts it.
    pub fn shared_bytes(&self, dim: usize, carry: bool) -> usize {
        let (slab, q_stages) = (dim.div_ceil(64) * 128, self.q_stages(carry));
        let tiles = q_stages * self.rows() + 2 * self.stages * self.keys;
        let staged = carry && self.staged;
        let arrivals = if staged { self.consumers * 4 + 2 } else { 0 };
        let barriers = 8 * (2 * q_stages + 6 * self.stages + 4 + arrivals);
        let told = 16 * self.stages + 2 * 48;
        let sums = if staged {
            self.rows() * (dim.next_multiple_of(16) * 4 + 16)
        } else {
            0
        };
        tiles * slab + sums + told + barriers
    }

    /// The program for a head dimension.
    pub fn program(&self, dim: usize, mode: Mode) -> Program {
        let mut program = Program::new("hopper_forward", TEXTS).stored(mode.dtype);
        program.specific = true;
        let macros = [
            ("HD", dim.next_multiple_of(16)),
            ("CONSUMERS", self.consumers),
            ("KEYS", self.keys),
            ("STAGES", self.stages),
            ("Q_STAGES", self.q_stages(mode.carry())),
            ("LINKS", LINKS),
            ("CAUSAL", mode.causal.into()),
            ("PINGPONG", self.pingpong.into()),
            ("BEFORE", mode.before.into()),
            ("AFTER", mode.after.into()),
            ("STAGED", (mode.carry() && self.staged).into()),
            ("NEGATIVE", mode.negative.into()),
            ("LAZY", 1),
            ("POLYNOMIAL", 0),
            ("Q_REGISTERS", self.q_registers.into()),
            ("LOADER_REGISTERS", self.registers.0),
            ("CONSUMER_REGISTERS", self.registers.1),
        ];
        macros.iter().fold(program, |program, (name, value)| {
            program.define(name, value)
        })
    }

    /// When the last multiprocessor is done with a job and `further` keys that all its rows see, in
    /// keys times rows at full speed.
    fn makespan(&self, job: &Job, further: usize, causal: bool, processors: usize) -> f64 {
        let tiles = job.queries.div_ceil(self.rows());
        let places = job.batch * job.segments * job.heads;
        let cost = |row: usize| {
            let seen = if causal { job.visible(row) } else { job.keys };
            (seen.next_multiple_of(self.keys) + further + self.overhead) as f64
        };
        let last = |tile: usize| ((tile + 1) * self.rows()).min(job.queries) - 1;
        let longest = cost(job.queries - 1);
        let rounds = if causal {
            // Longest first: what is left to chance is about one average tile.
            let samples = tiles.min(64);
            let sum: f64 = (0..samples).map(|i| cost(last(i * tiles / samples))).sum();
            let average = sum / samples as f64;
            let even = (tiles * places) as f64 / processors as f64 * average;
            (even + 0.3 * average).max(longest)
        } else {
            (tiles * places).div_ceil(processors) as f64 * longest
        };
        rounds * self.rows() as f64 / self.rate
    }
}

/// The tilings for a head dimension; for a carry, those that have room for its sums, if any do.
fn candidates(dim: usize, causal: bool, carry: bool) -> impl Iterator<Item = &'static Tiling> {
    let able = move |tiling: &&Tiling| dim <= tiling.dim && (tiling.causal || !causal);
    let smallest = TILINGS.iter().filter(able).map(|x| x.dim).min();
    let all = move || {
        let able = TILINGS.iter().filter(able);
        able.filter(move |x| Some(x.dim) == smallest)
    };
    let staged = carry && all().any(|x| x.staged);
    all().filter(move |x| x.staged || !staged)
}

/// The tiling that ends a job first, with `further` keys that all its rows see.
pub(crate) fn choose(
    job: &Job,
    further: usize,
    causal: bool,
    carry: bool,
    processors: usize,
) -> Option<&'static Tiling> {
    candidates(job.dim, causal, carry).min_by(|x, y| {
        let end = |tiling: &Tiling| tiling.makespan(job, further, causal, processors);
        end(x).total_cmp(&end(y))
    })
}

/// Keys of a block where a carry is continued, whatever is chosen: links of a chain are whole blocks.
pub(crate) fn carried_keys(dim: usize) -> Option<usize> {
    candidates(dim, true, true).map(|tiling| tiling.keys).next()
}

#[cfg(test)]
mod tests {
    use super::super::hopper_tiles::tests::{causal, job};
    use super::*;

    #[test]
    fn every_tiling_fits_into_a_multiprocessor() {
        for tiling in TILINGS {
            for carry in [false, true] {
                let bytes = tiling.shared_bytes(tiling.dim, carry);
                assert!(bytes <= 227 * 1024, "{tiling:?}: {bytes}");
            }
            // What is raised comes out of what the block was given at its start, in eights.
            let (loads, computes) = tiling.registers;
            let threads = tiling.threads() as usize;
            let given = 65_536 / threads / 8 * 8 * threads;
            let asked = 128 * (loads + tiling.consumers * computes);
            assert!(asked <= given, "{tiling:?}: {asked} of {given}");
        }
    }

    #[test]
    fn short_jobs_get_tiles_that_fill_the_gpu() {
        let mut short = job(2048, 2048, 16, None);
        short.dim = 64;
        // 176 tiles of 192 rows are two rounds of 132, as 256 tiles of 128 rows are.
        assert_eq!(
            choose(&short, 0, false, false, 132).map(Tiling::rows),
            Some(128)
        );
        let mut long = job(65_536, 65_536, 16, None);
        long.dim = 64;
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
    fn whatever_is_chosen_for_a_carry_has_the_same_blocks() {
        for dim in (16..=DIM).step_by(16) {
            for causal in [false, true] {
                let mut all = candidates(dim, causal, true);
                assert!(all.all(|tiling| Some(tiling.keys) == carried_keys(dim)));
            }
        }
        assert_eq!(carried_keys(DIM + 16), None);
    }

    #[test]
    fn carries_get_tiles_with_room_for_their_sums() {
        let long = job(65_536, 65_536, 16, None);
        let keys = |carry| choose(&long, 0, false, carry, 132).map(|tiling| tiling.keys);
        assert_eq!((keys(false), keys(true)), (Some(176), Some(128)));
    }
}
