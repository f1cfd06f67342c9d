//! The tilings of the mma.sync kernels, and the choice among them.
//!
//! Nothing is launched here, so that all of it is tested without a GPU. The decision: a tiling is
//! chosen by head dimension and shared memory alone, the largest tiles that fit; the kernels branch
//! on a job's mask and layout at run time.

use encke_core::DType;
use encke_core::job::{Job, Operand};

use crate::program::Program;

/// The largest head dimension.
pub(crate) const MAX_DIM: usize = 256;
/// Shared memory that the GPU reserves in every block.
const RESERVED: usize = 1024;

/// A kernel: the forward pass, or one half of the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MmaKernel {
    /// Owns queries, streams keys: acc, m, l or out, lse.
    Forward,
    /// Owns keys, streams queries: dk and dv.
    BackwardKeys,
    /// Owns queries, streams keys: dq.
    BackwardQueries,
}

/// The tiling of a kernel for head dimensions up to `dim`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MmaTiling {
    pub kernel: MmaKernel,
    /// The largest head dimension; rows are padded to it in shared memory.
    pub dim: usize,
    /// Warps of a block.
    pub warps: usize,
    /// Groups of 16 rows per warp.
    pub groups: usize,
    /// Rows streamed at a time.
    pub block: usize,
}

/// `[warps, groups, block]` for a head dimension.
const fn tiling(kernel: MmaKernel, dim: usize, [warps, groups, block]: [usize; 3]) -> MmaTiling {
    MmaTiling {
        kernel,
        dim,
        warps,
        groups,
        block,
    }
}

/// All tilings; for equal kernel and dimension the better one first. A block has 227 KiB of shared
/// memory on Hopper, 163 on an A100, 99 on Ada.
pub(crate) const TILINGS: &[MmaTiling] = &[
    tiling(MmaKernel::Forward, 32, [4, 2, 64]),
    tiling(MmaKernel::Forward, 64, [4, 2, 64]),
    tiling(MmaKernel::Forward, 64, [4, 2, 32]),
    tiling(MmaKernel::Forward, 96, [4, 2, 64]),
    tiling(MmaKernel::Forward, 128, [4, 2, 64]),
    tiling(MmaKernel::Forward, 128, [4, 2, 32]),
    tiling(MmaKernel::Forward, 192, [8, 1, 64]),
    tiling(MmaKernel::Forward, 192, [4, 1, 32]),
    tiling(MmaKernel::Forward, 256, [8, 1, 64]),
    tiling(MmaKernel::Forward, 256, [8, 1, 32]),
    tiling(MmaKernel::Forward, 256, [4, 1, 16]),
    tiling(MmaKernel::BackwardKeys, 32, [4, 2, 32]),
    tiling(MmaKernel::BackwardKeys, 64, [4, 2, 32]),
    tiling(MmaKernel::BackwardKeys, 96, [8, 1, 64]),
    tiling(MmaKernel::BackwardKeys, 96, [4, 1, 32]),
    tiling(MmaKernel::BackwardKeys, 128, [8, 1, 64]),
    tiling(MmaKernel::BackwardKeys, 128, [4, 1, 32]),
    tiling(MmaKernel::BackwardKeys, 192, [8, 1, 32]),
    tiling(MmaKernel::BackwardKeys, 192, [4, 1, 16]),
    tiling(MmaKernel::BackwardKeys, 256, [8, 1, 32]),
    tiling(MmaKernel::BackwardKeys, 256, [4, 1, 32]),
    tiling(MmaKernel::BackwardKeys, 256, [2, 1, 16]),
    tiling(MmaKernel::BackwardQueries, 32, [4, 2, 64]),
    tiling(MmaKernel::BackwardQueries, 64, [4, 2, 64]),
    tiling(MmaKernel::BackwardQueries, 96, [4, 2, 32]),
    tiling(MmaKernel::BackwardQueries, 128, [4, 2, 32]),
    tiling(MmaKernel::BackwardQueries, 128, [4, 1, 32]),
    tiling(MmaKernel::BackwardQueries, 192, [8, 1, 32]),
    tiling(MmaKernel::BackwardQueries, 192, [4, 1, 16]),
    tiling(MmaKernel::BackwardQueries, 256, [8, 1, 32]),
    tiling(MmaKernel::BackwardQueries, 256, [4, 1, 32]),
    tiling(MmaKernel::BackwardQueries, 256, [2, 1, 16]),
];

/// The tiling for a head dimension on a GPU whose blocks have `shared_bytes` of shared memory: the
/// first that fills a multiprocessor with warps, else the first that fits.
pub(crate) fn choose(
    kernel: MmaKernel,
    dim: usize,
    shared_bytes: usize,
) -> Option<&'static MmaTiling> {
    let able = |tiling: &&MmaTiling| tiling.kernel == kernel && dim <= tiling.dim;
    let padded = TILINGS.iter().filter(able).map(|x| x.dim).min()?;
    let first = |resident: fn(&MmaTiling) -> usize| {
        let mut all = TILINGS.iter().filter(able).filter(|x| x.dim == padded);
        all.find(|tiling| {
            let bytes = resident(tiling) * (tiling.shared_bytes() + RESERVED);
            bytes <= shared_bytes + RESERVED
        })
    };
    first(MmaTiling::resident).or_else(|| first(|_| 1))
}

