//! The variants of Hopper's backward kernels: their tilings and the texts they are compiled from.
//!
//! Nothing is launched here. One table serves both the launch, which chooses from it, and the
//! tests, which compile every variant without a GPU.

use encke_core::DType;

use super::row_dims::RowDims;
use crate::program::Program;
use crate::wgmma::Wgmma;

/// Bytes of a tile's descriptor in shared memory, as in hopper_backward.cuh.
const TILE_BYTES: usize = 48;

/// A variant of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BackwardVariant {
    /// The longest rows, of keys and of values.
    pub dim: usize,
    /// Keys of a tile, as in hopper_backward.cuh for rows of these lengths.
    pub keys: usize,
    /// Queries of a block.
    pub queries: usize,
    /// Pipeline stages for blocks of queries.
    pub stages: usize,
    /// Staging buffers for finished blocks of dQ. With a second one, sums in a fixed order were 6 %
    /// slower.
    pub dq_stages: usize,
    /// Whether both warpgroups share the keys of a tile; otherwise each has its own.
    pub wide: bool,
}

/// What a program computes, beside its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct BackwardMode {
    /// Whether queries see ranges of keys rather than the first ones.
    pub windowed: bool,
    /// Whether dQ is multiplied by a factor.
    pub scales_dq: bool,
    /// Whether scores are capped, and whether they have slopes; `windowed` is set too.
    pub softcap: bool,
    pub slopes: bool,
    /// Rows of a tile of the grid; 0 if the kernel decides the order of sums.
    pub grid_tile: usize,
}

impl BackwardMode {
    /// Whether scores are transformed.
    pub fn transforms(&self) -> bool {
        self.softcap || self.slopes
    }
}

/// All variants, by the length of rows.
pub(crate) const VARIANTS: &[BackwardVariant] = &[
    variant(64, [128, 128, 2, 1]),
    variant(NARROW, [128, 64, 2, 1]),
    // Only for transformed scores.
    variant(NARROW, [64, 64, 2, 1]),
    variant(192, [64, 64, 2, 1]),
    variant(256, [64, 64, 1, 1]),
];

/// `[keys, queries, stages, dq_stages]` for a length of rows.
const fn variant(dim: usize, [keys, queries, stages, dq_stages]: [usize; 4]) -> BackwardVariant {
    BackwardVariant {
        dim,
        keys,
        queries,
        stages,
        dq_stages,
        wide: keys == 64,
    }
}

/// The longest rows for which each warpgroup has its own keys.
const NARROW: usize = 128;

/// The texts of a kernel: those common to narrow and wide heads, then its own.
const fn texts(own: fn() -> String) -> [fn() -> String; 10] {
    [
        || include_str!("../kernels/arithmetic.cuh").into(),
        || include_str!("../kernels/hopper.cuh").into(),
        || include_str!("../kernels/hopper_add.cuh").into(),
        wrappers,
        || include_str!("../kernels/masks.cuh").into(),
        || include_str!("../kernels/backward.cuh").into(),
        || include_str!("../kernels/backward_rows.cu").into(),
        || include_str!("../kernels/hopper_backward.cuh").into(),
        || include_str!("../kernels/hopper_backward_tile.cuh").into(),
        own,
    ]
}
const NARROW_TEXTS: &[fn() -> String] =
    &texts(|| include_str!("../kernels/hopper_backward.cu").into());
const WIDE_TEXTS: &[fn() -> String] =
    &texts(|| include_str!("../kernels/hopper_backward_wide.cu").into());

/// Wrappers for all variants and lengths of rows; the compiler drops the unused ones.
fn wrappers() -> String {
    let scores = [32, 64, 128].map(Wgmma::shared);
    let sums = (1..=NARROW / 16).map(|steps| Wgmma {
        transpose_b: true,
        ..Wgmma::registers(16 * steps)
    });
    let slabs = [64, 128].into_iter().flat_map(|columns| {
        let wide_sum = Wgmma {
            transpose_b: true,
            ..Wgmma::shared(columns)
        };
        let dq = Wgmma {
            transpose_a: true,
            ..wide_sum
        };
        [wide_sum, dq]
    });
    let shapes = scores.into_iter().chain(sums).chain(slabs);
    shapes.map(|shape| shape.text()).collect()
}

