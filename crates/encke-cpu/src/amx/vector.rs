//! Functions on vectors of 16 f32: exp2, and truncation to bf16.

use std::arch::x86_64::*;

/// The same value in every lane.
///
/// # Safety
/// The processor has AVX-512F.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn splat(x: f32) -> __m512 {
    _mm512_set1_ps(x)
}

/// 2 to the power of `x`: a polynomial of the fraction, times 2 to the power of the floor.
///
/// The polynomials are minimax for the relative error on [0, 1]: 7.5e-5, 2.9e-6 and 7.5e-8 for
/// degrees 3, 4 and 5, plus the rounding of f32. The one of degree 4 is the best that is exact at
/// 0, where the largest weight is. Minus infinity gives 0, NaN stays NaN, and subnormal results are
/// rounded as usual.
///
/// # Safety
/// The processor has AVX-512F and AVX-512DQ.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub fn exp2<const DEGREE: usize>(x: __m512) -> __m512 {
    const FLOOR_QUIETLY: i32 = 0x09;
    let fraction = _mm512_reduce_ps::<FLOOR_QUIETLY>(x);
    let horner = |y: __m512, c: f32| _mm512_fmadd_ps(y, fraction, splat(c));
    let power = match DEGREE {
        3 => {
            let y = horner(splat(0.078_024_52), 0.226_067_16);
            horner(horner(y, 0.695_833_54), 0.999_925_2)
        }
        4 => {
            let y = horner(splat(0.013_426_811), 0.052_242_05);
            let y = horner(horner(y, 0.241_280_64), 0.693_044_7);
            horner(y, 1.0)
        }
        5 => {
            let y = horner(splat(0.001_877_576_7), 0.008_989_34);
            let y = horner(horner(y, 0.055_826_318), 0.240_153_62);
            horner(horner(y, 0.693_153_1), 0.999_999_94)
        }
        _ => unreachable!("only degrees 3, 4 and 5 have polynomials"),
    };
    _mm512_scalef_ps(power, x)
}

/// log2(1 + 0.72 · 2⁻⁸): the factor, in powers of 2, that compensates [`pair`]'s truncation, which
/// makes a value smaller by 0.72 · 2⁻⁸ of it on average. The factor is free where it is added to an
/// exponent anyway, while rounding would cost an instruction per value; the largest error is 0.72
/// instead of 0.5 units in the last place.
pub const TRUNCATION_BIAS_LOG2: f32 = 0.004_059_457;
/// 2 to the power of minus [`TRUNCATION_BIAS_LOG2`].
pub const TRUNCATION_BIAS_INVERSE: f32 = 0.997_190_2;

/// Truncates two vectors to bf16 and interleaves them, the first one in the low halves.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn pair(low: __m512, high: __m512) -> __m512i {
    const FIRST_OR_BOTH_OTHERS: i32 = 0xf8;
    let upper = _mm512_set1_epi32(-0x1_0000);
    let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(low));
    _mm512_ternarylogic_epi32::<FIRST_OR_BOTH_OTHERS>(low, _mm512_castps_si512(high), upper)
}
