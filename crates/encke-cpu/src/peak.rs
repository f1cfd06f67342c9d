//! The arithmetic peak of this machine: multiply-adds from registers only, on every thread of the
//! pool. Benchmarks measure it in the same run and report their speed as a share of it.

use std::hint::black_box;
use std::time::Instant;

use encke_core::DType;
use pulp::{NullaryFnOnce, Simd};

use crate::instruction_set::InstructionSet;

/// Independent sums, more than any machine needs to hide the latency of a multiply-add.
const SUMS: usize = 12;
/// Multiply-adds of each sum: some tenths of a second.
const STEPS: usize = 20_000_000;

/// GFLOP/s of an instruction set on elements of type `dtype`: of the tiles for bf16 on AMX, and of
/// the vectors otherwise.
pub fn peak(instruction_set: InstructionSet, dtype: DType) -> f64 {
    #[cfg(target_arch = "x86_64")]
    match instruction_set {
        InstructionSet::Amx if dtype == DType::Bf16 => return tiles(),
        InstructionSet::Amx | InstructionSet::Avx512 => {
            if let Some(simd) = pulp::x86::V4::try_new() {
                return vectors(simd);
            }
        }
        InstructionSet::Avx2 => {
            if let Some(simd) = pulp::x86::V3::try_new() {
                return vectors(simd);
            }
        }
        InstructionSet::Portable => {}
    }
    let _ = (instruction_set, dtype);
    vectors(pulp::Scalar::new())
}

/// Runs `work` on every thread of the pool at once, and returns the elapsed seconds.
fn seconds_on_all_threads(work: impl Fn() + Sync) -> f64 {
    let begin = Instant::now();
    encke_pool::install(|| rayon::broadcast(|_| work()));
    begin.elapsed().as_secs_f64()
}

fn vectors<S: Simd>(simd: S) -> f64 {
    let seconds = seconds_on_all_threads(|| {
        black_box(simd.vectorize(FmaLoop(simd)));
    });
    let operations = encke_pool::threads() * STEPS * SUMS * 2 * S::F32_LANES;
    operations as f64 / seconds / 1e9
}

struct FmaLoop<S>(S);

impl<S: Simd> NullaryFnOnce for FmaLoop<S> {
    type Output = f32;

    #[inline(always)]
    fn call(self) -> f32 {
        let simd = self.0;
        let factor = simd.splat_f32s(black_box(0.999_999));
        let mut sums = [simd.splat_f32s(black_box(1.0)); SUMS];
        for _ in 0..STEPS {
            for sum in &mut sums {
                *sum = simd.mul_add_e_f32s(*sum, factor, factor);
            }
        }
        sums.into_iter().map(|sum| simd.reduce_sum_f32s(sum)).sum()
    }
}

#[cfg(target_arch = "x86_64")]
fn tiles() -> f64 {
    use crate::amx::tiles::{Hardware, TileUnit};
    /// Rounds of four products of tiles, each 16 by 16 by 32.
    const ROUNDS: usize = 4_000_000;
    if !Hardware::available() {
        return 0.0;
    }
    let seconds = seconds_on_all_threads(|| {
        // SAFETY: the tiles are available, configured first and released last.
        unsafe {
            Hardware::configure();
            Hardware::multiply_registers(ROUNDS);
            Hardware::release();
        }
    });
    let operations = encke_pool::threads() * ROUNDS * 4 * 16 * 16 * 32 * 2;
    operations as f64 / seconds / 1e9
}
