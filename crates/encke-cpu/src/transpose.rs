//! Transposition of f32 squares in registers: 16 x 16 with AVX-512, 8 x 8 with AVX.
//!
//! Queries are rows in memory and lanes in the kernels. Transposing them element by element takes a
//! tenth of a short job; in registers it takes hardly any time.

use std::arch::x86_64::*;

/// to[j][i] = from[i][j] for 16 rows of 16.
///
/// # Safety
/// The processor has AVX-512F; `from` and `to` are 16 rows of 16 elements, `from_step` and
/// `to_step` elements apart.
#[target_feature(enable = "avx512f")]
#[inline]
pub(crate) unsafe fn sixteen(from: *const f32, from_step: usize, to: *mut f32, to_step: usize) {
    let mut rows = [_mm512_setzero_ps(); 16];
    for (i, row) in rows.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *row = unsafe { _mm512_loadu_ps(from.add(i * from_step)) };
    }
    // Four rows at a time: afterwards vector 4k + j holds, in its quarter L, column 4L + j of rows
    // 4k to 4k + 3.
    for four in rows.chunks_exact_mut(4) {
        let (a, b) = (
            _mm512_unpacklo_ps(four[0], four[1]),
            _mm512_unpackhi_ps(four[0], four[1]),
        );
        let (c, d) = (
            _mm512_unpacklo_ps(four[2], four[3]),
            _mm512_unpackhi_ps(four[2], four[3]),
        );
        let [a, b, c, d] = [a, b, c, d].map(|x| _mm512_castps_pd(x));
        let columns = [
            _mm512_unpacklo_pd(a, c),
            _mm512_unpackhi_pd(a, c),
            _mm512_unpacklo_pd(b, d),
            _mm512_unpackhi_pd(b, d),
        ];
        for (row, column) in four.iter_mut().zip(columns) {
            *row = _mm512_castpd_ps(column);
        }
    }
    // Then quarters with the same index are joined.
    for j in 0..4 {
        let [a, b, c, d] = [rows[j], rows[4 + j], rows[8 + j], rows[12 + j]];
        let even = (
            _mm512_shuffle_f32x4::<0x88>(a, b),
            _mm512_shuffle_f32x4::<0x88>(c, d),
        );
        let odd = (
            _mm512_shuffle_f32x4::<0xdd>(a, b),
            _mm512_shuffle_f32x4::<0xdd>(c, d),
        );
        let columns = [
            _mm512_shuffle_f32x4::<0x88>(even.0, even.1),
            _mm512_shuffle_f32x4::<0x88>(odd.0, odd.1),
            _mm512_shuffle_f32x4::<0xdd>(even.0, even.1),
            _mm512_shuffle_f32x4::<0xdd>(odd.0, odd.1),
        ];
        for (quarter, column) in columns.into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { _mm512_storeu_ps(to.add((4 * quarter + j) * to_step), column) };
        }
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
        let [a, b, c, d] = [a, b, c, d].map(|x| _mm256_castps_pd(x));
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
