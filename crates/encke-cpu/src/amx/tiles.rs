//! The matrix tiles: one primitive, in hardware and emulated.
//!
//! A tile is 16 rows of 64 bytes. The left factor of a product holds 32 bf16 a row; the right
//! factor holds them in pairs, so that its row r has for each of 16 columns the numbers 2r and
//! 2r + 1 of that column; sums are 16 by 16 f32.
//!
//! The decision here: everything is said in products of two by two tiles, whose sums begin and end
//! in memory. Such a product needs all eight tile registers, feeds each loaded tile to two
//! multiplications, and is one block of assembly, so that no tile register is alive where the
//! compiler could know of it.
//!
//! Two tiles that are always used together form a *slab*: 2 KiB, the second tile behind the first.
//! Numbers that are sums of several bf16 have a slab for each of those pieces, one behind the other:
//! a *stack*. Products of two stacks leave out what is smaller than what sums can hold.

use std::arch::asm;

use super::detect;

/// Bytes of a tile.
pub(crate) const TILE_BYTES: usize = 1024;
/// Bytes of a slab.
pub(crate) const SLAB_BYTES: usize = 2 * TILE_BYTES;
/// Bytes of a row of a tile, and a cache line.
pub(crate) const ROW_BYTES: usize = 64;

/// A product of two by two tiles, summed over `steps` of 32 numbers each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Product {
    /// The slab of the left factor: its tiles are rows 0..16 and 16..32 of the sums.
    pub a: *const u8,
    /// Bytes from one step of it to the next.
    pub a_step: usize,
    /// The two tiles of the right factor: columns 0..16 and 16..32 of the sums.
    pub b: [*const u8; 2],
    /// Bytes from one step of it to the next.
    pub b_step: usize,
    /// Bytes from one row of it to the next.
    pub b_row: usize,
    /// The slabs of the sums: 32 rows each, columns 0..16 and 16..32.
    pub c: [*mut u8; 2],
    /// How many steps; at least one.
    pub steps: usize,
}

/// Something that multiplies tiles.
pub(crate) trait Tiles: Send + Sync + 'static {
    /// What it is called in reports.
    const NAME: &'static str;

    /// Whether this process can use them, and the vectors that go with them.
    fn available() -> bool;

    /// Prepares the tiles of this thread.
    ///
    /// # Safety
    /// Only where the implementation is available.
    unsafe fn configure();

    /// Gives the tiles of this thread back, which makes switching threads cheap again.
    ///
    /// # Safety
    /// Only where the implementation is available.
    unsafe fn release();

    /// Computes a product of numbers in so many pieces, up to three; `ADD` adds it to the sums
    /// that are there, otherwise they are replaced.
    ///
    /// # Safety
    /// This thread's tiles are configured, every tile of the product lies in memory that may be
    /// read (and the sums written), and no other thread writes there.
    unsafe fn multiply<const ADD: bool, const PIECES: usize>(product: Product);
}

/// The tiles of the processor.
#[derive(Debug)]
pub(crate) struct Hardware;

/// What `ldtilecfg` reads: palette 1, eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static CONFIGURATION: Configuration = {
    let mut row_bytes = [0; 16];
    let mut rows = [0; 16];
    let mut tile = 0;
    while tile < 8 {
        row_bytes[tile] = ROW_BYTES as u16;
        rows[tile] = 16;
        tile += 1;
    }
    Configuration {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes,
        rows,
    }
};

/// Pieces of both factors that are multiplied, of numbers that have so many, in this order: from one
/// to the next only one factor changes, and the largest is not the first, because its sums hide what
/// follows.
pub(crate) const fn products(pieces: usize) -> &'static [[usize; 2]] {
    match pieces {
        1 => &[[0, 0]],
        2 => &[[1, 1], [0, 1], [0, 0], [1, 0]],
        _ => &[[1, 1], [0, 1], [0, 2], [0, 0], [1, 0], [2, 0]],
    }
}

/// The assembly of a product: how its sums begin and what a step does is all that differs.
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

/// Sums that begin with what is there.
macro_rules! loaded {
    () => {
        "tileloadd tmm0, [{c0} + {row}]
         tileloadd tmm1, [{c1} + {row}]
         tileloadd tmm2, [{c0} + {row} + 1024]
         tileloadd tmm3, [{c1} + {row} + 1024]"
    };
}

/// Sums that begin with 0.
macro_rules! zero {
    () => {
        "tilezero tmm0
         tilezero tmm1
         tilezero tmm2
         tilezero tmm3"
    };
}

/// Numbers of one piece.
macro_rules! one_piece {
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

/// The four products of the tiles in registers. A factor that changes after them is loaded as soon as
/// a register of it is free, which is two products before it is needed.
macro_rules! four {
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

/// Loads the second piece of both factors.
macro_rules! second_pieces {
    () => {
        "tileloadd tmm4, [{a} + {row} + 2048]
         tileloadd tmm6, [{b0} + {b_row} + 2048]
         tileloadd tmm7, [{b1} + {b_row} + 2048]
         tileloadd tmm5, [{a} + {row} + 3072]
         "
    };
}

/// Numbers of two pieces, multiplied in the order of [`products`].
macro_rules! two_pieces {
    () => {
        concat!(
            second_pieces!(),
            four!(then a 0 1024),
            four!(then b 0),
            four!(then a 2048 3072),
            four!(then)
        )
    };
}

/// Numbers of three pieces, multiplied in the order of [`products`].
macro_rules! three_pieces {
    () => {
        concat!(
            second_pieces!(),
            four!(then a 0 1024),
            four!(then b 4096),
            four!(then b 0),
            four!(then a 2048 3072),
            four!(then a 4096 5120),
            four!(then)
        )
    };
}

/// A tile of numbers between 1 and 2, of either sign: zeros would be multiplied faster.
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
    /// Four products of tiles from registers only, `rounds` times: what the tiles can do at most.
    ///
    /// # Safety
    /// The tiles of this thread are configured.
    pub(crate) unsafe fn multiply_registers(rounds: usize) {
        // SAFETY: the caller's promise; what is read is a tile.
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

impl Tiles for Hardware {
    const NAME: &'static str = "amx";

    fn available() -> bool {
        detect::available()
    }

    #[inline]
    unsafe fn configure() {
        // SAFETY: the caller knows that tiles are there; the instruction reads 64 bytes.
        unsafe {
            asm!(
                "ldtilecfg [{}]",
                in(reg) &raw const CONFIGURATION,
                options(nostack, readonly),
            );
        }
    }

    #[inline]
    unsafe fn release() {
        // SAFETY: the caller knows that tiles are there, and no tile is alive between products.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }

    #[inline(always)]
    unsafe fn multiply<const ADD: bool, const PIECES: usize>(product: Product) {
        debug_assert!(product.steps > 0 && matches!(PIECES, 1..=3));
        // SAFETY: the caller vouches for the memory of the product and for the configuration; the
        // block changes only registers it names and the sums.
        unsafe {
            match (ADD, PIECES) {
                (true, 1) => multiply!(product, loaded, one_piece),
                (false, 1) => multiply!(product, zero, one_piece),
                (true, 2) => multiply!(product, loaded, two_pieces),
                (false, 2) => multiply!(product, zero, two_pieces),
                (true, _) => multiply!(product, loaded, three_pieces),
                (false, _) => multiply!(product, zero, three_pieces),
            }
        }
    }
}