/// Whether rows can be copied 16 bytes at a time: all begin at multiples of 8 elements.
pub(crate) fn aligned(job: &Job) -> bool {
    let aligned = |operand: &Operand| {
        let strides = [operand.offset, operand.batch, operand.segment, operand.row];
        let mut all = strides.iter().chain(operand.heads.iter());
        all.all(|stride| stride.is_multiple_of(8))
    };
    let operands = [&job.q, &job.k].into_iter().chain(&job.dq);
    // A cell is a row of `dim` elements.
    job.dim.is_multiple_of(8) && operands.into_iter().all(aligned)
}

/// The texts of a kernel: the common ones, then its own.
const fn texts(own: fn() -> String) -> [fn() -> String; 4] {
    [
        || include_str!("../kernels/arithmetic.cuh").into(),
        || include_str!("../kernels/mma.cuh").into(),
        || include_str!("../kernels/mma_tile.cuh").into(),
        own,
    ]
}
const FORWARD: &[fn() -> String] = &texts(|| include_str!("../kernels/mma_forward.cu").into());
const KEYS: &[fn() -> String] = &texts(|| include_str!("../kernels/mma_backward_keys.cu").into());
const QUERIES: &[fn() -> String] =
    &texts(|| include_str!("../kernels/mma_backward_queries.cu").into());

impl MmaTiling {
    /// Threads of a block.
    pub fn threads(&self) -> u32 {
        self.warps as u32 * 32
    }

    /// Blocks that fill a multiprocessor: at 255 registers per thread it holds eight warps.
    pub fn resident(&self) -> usize {
        8 / self.warps
    }

    /// Rows a block owns.
    pub fn rows(&self) -> usize {
        self.warps * self.groups * 16
    }

    /// Shared memory of a block, as the kernels lay it out.
    pub fn shared_bytes(&self) -> usize {
        let row = (self.dim + 8) * 2;
        let streamed = 4 * self.block * row; // two operands, two blocks of each
        match self.kernel {
            MmaKernel::Forward => self.rows() * (row + 4) + streamed,
            MmaKernel::BackwardKeys => self.rows() * (2 * row + 4) + streamed + 16 * self.block,
            MmaKernel::BackwardQueries => self.rows() * (2 * row + 12) + streamed,
        }
    }

    /// The launches for one job and what each computes: 1 dv, 2 dk, 3 both. Two accumulators of
    /// rows longer than 128 elements do not fit into registers.
    pub fn parts(&self) -> &'static [u32] {
        match self.kernel {
            MmaKernel::BackwardKeys if self.dim > 128 => &[1, 2],
            _ => &[3],
        }
    }

    /// The entry point in the program.
    pub fn entry(&self) -> &'static str {
        match self.kernel {
            MmaKernel::Forward => "mma_forward",
            MmaKernel::BackwardKeys => "mma_backward_keys",
            MmaKernel::BackwardQueries => "mma_backward_queries",
        }
    }

    /// The program for a storage type, with or without 16-byte copies.
    pub fn program(&self, dtype: DType, aligned: bool, parts: u32) -> Program {
        let texts = match self.kernel {
            MmaKernel::Forward => FORWARD,
            MmaKernel::BackwardKeys => KEYS,
            MmaKernel::BackwardQueries => QUERIES,
        };
        let program = Program::new(self.entry(), texts)
            .stored(dtype)
            .define("HD", self.dim)
            .define("WARPS", self.warps)
            .define("MT", self.groups)
            .define("BLOCK", self.block)
            .define("ALIGNED", u32::from(aligned));
        match self.kernel {
            MmaKernel::BackwardKeys => program.define("PARTS", parts),
            _ => program,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNELS: [MmaKernel; 3] = [
        MmaKernel::Forward,
        MmaKernel::BackwardKeys,
        MmaKernel::BackwardQueries,
    ];
    /// Shared memory of a block on Hopper, on an A100, and on Ada and consumer GPUs.
    const SHARED: [usize; 3] = [232_448, 166_912, 101_376];

    #[test]
    fn every_head_dimension_has_a_tiling_on_every_gpu() {
        for kernel in KERNELS {
            for shared in SHARED {
                for dim in 1..=MAX_DIM {
                    let tiling = choose(kernel, dim, shared).expect("a tiling");
                    assert!(tiling.shared_bytes() <= shared, "{tiling:?}");
                    assert!(dim <= tiling.dim, "{tiling:?}");
                }
                assert_eq!(choose(kernel, MAX_DIM + 1, shared), None);
            }
        }
    }

    #[test]
    fn no_tiling_is_left_unused() {
        let chosen: Vec<&MmaTiling> = KERNELS
            .iter()
            .flat_map(|&kernel| SHARED.map(|shared| (kernel, shared)))
            .flat_map(|(kernel, shared)| {
                (1..=MAX_DIM).filter_map(move |dim| choose(kernel, dim, shared))
            })
            .collect();
        for tiling in TILINGS {
            assert!(chosen.contains(&tiling), "{tiling:?}");
        }
    }
}
