//! A sequence of any length that is never stored: each element is a function of its position.
//!
//! A counter-based generator without state: any row can be generated at any time, in any order and
//! any number of times, with the same result for every sharding.
//!
//! The decision here: a row has a 64-bit key, mixed from its tensor, batch entry, token and head,
//! and an element is a 32-bit hash of its channel under that key. The hash is two multiplications,
//! so it vectorizes; with 32-bit keys, a billion rows would collide.

use encke_core::host;
use encke_core::job::Block;
use encke_core::plan::program::Role;
use encke_core::{DType, Data, Slice};
use pulp::Arch;
use rayon::prelude::*;

use super::error::StreamError;
use super::source::{RowRange, TensorSource};

/// Rows that one parallel task generates.
const ROWS: usize = 256;

/// Elements with mean 0 and variance 1, uniform over ±sqrt(3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Generator {
    seed: u64,
    dim: usize,
}

impl Generator {
    /// Tensors with `dim` elements in a row.
    pub fn new(seed: u64, dim: usize) -> Generator {
        Generator { seed, dim }
    }

    /// One row, rounded to `dtype` and widened, as a reference reads it.
    pub fn row(
        &self,
        role: Role,
        batch: usize,
        token: usize,
        head: usize,
        dtype: DType,
    ) -> Vec<f64> {
        let mut row = vec![0.0; self.dim];
        generate_row(self.key(role, batch, token, head), &mut row);
        if dtype.sum() == dtype {
            return row.into_iter().map(f64::from).collect();
        }
        // Rounded from f32 by the conversion that kernels use: going through f64 may round twice.
        let mut rounded = Data::zeros(dtype, self.dim);
        let whole = Block::contiguous(self.dim, 0, 0);
        host::copy(&whole, false, Slice::F32(&row), &mut rounded);
        rounded.to_f64()
    }

    /// A uniform random integer below `bound` for each index.
    pub fn pick(&self, index: u64, bound: usize) -> usize {
        let random = mix(mix(self.seed ^ 0x5eed_0f5a_3b1e_5000) ^ mix(index));
        ((u128::from(random) * bound as u128) >> 64) as usize
    }

    /// The part of the row keys that all tokens of one head share. A device that generates rows
    /// takes this as a parameter.
    #[inline(always)]
    pub fn head_key(&self, role: Role, batch: usize, head: usize) -> u64 {
        let place = [role as u64, batch as u64, head as u64];
        place
            .into_iter()
            .fold(mix(self.seed), |key, x| mix(key ^ mix(x)))
    }

    #[inline(always)]
    fn key(&self, role: Role, batch: usize, token: usize, head: usize) -> u64 {
        mix(self.head_key(role, batch, head) ^ mix(token as u64))
    }
}

impl TensorSource for Generator {
    fn dtype(&self, _: Role) -> DType {
        DType::F32
    }

    fn read(&self, range: &RowRange<'_>, to: &mut Data) -> Result<(), StreamError> {
        let Data::F32(to) = to else {
            unreachable!("a generator's elements are f32");
        };
        let RowRange {
            role,
            batch,
            tokens,
            heads,
        } = *range;
        let arch = Arch::new();
        let some_rows = |(first, rows): (usize, &mut [f32])| {
            arch.dispatch(
                #[inline(always)]
                || {
                    for (i, row) in rows.chunks_exact_mut(self.dim).enumerate() {
                        let at = first * ROWS + i;
                        let token = tokens.first + at / heads.len() * tokens.stride;
                        generate_row(self.key(role, batch, token, heads[at % heads.len()]), row);
                    }
                },
            );
        };
        // A few rows take less time than waking another thread.
        if to.len() <= ROWS * self.dim {
            some_rows((0, to));
        } else {
            encke_pool::install(|| {
                let tasks = to.par_chunks_mut(ROWS * self.dim).enumerate();
                tasks.for_each(some_rows);
            });
        }
        Ok(())
    }
}

