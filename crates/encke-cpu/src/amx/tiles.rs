//! The matrix tiles: one primitive, implemented in hardware and emulated.
//!
//! A tile is 16 rows of 64 bytes. A row of the left factor of a product holds 32 bf16. The right
//! factor holds them in pairs: its row r has, for each of 16 columns, elements 2r and 2r + 1 of
//! that column. Sums are 16 by 16 f32.
//!
//! The decision here: the only operation is a product of two by two tiles whose sums are loaded
//! from and stored to memory. It uses all eight tile registers, feeds each loaded tile to two
//! multiplications, and is one block of assembly, so that no tile register is live in code that the
//! compiler generates.
//!
//! Two tiles that are always used together form a *slab*: 2 KiB, the second tile after the first.
//! Elements that are split into several bf16 have one slab for each split, one after the other: a
//! *stack*. Products of two stacks leave out terms below the precision of the sums.

use std::arch::asm;

use super::detect;

/// Bytes of a tile.
pub const TILE_BYTES: usize = 1024;
/// Bytes of a slab.
pub const SLAB_BYTES: usize = 2 * TILE_BYTES;
/// Bytes of a row of a tile, and a cache line.
pub const ROW_BYTES: usize = 64;

/// A product of two by two tiles, summed over `steps` groups of 32 terms.
#[derive(Debug, Clone, Copy)]
pub struct TileProduct {
    /// The slab of the left factor: its tiles are rows 0..16 and 16..32 of the sums.
    pub a: *const u8,
    /// Bytes from one step of the left factor to the next.
    pub a_step: usize,
    /// The two tiles of the right factor: columns 0..16 and 16..32 of the sums.
    pub b: [*const u8; 2],
    /// Bytes from one step of the right factor to the next.
    pub b_step: usize,
    /// Bytes from one row of the right factor to the next.
    pub b_row: usize,
    /// The slabs of the sums: 32 rows each, columns 0..16 and 16..32.
    pub c: [*mut u8; 2],
    /// The number of steps, at least one.
    pub steps: usize,
}

/// A unit that multiplies tiles.
pub trait TileUnit: Send + Sync + 'static {
    /// Its name in reports.
    const NAME: &'static str;

    /// Whether this process can use the tiles, and the vector instructions of the kernels.
    fn available() -> bool;

    /// Configures the tiles of this thread.
    ///
    /// # Safety
    /// [`TileUnit::available`] returned true.
    unsafe fn configure();

    /// Releases the tiles of this thread, which makes its context switches cheap again.
    ///
    /// # Safety
    /// [`TileUnit::available`] returned true.
    unsafe fn release();

    /// Computes a product of elements of `SPLITS` splits, up to three. `ADD` adds it to the sums in
    /// memory; otherwise it replaces them.
    ///
    /// # Safety
    /// This thread's tiles are configured, every tile of the product lies in memory that may be
    /// read (and the sums written), and no other thread writes there.
    unsafe fn multiply<const ADD: bool, const SPLITS: usize>(product: TileProduct);
}

/// The tiles of the processor.
#[derive(Debug)]
pub struct Hardware;

/// The operand of `ldtilecfg`: palette 1, eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static TILE_CONFIG: TileConfig = {
    let mut row_bytes = [0; 16];
    let mut rows = [0; 16];
    let mut tile = 0;
    while tile < 8 {
        row_bytes[tile] = ROW_BYTES as u16;
        rows[tile] = 16;
        tile += 1;
    }
    TileConfig {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes,
        rows,
    }
};

/// The splits of both factors that are multiplied, in this order: from one product to the next only
/// one factor changes, and the largest product is not the first, because smaller terms would be
/// rounded away in its sums.
pub const fn split_products(splits: usize) -> &'static [[usize; 2]] {
    match splits {
        1 => &[[0, 0]],
        2 => &[[1, 1], [0, 1], [0, 0], [1, 0]],
        _ => &[[1, 1], [0, 1], [0, 2], [0, 0], [1, 0], [2, 0]],
    }
}

