//! How the mma.sync kernels cut their work: every variant there is, and which one a job gets.
//!
//! Nothing is launched here, so that all of it is tested without a GPU. The decision: a variant is
//! chosen by head dimension and by the shared memory of the GPU alone, the largest tiles that fit;
//! what a job's mask and layout are is asked by the kernels themselves.

use encke_core::DType;
use encke_core::job::{Job, Operand};

use crate::program::Program;

/// The largest head dimension.
pub(crate) const DIM: usize = 256;
/// Shared memory the GPU keeps for itself in every block.
const RESERVED: usize = 1024;

/// A kernel: the forward pass, or a half of the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Half {
    /// Owns queries, streams keys: acc, m, l or out, lse.
    Forward,
    /// Owns keys, streams queries: dk and dv.
    Keys,
    /// Owns queries, streams keys: dq.
    Queries,
}

/// How a kernel cuts its work, for head dimensions up to `dim`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tiling {
    pub half: Half,
    /// The largest head dimension it is for; rows are padded to it in shared memory.
    pub dim: usize,
    /// Warps of a block.
    pub warps: usize,
    /// Groups of 16 rows that each warp owns.
    pub groups: usize,
    /// Rows that are streamed at a time.
    pub block: usize,
}

/// `[warps, groups, block]` for a head dimension.
const fn tiling(half: Half, dim: usize, [warps, groups, block]: [usize; 3]) -> Tiling {
    Tiling {
        half,
        dim,
        warps,
        groups,
        block,
    }
}

/// Every variant; of equal half and dimension the better one first. A Hopper's block has 227 KiB of
/// shared memory, an A100's 163, an Ada's 99.
pub(crate) const TILINGS: &[Tiling] = &[
    tiling(Half::Forward, 32, [4, 2, 64]),
    tiling(Half::Forward, 64, [4, 2, 64]),
    tiling(Half::Forward, 64, [4, 2, 32]),
    tiling(Half::Forward, 96, [4, 2, 64]),
    tiling(Half::Forward, 128, [4, 2, 64]),
    tiling(Half::Forward, 128, [4, 2, 32]),
    tiling(Half::Forward, 192, [8, 1, 64]),
    tiling(Half::Forward, 192, [4, 1, 32]),
    tiling(Half::Forward, 256, [8, 1, 64]),
    tiling(Half::Forward, 256, [8, 1, 32]),
    tiling(Half::Forward, 256, [4, 1, 16]),
    tiling(Half::Keys, 32, [4, 2, 32]),
    tiling(Half::Keys, 64, [4, 2, 32]),
    tiling(Half::Keys, 96, [8, 1, 64]),
    tiling(Half::Keys, 96, [4, 1, 32]),
    tiling(Half::Keys, 128, [8, 1, 64]),
    tiling(Half::Keys, 128, [4, 1, 32]),
    tiling(Half::Keys, 192, [8, 1, 32]),
    tiling(Half::Keys, 192, [4, 1, 16]),
    tiling(Half::Keys, 256, [8, 1, 32]),
    tiling(Half::Keys, 256, [4, 1, 32]),
    tiling(Half::Keys, 256, [2, 1, 16]),
    tiling(Half::Queries, 32, [4, 2, 64]),
    tiling(Half::Queries, 64, [4, 2, 64]),
    tiling(Half::Queries, 96, [4, 2, 32]),
    tiling(Half::Queries, 128, [4, 2, 32]),
    tiling(Half::Queries, 128, [4, 1, 32]),
    tiling(Half::Queries, 192, [8, 1, 32]),
    tiling(Half::Queries, 192, [4, 1, 16]),
    tiling(Half::Queries, 256, [8, 1, 32]),
    tiling(Half::Queries, 256, [4, 1, 32]),
    tiling(Half::Queries, 256, [2, 1, 16]),
];

/// The tiling for a head dimension on a GPU whose blocks may have so much shared memory: the first
/// that fills a multiprocessor with warps, or else the first that fits at all.
pub(crate) fn choose(half: Half, dim: usize, shared_bytes: usize) -> Option<&'static Tiling> {
    let able = |tiling: &&Tiling| tiling.half == half && dim <= tiling.dim;
    let padded = TILINGS.iter().filter(able).map(|x| x.dim).min()?;
    let first = |resident: fn(&Tiling) -> usize| {
        let mut all = TILINGS.iter().filter(able).filter(|x| x.dim == padded);
        all.find(|tiling| {
            let bytes = resident(tiling) * (tiling.shared_bytes() + RESERVED);
            bytes <= shared_bytes + RESERVED
        })
    };
    first(Tiling::resident).or_else(|| first(|_| 1))
}

