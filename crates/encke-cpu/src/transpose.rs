//! Transposition of f32 squares in registers: 16 x 16 with AVX-512, 8 x 8 with AVX.
//!
//! Queries are rows in memory and lanes in the kernels. Transposing them element by element takes a
//! tenth of a short job; in registers it takes hardly any time.

use std::arch::x86_64::*;

/// Transposes 16 rows of 16 double words, in registers.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn sixteen_registers(r: &mut [__m512i; 16]) {
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

/// to[j][i] = from[i][j] for 16 rows of 16.
///
/// # Safety
/// The processor has AVX-512F; `from` and `to` are 16 rows of 16 elements, `from_step` and
/// `to_step` elements apart.
#[target_feature(enable = "avx512f")]
#[inline]
pub(crate) unsafe fn sixteen(from: *const f32, from_step: usize, to: *mut f32, to_step: usize) {
    let mut rows = [_mm512_setzero_si512(); 16];
    for (i, row) in rows.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *row = unsafe { _mm512_loadu_si512(from.add(i * from_step).cast()) };
    }
    sixteen_registers(&mut rows);
    for (i, row) in rows.into_iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_si512(to.add(i * to_step).cast(), row) };
    }
}

/// to[j][i] = from[i][j] for 8 rows of 8.
///
/// # Safety
/// The processor has AVX; `from` and `to` are 8 rows of 8 elements, `from_step` and `to_step`
/// elements apart.
#[target_feature(enable = "avx")]
#[inline]
pub(crate) unsafe fn eight(from: *const f32, from_step: usize, to: *mut f32, to_step: usize) {
    let mut rows = [_mm256_setzero_ps(); 8];
    for (i, row) in rows.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *row = unsafe { _mm256_loadu_ps(from.add(i * from_step)) };
    }
    for four in rows.chunks_exact_mut(4) {
        let (a, b) = (
            _mm256_unpacklo_ps(four[0], four[1]),
            _mm256_unpackhi_ps(four[0], four[1]),
        );
        let (c, d) = (
            _mm256_unpacklo_ps(four[2], four[3]),
            _mm256_unpackhi_ps(four[2], four[3]),
        );
        let (a, b) = (_mm256_castps_pd(a), _mm256_castps_pd(b));
        let (c, d) = (_mm256_castps_pd(c), _mm256_castps_pd(d));
        let columns = [
            _mm256_unpacklo_pd(a, c),
            _mm256_unpackhi_pd(a, c),
            _mm256_unpacklo_pd(b, d),
            _mm256_unpackhi_pd(b, d),
        ];
        for (row, column) in four.iter_mut().zip(columns) {
            *row = _mm256_castpd_ps(column);
        }
    }
    for j in 0..4 {
        let (a, b) = (rows[j], rows[4 + j]);
        // SAFETY: the caller's promise.
        unsafe {
            _mm256_storeu_ps(to.add(j * to_step), _mm256_permute2f128_ps::<0x20>(a, b));
            _mm256_storeu_ps(
                to.add((4 + j) * to_step),
                _mm256_permute2f128_ps::<0x31>(a, b),
            );
        }
    }
}
