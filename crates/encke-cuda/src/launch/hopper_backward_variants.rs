//! The variants of Hopper's backward kernels: their tilings and the texts they are compiled from.
//!
//! Nothing is launched here. One table serves both the launch, which chooses from it, and the
//! tests, which compile every variant without a GPU.

use encke_core::DType;

use crate::program::Program;
use crate::wgmma::Wgmma;

/// Bytes of a tile's descriptor in shared memory, as in hopper_backward.cuh.
const TILE_BYTES: usize = 48;

/// A variant of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BackwardVariant {
    /// The largest head dimension.
    pub dim: usize,
    /// Keys of a tile, as in hopper_backward.cuh for these head dimensions.
    pub keys: usize,
    /// Queries of a block.
    pub queries: usize,
    /// Pipeline stages for blocks of queries.
    pub stages: usize,
    /// Staging buffers for finished blocks of dQ. With a second one, sums in a fixed order were 6 %
    /// slower.
    pub dq_stages: usize,
}

/// All variants, by head dimension.
pub(crate) const VARIANTS: &[BackwardVariant] = &[
    variant(64, [128, 128, 2, 1]),
    variant(NARROW, [128, 64, 2, 1]),
    variant(256, [64, 64, 1, 1]),
];

/// `[keys, queries, stages, dq_stages]` for a head dimension.
const fn variant(dim: usize, [keys, queries, stages, dq_stages]: [usize; 4]) -> BackwardVariant {
    BackwardVariant {
        dim,
        keys,
        queries,
        stages,
        dq_stages,
    }
}

/// Up to this head dimension each warpgroup has its own keys; above it both share them.
const NARROW: usize = 128;

/// The texts of a kernel: those common to narrow and wide heads, then its own.
const fn texts(own: fn() -> String) -> [fn() -> String; 9] {
    [
        || include_str!("../kernels/arithmetic.cuh").into(),
        || include_str!("../kernels/hopper.cuh").into(),
        || include_str!("../kernels/hopper_add.cuh").into(),
        wrappers,
        || include_str!("../kernels/masks.cuh").into(),
        || include_str!("../kernels/backward.cuh").into(),
        || include_str!("../kernels/backward_rows.cu").into(),
        || include_str!("../kernels/hopper_backward.cuh").into(),
        own,
    ]
}
const NARROW_TEXTS: &[fn() -> String] =
    &texts(|| include_str!("../kernels/hopper_backward.cu").into());
const WIDE_TEXTS: &[fn() -> String] =
    &texts(|| include_str!("../kernels/hopper_backward_wide.cu").into());

/// Wrappers for all variants and head dimensions; the compiler drops the unused ones.
fn wrappers() -> String {
    let scores = [32, 64, 128].map(Wgmma::shared);
    let sums = (1..=NARROW / 16).map(|steps| Wgmma {
        transpose_b: true,
        ..Wgmma::registers(16 * steps)
    });
    let wide_sums = Wgmma {
        transpose_b: true,
        ..Wgmma::shared(128)
    };
    let dq = Wgmma {
        transpose_a: true,
        transpose_b: true,
        ..Wgmma::shared(64)
    };
    let shapes = scores.into_iter().chain(sums).chain([wide_sums, dq]);
    shapes.map(|shape| shape.text()).collect()
}

impl BackwardVariant {
    /// The program for a head dimension. `windowed`: queries see ranges of keys rather than the
    /// first ones; `scales_dq`: dQ is multiplied by a factor.
    pub fn program(&self, dim: usize, dtype: DType, windowed: bool, scales_dq: bool) -> Program {
        let texts = match dim > NARROW {
            true => WIDE_TEXTS,
            false => NARROW_TEXTS,
        };
        let mut program = Program::new("hopper_backward", texts).stored(dtype);
        program.specific = true;
        let program = program
            .define("HD", dim.next_multiple_of(16))
            .define("BQ", self.queries)
            .define("STAGES", self.stages)
            .define("DQ_STAGES", self.dq_stages)
            .define("SCALES_DQ", i32::from(scales_dq));
        match windowed {
            true => program.define("WINDOWED", 1),
            false => program,
        }
    }

    /// Shared memory of a block for a head dimension, as hopper_backward.cuh lays it out.
    pub fn shared_bytes(&self, dim: usize, windowed: bool) -> usize {
        let wide = dim > NARROW;
        let slabs = if wide { 4 } else { dim.div_ceil(64) };
        let pairs = if wide { 2 } else { self.queries / 64 };
        let keys = 2 * slabs * self.keys * 128;
        let queries = 2 * self.stages * slabs * self.queries * 128;
        let dq = self.dq_stages * 2 * slabs * self.queries * 128;
        let rows = 2 * self.stages * self.queries * 4 + self.keys * 4;
        let barriers = 8 * (11 + 3 * self.stages + 2 * self.dq_stages);
        let ends = if windowed { self.keys * 4 + 8 } else { 0 };
        let tiles = 2 * TILE_BYTES + barriers + 16 + ends;
        keys + queries + 2 * pairs * self.keys * 128 + dq + rows + tiles
    }
}

/// The programs that tests compile ahead of time.
pub(crate) fn programs() -> Vec<Program> {
    let of = |variant: &BackwardVariant| {
        [
            variant.program(variant.dim, DType::Bf16, false, false),
            variant.program(variant.dim, DType::F16, false, true),
            variant.program(variant.dim - 32, DType::Bf16, false, true),
            variant.program(variant.dim, DType::Bf16, true, false),
            variant.program(variant.dim - 32, DType::F16, true, true),
        ]
    };
    VARIANTS.iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_fits_into_a_multiprocessor() {
        for variant in VARIANTS {
            let bytes = variant.shared_bytes(variant.dim, true);
            assert!(bytes <= 227 * 1024, "{variant:?}: {bytes}");
        }
    }
}