/// Whether rows can be copied in pieces of 16 bytes: all begin at multiples of 8 numbers.
pub(crate) fn aligned(job: &Job) -> bool {
    let even = |operand: &Operand| {
        let steps = [operand.offset, operand.batch, operand.segment, operand.row];
        let mut all = steps.iter().chain(operand.heads.iter());
        all.all(|step| step.is_multiple_of(8))
    };
    let operands = [&job.q, &job.k].into_iter().chain(&job.dq);
    // Cells are counted in rows of `dim` numbers.
    job.dim.is_multiple_of(8) && operands.into_iter().all(even)
}

const FORWARD: &[fn() -> String] = &[
    || include_str!("../kernels/arithmetic.cuh").into(),
    || include_str!("../kernels/mma.cuh").into(),
    || include_str!("../kernels/mma_tile.cuh").into(),
    || include_str!("../kernels/mma_forward.cu").into(),
];
const KEYS: &[fn() -> String] = &[
    || include_str!("../kernels/arithmetic.cuh").into(),
    || include_str!("../kernels/mma.cuh").into(),
    || include_str!("../kernels/mma_tile.cuh").into(),
    || include_str!("../kernels/mma_backward_keys.cu").into(),
];
const QUERIES: &[fn() -> String] = &[
    || include_str!("../kernels/arithmetic.cuh").into(),
    || include_str!("../kernels/mma.cuh").into(),
    || include_str!("../kernels/mma_tile.cuh").into(),
    || include_str!("../kernels/mma_backward_queries.cu").into(),
];

impl Tiling {
    /// Threads of a block.
    pub fn threads(&self) -> u32 {
        self.warps as u32 * 32
    }

    /// Blocks that fill a multiprocessor: with 255 registers a thread it holds eight warps.
    pub fn resident(&self) -> usize {
        8 / self.warps
    }

    /// Rows a block owns.
    pub fn rows(&self) -> usize {
        self.warps * self.groups * 16
    }

    /// Shared memory of a block, as the kernels cut it.
    pub fn shared_bytes(&self) -> usize {
        let row = (self.dim + 8) * 2;
        let streamed = 4 * self.block * row; // two operands, two blocks of each
        match self.half {
            Half::Forward => self.rows() * (row + 4) + streamed,
            Half::Keys => self.rows() * (2 * row + 4) + streamed + 16 * self.block,
            Half::Queries => self.rows() * (2 * row + 12) + streamed,
        }
    }

    /// What each launch for one job computes: 1 dv, 2 dk, 3 both. Two accumulators of rows
    /// longer than 128 numbers do not fit the registers.
    pub fn parts(&self) -> &'static [u32] {
        match self.half {
            Half::Keys if self.dim > 128 => &[1, 2],
            _ => &[3],
        }
    }

    /// The name of the kernel in its program.
    pub fn entry(&self) -> &'static str {
        match self.half {
            Half::Forward => "mma_forward",
            Half::Keys => "mma_backward_keys",
            Half::Queries => "mma_backward_queries",
        }
    }

    /// Its program for a storage type, with or without copies of 16 bytes.
    pub fn program(&self, dtype: DType, aligned: bool, parts: u32) -> Program {
        let texts = match self.half {
            Half::Forward => FORWARD,
            Half::Keys => KEYS,
            Half::Queries => QUERIES,
        };
        let program = Program::new(self.entry(), texts)
            .stored(dtype)
            .define("HD", self.dim)
            .define("WARPS", self.warps)
            .define("MT", self.groups)
            .define("BLOCK", self.block)
            .define("ALIGNED", u32::from(aligned));
        match self.half {
            Half::Keys => program.define("PARTS", parts),
            _ => program,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALVES: [Half; 3] = [Half::Forward, Half::Keys, Half::Queries];
    /// What a block may have on Hopper, on an A100, and on Ada and consumer GPUs.
    const SHARED: [usize; 3] = [232_448, 166_912, 101_376];

    #[test]
    fn every_head_dimension_has_a_tiling_on_every_gpu() {
        for half in HALVES {
            for shared in SHARED {
                for dim in 1..=DIM {
                    let tiling = choose(half, dim, shared).expect("a tiling");
                    assert!(tiling.shared_bytes() <= shared, "{tiling:?}");
                    assert!(dim <= tiling.dim, "{tiling:?}");
                }
                assert_eq!(choose(half, DIM + 1, shared), None);
            }
        }
    }

    #[test]
    fn no_tiling_is_left_unused() {
        let chosen: Vec<&Tiling> = HALVES
            .iter()
            .flat_map(|&half| SHARED.map(|shared| (half, shared)))
            .flat_map(|(half, shared)| (1..=DIM).filter_map(move |dim| choose(half, dim, shared)))
            .collect();
        for tiling in TILINGS {
            assert!(chosen.contains(&tiling), "{tiling:?}");
        }
    }
}