/// The assembly of a product. Variants differ in how the sums start and in what a step does.
macro_rules! multiply {
    ($product:ident, $begin:ident, $step:ident) => {
        multiply!(@ $product, $begin!(), $step!())
    };
    (@ $product:ident, $begin:expr, $step:expr) => {
        asm!(
            $begin,
            "2:",
            $step,
            "add {a}, {a_step}",
            "add {b0}, {b_step}",
            "add {b1}, {b_step}",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{c0} + {row}], tmm0",
            "tilestored [{c1} + {row}], tmm1",
            "tilestored [{c0} + {row} + 1024], tmm2",
            "tilestored [{c1} + {row} + 1024], tmm3",
            a = inout(reg) $product.a => _,
            b0 = inout(reg) $product.b[0] => _,
            b1 = inout(reg) $product.b[1] => _,
            steps = inout(reg) $product.steps => _,
            c0 = in(reg) $product.c[0],
            c1 = in(reg) $product.c[1],
            a_step = in(reg) $product.a_step,
            b_step = in(reg) $product.b_step,
            b_row = in(reg) $product.b_row,
            row = in(reg) ROW_BYTES,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

/// Starts with the sums in memory.
macro_rules! load_sums {
    () => {
        "tileloadd tmm0, [{c0} + {row}]
         tileloadd tmm1, [{c1} + {row}]
         tileloadd tmm2, [{c0} + {row} + 1024]
         tileloadd tmm3, [{c1} + {row} + 1024]"
    };
}

/// Starts with zeros.
macro_rules! zero_sums {
    () => {
        "tilezero tmm0
         tilezero tmm1
         tilezero tmm2
         tilezero tmm3"
    };
}

/// A step for elements of one split.
macro_rules! one_split {
    () => {
        "tileloadd tmm4, [{a} + {row}]
         tileloadd tmm6, [{b0} + {b_row}]
         tdpbf16ps tmm0, tmm4, tmm6
         tileloadd tmm7, [{b1} + {b_row}]
         tdpbf16ps tmm1, tmm4, tmm7
         tileloadd tmm5, [{a} + {row} + 1024]
         tdpbf16ps tmm2, tmm5, tmm6
         tdpbf16ps tmm3, tmm5, tmm7"
    };
}

/// The four products of the tiles in registers. A factor that changes afterwards is loaded as soon
/// as one of its registers is free, two products before it is needed.
macro_rules! four_products {
    (then) => {
        "tdpbf16ps tmm0, tmm4, tmm6
         tdpbf16ps tmm1, tmm4, tmm7
         tdpbf16ps tmm2, tmm5, tmm6
         tdpbf16ps tmm3, tmm5, tmm7
         "
    };
    (then a $first:literal $second:literal) => {
        concat!(
            "tdpbf16ps tmm0, tmm4, tmm6
             tdpbf16ps tmm1, tmm4, tmm7
             tileloadd tmm4, [{a} + {row} + ",
            $first,
            "]
             tdpbf16ps tmm2, tmm5, tmm6
             tdpbf16ps tmm3, tmm5, tmm7
             tileloadd tmm5, [{a} + {row} + ",
            $second,
            "]
             "
        )
    };
    (then b $both:literal) => {
        concat!(
            "tdpbf16ps tmm0, tmm4, tmm6
             tdpbf16ps tmm2, tmm5, tmm6
             tileloadd tmm6, [{b0} + {b_row} + ",
            $both,
            "]
             tdpbf16ps tmm1, tmm4, tmm7
             tdpbf16ps tmm3, tmm5, tmm7
             tileloadd tmm7, [{b1} + {b_row} + ",
            $both,
            "]
             "
        )
    };
}

/// Loads the second split of both factors.
macro_rules! load_second_splits {
    () => {
        "tileloadd tmm4, [{a} + {row} + 2048]
         tileloadd tmm6, [{b0} + {b_row} + 2048]
         tileloadd tmm7, [{b1} + {b_row} + 2048]
         tileloadd tmm5, [{a} + {row} + 3072]
         "
    };
}

/// A step for elements of two splits, in the order of [`split_products`].
macro_rules! two_splits {
    () => {
        concat!(
            load_second_splits!(),
            four_products!(then a 0 1024),
            four_products!(then b 0),
            four_products!(then a 2048 3072),
            four_products!(then)
        )
    };
}

/// A step for elements of three splits, in the order of [`split_products`].
macro_rules! three_splits {
    () => {
        concat!(
            load_second_splits!(),
            four_products!(then a 0 1024),
            four_products!(then b 4096),
            four_products!(then b 0),
            four_products!(then a 2048 3072),
            four_products!(then a 4096 5120),
            four_products!(then)
        )
    };
}

/// A tile of values between 1 and 2, of either sign: zeros would be multiplied faster.
static FACTOR: [u16; TILE_BYTES / 2] = {
    let mut factor = [0; TILE_BYTES / 2];
    let (mut bits, mut i) = (1u32, 0);
    while i < factor.len() {
        bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        factor[i] = 0x3f80 | (bits >> 16) as u16 & 0x807f;
        i += 1;
    }
    factor
};

impl Hardware {
    /// Four products of tiles from registers only, `rounds` times: the peak of the tiles.
    ///
    /// # Safety
    /// The tiles of this thread are configured.
    pub unsafe fn multiply_registers(rounds: usize) {
        // SAFETY: the caller's promise; `FACTOR` is one tile.
        unsafe {
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "tileloadd tmm4, [{factor} + {row}]",
                "tileloadd tmm5, [{factor} + {row}]",
                "tileloadd tmm6, [{factor} + {row}]",
                "tileloadd tmm7, [{factor} + {row}]",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {rounds}",
                "jnz 2b",
                rounds = inout(reg) rounds => _,
                factor = in(reg) &raw const FACTOR,
                row = in(reg) ROW_BYTES,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly),
            );
        }
    }
}

impl TileUnit for Hardware {
    const NAME: &'static str = "amx";

    fn available() -> bool {
        detect::available()
    }

    #[inline]
    unsafe fn configure() {
        // SAFETY: the caller's promise that tiles are available; the instruction reads 64 bytes.
        unsafe {
            asm!(
                "ldtilecfg [{}]",
                in(reg) &raw const TILE_CONFIG,
                options(nostack, readonly),
            );
        }
    }

    #[inline]
    unsafe fn release() {
        // SAFETY: the caller's promise that tiles are available; none is live between products.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }

    #[inline(always)]
    unsafe fn multiply<const ADD: bool, const SPLITS: usize>(product: TileProduct) {
        debug_assert!(product.steps > 0 && matches!(SPLITS, 1..=3));
        // SAFETY: the caller's promise about the memory and the configuration; the block changes
        // only the registers it names and the sums.
        unsafe {
            match (ADD, SPLITS) {
                (true, 1) => multiply!(product, load_sums, one_split),
                (false, 1) => multiply!(product, zero_sums, one_split),
                (true, 2) => multiply!(product, load_sums, two_splits),
                (false, 2) => multiply!(product, zero_sums, two_splits),
                (true, _) => multiply!(product, load_sums, three_splits),
                (false, _) => multiply!(product, zero_sums, three_splits),
            }
        }
    }
}
