//! What vectors of 16 numbers are used for beside arithmetic: exp2, transposing, rounding.

use std::arch::x86_64::*;

/// The same number in every lane.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn splat(x: f32) -> __m512 {
    _mm512_set1_ps(x)
}

/// 2 to the power of `x`: a polynomial of the fraction, times 2 to the power of the floor.
///
/// Polynomials are the minimax ones for the relative error on [0, 1]: 7.5e-5, 2.6e-6 and 7.5e-8
/// for degrees 3, 4 and 5, to which the rounding of f32 is added. Minus infinity gives 0, NaN
/// stays NaN, and results too small to be normal are rounded as usual.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(crate) fn exp2<const DEGREE: usize>(x: __m512) -> __m512 {
    const FLOOR_QUIETLY: i32 = 0x09;
    let fraction = _mm512_reduce_ps::<FLOOR_QUIETLY>(x);
    let horner = |y: __m512, c: f32| _mm512_fmadd_ps(y, fraction, splat(c));
    let power = match DEGREE {
        3 => {
            let y = horner(splat(0.078_024_52), 0.226_067_16);
            horner(horner(y, 0.695_833_54), 0.999_925_2)
        }
        4 => {
            let y = horner(splat(0.013_534_168), 0.052_011_46);
            let y = horner(horner(y, 0.241_442_76), 0.693_003_83);
            horner(y, 1.000_002_6)
        }
        5 => {
            let y = horner(splat(0.001_877_576_7), 0.008_989_34);
            let y = horner(horner(y, 0.055_826_318), 0.240_153_62);
            horner(horner(y, 0.693_153_1), 0.999_999_94)
        }
        _ => unreachable!("polynomials of degree 3, 4 and 5 are there"),
    };
    _mm512_scalef_ps(power, x)
}

/// Transposes 16 rows of 16 double words.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn transpose(r: &mut [__m512i; 16]) {
    let mut t = *r;
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for i in 0..4 {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for i in 0..4 {
        t[i] = _mm512_shuffle_i32x4::<0x88>(r[i], r[i + 4]);
        t[i + 4] = _mm512_shuffle_i32x4::<0xdd>(r[i], r[i + 4]);
        t[i + 8] = _mm512_shuffle_i32x4::<0x88>(r[i + 8], r[i + 12]);
        t[i + 12] = _mm512_shuffle_i32x4::<0xdd>(r[i + 8], r[i + 12]);
    }
    for i in 0..8 {
        r[i] = _mm512_shuffle_i32x4::<0x88>(t[i], t[i + 8]);
        r[i + 8] = _mm512_shuffle_i32x4::<0xdd>(t[i], t[i + 8]);
    }
}

/// Half a unit in the last place of a bf16 is added, so that cutting off the low half rounds.
///
/// Ties go away from zero and not to even: one number in 65,536 is a tie, and rounding to even
/// would cost three more instructions for each.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn round(x: __m512) -> __m512i {
    _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000))
}

/// Pairs of bf16 from two vectors that went through [`round`]: the first is the low half.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn pair(low: __m512i, high: __m512i) -> __m512i {
    const FIRST_OR_BOTH_OTHERS: i32 = 0xf8;
    let upper = _mm512_set1_epi32(-0x1_0000);
    let low = _mm512_srli_epi32::<16>(low);
    _mm512_ternarylogic_epi32::<FIRST_OR_BOTH_OTHERS>(low, high, upper)
}