impl BackwardVariant {
    /// The variant for rows of these lengths.
    pub fn choose(dims: RowDims, mode: BackwardMode) -> Option<&'static BackwardVariant> {
        let fits = |variant: &&BackwardVariant| {
            let longest = dims.longest();
            // The arithmetic of transformed scores needs registers.
            let narrow = variant.dim == NARROW && longest <= 64;
            longest <= variant.dim && (!mode.transforms() || variant.wide || narrow)
        };
        VARIANTS.iter().find(fits)
    }

    /// The program for rows of these lengths.
    pub fn program(&self, dims: RowDims, dtype: DType, mode: BackwardMode) -> Program {
        let texts = match self.wide {
            true => WIDE_TEXTS,
            false => NARROW_TEXTS,
        };
        let mut program = Program::new("hopper_backward", texts).stored(dtype);
        program.specific = true;
        let mut program = program
            .define("HD", dims.in_steps().keys)
            .define("BQ", self.queries)
            .define("STAGES", self.stages)
            .define("DQ_STAGES", self.dq_stages)
            .define("SCALES_DQ", i32::from(mode.scales_dq));
        if dims.differ() {
            program = program.define("VD", dims.in_steps().values);
        }
        let program = program.define_present(&[
            ("WIDE", self.wide && dims.longest() <= NARROW),
            ("WINDOWED", mode.windowed),
            ("SOFTCAP", mode.softcap),
            ("SLOPES", mode.slopes),
        ]);
        match mode.grid_tile {
            0 => program,
            tile => program.define("TILED", tile / self.queries),
        }
    }

    /// Shared memory of a block for rows of these lengths, as hopper_backward.cuh lays it out.
    pub fn shared_bytes(&self, dims: RowDims, mode: BackwardMode) -> usize {
        let wide = self.wide;
        let least = |divided: bool| if divided { 2 } else { 1 };
        let RowDims { keys, values } = dims.slabs();
        let k_slabs = keys.max(least(self.queries == 64));
        let v_slabs = values.max(least(wide));
        let pairs = if wide { 2 } else { self.queries / 64 };
        let keys = (k_slabs + v_slabs) * self.keys * 128;
        let queries = self.stages * (k_slabs + v_slabs) * self.queries * 128;
        let dq = self.dq_stages * 2 * k_slabs * self.queries * 128;
        let rows = 2 * self.stages * self.queries * 4 + self.keys * 4;
        let barriers = 8 * (11 + 3 * self.stages + 2 * self.dq_stages);
        let ends = if mode.windowed { self.keys * 4 + 8 } else { 0 };
        let slopes = if mode.slopes { self.keys * 4 + 16 } else { 0 };
        // With the block of each stage, which only programs of a grid have.
        let tiles = 2 * TILE_BYTES + barriers + 16 + ends + slopes + 4 * self.stages;
        keys + queries + 2 * pairs * self.keys * 128 + dq + rows + tiles
    }
}

/// The programs that tests compile ahead of time.
pub(crate) fn programs() -> Vec<Program> {
    let plain = BackwardMode::default();
    let scaled = BackwardMode {
        scales_dq: true,
        ..plain
    };
    let windowed = |mode| BackwardMode {
        windowed: true,
        ..mode
    };
    let mut all = Vec::new();
    let mut add = |dims: RowDims, dtype, mode| {
        let variant = BackwardVariant::choose(dims, mode);
        all.extend(variant.map(|variant| variant.program(dims, dtype, mode)));
    };
    for dim in [64, NARROW, 192, 256] {
        let longest = RowDims::same(dim);
        add(longest, DType::Bf16, plain);
        add(longest, DType::F16, scaled);
        add(longest.less(32), DType::Bf16, scaled);
        add(longest, DType::Bf16, windowed(plain));
        add(longest.less(32), DType::F16, windowed(scaled));
        let on_grid = |mode, grid_tile| BackwardMode { grid_tile, ..mode };
        add(longest, DType::Bf16, on_grid(plain, 512));
        add(longest, DType::F16, on_grid(windowed(scaled), 128));
        add(longest.less(32), DType::F16, on_grid(scaled, 256));
        add(longest, DType::Bf16, on_grid(windowed(plain), 512));
        for (softcap, slopes) in [(true, false), (false, true), (true, true)] {
            let mode = BackwardMode {
                softcap,
                slopes,
                ..windowed(plain)
            };
            add(longest, DType::Bf16, mode);
        }
    }
    for (keys, values) in [(64, 128), (128, 64), (192, 128), (128, 192), (256, 128)] {
        let dims = RowDims { keys, values };
        add(dims, DType::Bf16, plain);
        add(dims, DType::F16, windowed(scaled));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_fits_into_a_multiprocessor() {
        for variant in VARIANTS {
            let mode = BackwardMode {
                windowed: true,
                slopes: true,
                ..BackwardMode::default()
            };
            let bytes = variant.shared_bytes(RowDims::same(variant.dim), mode);
            assert!(bytes <= 227 * 1024, "{variant:?}: {bytes}");
        }
    }
}
