//! The tilings of the mma.sync kernels, and the choice among them.
//!
//! Nothing is launched here, so that all of it is tested without a GPU. The decision: a tiling is
//! chosen by head dimension and shared memory, the largest tiles that fit; programs are compiled
//! for the next multiples of 16 of the head dimensions, and for what a mask needs. Causal masks and
//! layouts are branches at run time.

use encke_core::DType;
use encke_core::job::{Job, Operand};

use crate::masked_job::{JobFeatures, TileRows};
use crate::program::Program;

/// The largest head dimension.
pub(crate) const MAX_DIM: usize = 256;
/// Shared memory that the GPU reserves in every block.
pub(crate) const RESERVED: usize = 1024;

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

impl MmaKernel {
    /// The rows that its tiles consist of.
    pub fn rows(self) -> TileRows {
        match self {
            MmaKernel::BackwardKeys => TileRows::Keys,
            _ => TileRows::Queries,
        }
    }
}

/// The tiling of a kernel for head dimensions up to `dim`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MmaTiling {
    pub kernel: MmaKernel,
    /// The largest head dimension.
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

/// A program: a tiling for certain head dimensions and features.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MmaVariant {
    /// As in the table, but for the division of its rows among warps.
    pub tiling: MmaTiling,
    /// Elements of a key and of a value, padded in shared memory to multiples of 16.
    pub dims: [usize; 2],
    pub features: JobFeatures,
}