/// The finaliser of SplitMix64 (Steele, Lea and Flood 2014), moved off its fixed point at 0.
#[inline(always)]
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Generates a row.
#[inline(always)]
fn generate_row(key: u64, row: &mut [f32]) {
    // sqrt(3) / 2^31 scales 32-bit integers to variance 1.
    const UNIT: f32 = 1.732_050_8 / 2_147_483_648.0;
    let (low, high) = (key as u32, (key >> 32) as u32);
    for (channel, x) in row.iter_mut().enumerate() {
        // Multipliers from a search for low bias (Wellons, lowbias32); the second half of the key
        // enters between the two rounds.
        let h = low.wrapping_add((channel as u32).wrapping_mul(0x9e37_79b9));
        let h = (h ^ (h >> 16)).wrapping_mul(0x21f0_aaad) ^ high;
        let h = (h ^ (h >> 15)).wrapping_mul(0xd35a_2d97);
        *x = (h ^ (h >> 15)) as i32 as f32 * UNIT;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use encke_core::sharding::Run;

    fn read(generator: &Generator, role: Role, tokens: Run, heads: &[usize]) -> Vec<f32> {
        let mut to = Data::zeros(DType::F32, tokens.count * heads.len() * generator.dim);
        let range = RowRange {
            role,
            batch: 0,
            tokens,
            heads,
        };
        generator.read(&range, &mut to).unwrap();
        match to {
            Data::F32(elements) => elements,
            _ => unreachable!(),
        }
    }

    fn run(first: usize, stride: usize, count: usize) -> Run {
        Run {
            first,
            stride,
            count,
        }
    }

    #[test]
    fn an_element_depends_on_its_position_alone() {
        let generator = Generator::new(7, 24);
        let whole = read(&generator, Role::K, run(1000, 1, 900), &[0, 1, 2]);
        for (token, head) in [(1000, 0), (1255, 2), (1256, 0), (1899, 1)] {
            let at = ((token - 1000) * 3 + head) * 24;
            let alone = read(&generator, Role::K, run(token, 1, 1), &[head]);
            assert_eq!(alone, whole[at..at + 24]);
            let row = generator.row(Role::K, 0, token, head, DType::F32);
            assert!(row.iter().zip(&alone).all(|(x, y)| *x == f64::from(*y)));
        }
        let strided = read(&generator, Role::K, run(1004, 7, 3), &[1]);
        assert_eq!(strided[48..72], whole[(18 * 3 + 1) * 24..][..24]);
    }

    #[test]
    fn every_coordinate_matters_and_the_moments_are_right() {
        let generator = Generator::new(7, 64);
        let row = |role, batch, token, head| generator.row(role, batch, token, head, DType::F32);
        let base = row(Role::Q, 0, 5, 0);
        for other in [
            row(Role::K, 0, 5, 0),
            row(Role::Q, 1, 5, 0),
            row(Role::Q, 0, 6, 0),
            row(Role::Q, 0, 5 + (1 << 32), 0),
            row(Role::Q, 0, 5, 1),
        ] {
            assert!(base.iter().zip(&other).filter(|(x, y)| x == y).count() < 3);
        }
        assert_ne!(
            base,
            Generator::new(8, 64).row(Role::Q, 0, 5, 0, DType::F32)
        );
        let many = read(&generator, Role::V, run(0, 1, 20_000), &[0]);
        let count = many.len() as f64;
        let moment = |power: i32| many.iter().map(|&x| f64::from(x).powi(power)).sum::<f64>();
        assert!((moment(1) / count).abs() < 0.005);
        assert!((moment(2) / count - 1.0).abs() < 0.005);
        assert!((moment(4) / count - 1.8).abs() < 0.01);
        // Neighbouring elements are uncorrelated.
        let product = |gap: usize| -> f64 {
            let pairs = many.iter().zip(&many[gap..]);
            pairs.map(|(x, y)| f64::from(x * y)).sum::<f64>() / count
        };
        for gap in [1, 2, 64, 128] {
            assert!(product(gap).abs() < 0.005, "gap {gap}: {}", product(gap));
        }
    }
}