/// The variant for head dimensions of keys and values on a GPU whose blocks have `shared_bytes` of
/// shared memory: the first tiling that fills a multiprocessor with warps, else the first that
/// fits.
pub(crate) fn choose(
    kernel: MmaKernel,
    dims: [usize; 2],
    features: JobFeatures,
    shared_bytes: usize,
) -> Option<MmaVariant> {
    let widest = dims[0].max(dims[1]);
    let able = |tiling: &&MmaTiling| tiling.kernel == kernel && widest <= tiling.dim;
    let padded = TILINGS.iter().filter(able).map(|x| x.dim).min()?;
    let first = |resident: fn(&MmaTiling) -> usize| {
        let all = TILINGS.iter().filter(able).filter(|x| x.dim == padded);
        let mut all = all.map(|tiling| MmaVariant::new(*tiling, dims, features));
        all.find(|variant| {
            let bytes = resident(&variant.tiling) * (variant.shared_bytes() + RESERVED);
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
    // A cell is a row of `value_dim` elements, and values begin at multiples of as many.
    let dims = [job.dim, job.value_dim];
    dims.iter().all(|dim| dim.is_multiple_of(8)) && operands.into_iter().all(aligned)
}

/// The texts before those of a kernel.
const COMMON: [fn() -> String; 4] = [
    || include_str!("../kernels/arithmetic.cuh").into(),
    || include_str!("../kernels/masks.cuh").into(),
    || include_str!("../kernels/mma.cuh").into(),
    || include_str!("../kernels/mma_tile.cuh").into(),
];
/// Those of a kernel that computes outputs.
pub(crate) const fn forward_texts(own: fn() -> String) -> [fn() -> String; 6] {
    let softmax = || include_str!("../kernels/mma_softmax.cuh").into();
    let [a, b, c, d] = COMMON;
    [a, b, c, d, softmax, own]
}
/// Those of a kernel that computes gradients.
const fn backward_texts(own: fn() -> String) -> [fn() -> String; 5] {
    let [a, b, c, d] = COMMON;
    [a, b, c, d, own]
}
const FORWARD: &[fn() -> String] =
    &forward_texts(|| include_str!("../kernels/mma_forward.cu").into());
const KEYS: &[fn() -> String] =
    &backward_texts(|| include_str!("../kernels/mma_backward_keys.cu").into());
const QUERIES: &[fn() -> String] =
    &backward_texts(|| include_str!("../kernels/mma_backward_queries.cu").into());

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
}

impl MmaVariant {
    pub fn new(tiling: MmaTiling, dims: [usize; 2], features: JobFeatures) -> MmaVariant {
        let mut tiling = tiling;
        // Masks need registers: blocks of keys are shorter. Slopes and dropout need more: the same
        // rows go to twice as many warps, and blocks of queries are shorter, too.
        if features.masked && tiling.kernel == MmaKernel::BackwardQueries {
            tiling.block = tiling.block.min(32);
        }
        if features.slopes || features.dropout {
            (tiling.warps, tiling.groups) = (tiling.warps * tiling.groups, 1);
            if tiling.kernel == MmaKernel::BackwardKeys {
                tiling.block = tiling.block.min(32);
            }
        }
        MmaVariant {
            tiling,
            dims: dims.map(|dim| dim.next_multiple_of(16)),
            features,
        }
    }

    /// Shared memory of a block, as the kernels lay it out.
    pub fn shared_bytes(&self) -> usize {
        let MmaTiling { kernel, block, .. } = self.tiling;
        let rows = self.tiling.rows();
        let [key, value] = self.dims.map(|dim| (dim + 8) * 2);
        let streamed = 2 * block * (key + value); // two blocks of each operand
        let ends = 4 * rows * usize::from(self.features.masked);
        let coins = match (self.features.dropout, kernel) {
            (false, _) => 0,
            (true, MmaKernel::BackwardKeys) => 8 * block * (rows / 32),
            (true, _) => 8 * rows * block.div_ceil(32),
        };
        let own = match kernel {
            MmaKernel::Forward => rows * (key + 4),
            MmaKernel::BackwardKeys => rows * (key + value + 4) + 16 * block,
            MmaKernel::BackwardQueries => rows * (key + value + 12),
        };
        own + streamed + ends + coins
    }

    /// The launches for one job and what each computes: 1 dv, 2 dk, 3 both. Two accumulators of
    /// rows longer than 128 elements do not fit into registers.
    pub fn parts(&self) -> &'static [u32] {
        match self.tiling.kernel {
            MmaKernel::BackwardKeys if self.tiling.dim > 128 => &[1, 2],
            _ => &[3],
        }
    }

    /// The entry point in the program.
    pub fn entry(&self) -> &'static str {
        match self.tiling.kernel {
            MmaKernel::Forward => "mma_forward",
            MmaKernel::BackwardKeys => "mma_backward_keys",
            MmaKernel::BackwardQueries => "mma_backward_queries",
        }
    }

    /// The program for a storage type, with or without 16-byte copies.
    pub fn program(&self, dtype: DType, aligned: bool, parts: u32) -> Program {
        let texts = match self.tiling.kernel {
            MmaKernel::Forward => FORWARD,
            MmaKernel::BackwardKeys => KEYS,
            MmaKernel::BackwardQueries => QUERIES,
        };
        let [key, value] = self.dims;
        let mut program = Program::new(self.entry(), texts)
            .stored(dtype)
            .define("HD", key)
            .define("WARPS", self.tiling.warps)
            .define("MT", self.tiling.groups)
            .define("BLOCK", self.tiling.block)
            .define("ALIGNED", u32::from(aligned));
        if self.tiling.kernel == MmaKernel::BackwardKeys {
            program = program.define("PARTS", parts);
        }
        if value != key {
            program = program.define("VD", value);
        }
        self.features.define(program)
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
    const PLAIN: JobFeatures = JobFeatures {
        masked: false,
        softcap: false,
        slopes: false,
        dropout: false,
    };
    const EVERYTHING: JobFeatures = JobFeatures {
        masked: true,
        softcap: true,
        slopes: true,
        dropout: true,
    };

    #[test]
    fn every_head_dimension_has_a_tiling_on_every_gpu() {
        for (kernel, features) in KERNELS
            .into_iter()
            .flat_map(|kernel| [(kernel, PLAIN), (kernel, EVERYTHING)])
        {
            for shared in SHARED {
                for dim in 1..=MAX_DIM {
                    for dims in [[dim, dim], [dim, MAX_DIM + 1 - dim]] {
                        let variant = choose(kernel, dims, features, shared).expect("a tiling");
                        assert!(variant.shared_bytes() <= shared, "{variant:?}");
                        assert!(dims.iter().all(|dim| *dim <= variant.tiling.dim));
                    }
                }
                let beyond = [MAX_DIM + 1, 8];
                assert_eq!(choose(kernel, beyond, features, shared), None);
            }
        }
    }

    #[test]
    fn no_tiling_is_left_unused() {
        let chosen: Vec<MmaTiling> = KERNELS
            .iter()
            .flat_map(|&kernel| SHARED.map(|shared| (kernel, shared)))
            .flat_map(|(kernel, shared)| {
                let all = (1..=MAX_DIM).map(move |dim| [dim, dim]);
                all.filter_map(move |dims| choose(kernel, dims, PLAIN, shared))
            })
            .map(|variant| variant.tiling)
            .collect();
        for tiling in TILINGS {
            assert!(chosen.contains(tiling), "{tiling:?}");
        }
    }
}
