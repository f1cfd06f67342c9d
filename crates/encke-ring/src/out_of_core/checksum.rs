//! What can be said of an output that nobody keeps: a sum that does not depend on the order in
//! which rows come.
//!
//! The decision here: the numbers of a row are summed in a fixed order, and rows are summed as
//! integers, so cutting a sequence otherwise changes nothing but what it changes in the output
//! itself. Each number has a sign of its own, decided by its place: errors of either direction
//! then add up like a random walk, and the sum says much more than a mean would.

use encke_core::plan::program::Role;
use encke_core::{DType, Data, Element, with_typed};
use pulp::Arch;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::error::StreamError;
use super::source::{RowRange, Sink};

/// Rows that one task sums.
const ROWS: usize = 512;

/// Sums are kept in units of this.
const UNIT: f64 = 1.0 / (1u64 << 32) as f64;

/// Sums over all numbers of out, in units of 2^-32, and how many rows they are of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checksum {
    #[serde(with = "text")]
    signed: i128,
    #[serde(with = "text")]
    squares: i128,
    rows: u64,
}

/// Integers too long for JSON.
mod text {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(number: &i128, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&number.to_string())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<i128, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(D::Error::custom)
    }
}

impl std::ops::Add for Checksum {
    type Output = Checksum;

    fn add(self, other: Checksum) -> Checksum {
        Checksum {
            signed: self.signed + other.signed,
            squares: self.squares + other.squares,
            rows: self.rows + other.rows,
        }
    }
}

impl Checksum {
    /// The sum of all numbers, each with the sign of its place.
    pub fn value(&self) -> f64 {
        self.signed as f64 * UNIT
    }

    /// The sum of all squares.
    pub fn squares(&self) -> f64 {
        self.squares as f64 * UNIT
    }

    /// Rows summed.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// How far the values of two right outputs of type `dtype` may lie apart: the norm of the
    /// output times 32 times the rounding unit. A row of some hundred keys is off by about 6 units
    /// after its sums, and signs make the errors of all rows add up like a random walk.
    pub fn tolerance(&self, dtype: DType) -> f64 {
        32.0 * dtype.epsilon() * self.squares().sqrt()
    }

    /// One whose sums, in units of 2^-32, were made elsewhere, of so many rows.
    pub fn of_units(signed: i128, squares: i128, rows: u64) -> Checksum {
        Checksum {
            signed,
            squares,
            rows,
        }
    }

    /// One row, of a head of a token of a batch entry.
    #[inline(always)]
    fn row<T: Element>(place: [usize; 3], row: &[T]) -> Checksum {
        let mut state = place.iter().fold(0x9e37_79b9_7f4a_7c15u64, |state, &x| {
            let state = (state ^ x as u64).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            state ^ (state >> 29)
        });
        let (mut signed, mut squares) = ([0.0f64; 8], [0.0f64; 8]);
        for numbers in row.chunks(64) {
            state = (state ^ (state >> 32)).wrapping_mul(0x94d0_49bb_1331_11eb);
            let signs = state ^ (state >> 31);
            for (eight, x) in numbers.chunks(8).enumerate() {
                for (lane, x) in x.iter().enumerate() {
                    let x = x.to_f64();
                    let negative = (signs >> (eight * 8 + lane)) & 1;
                    signed[lane] += f64::from_bits(x.to_bits() ^ (negative << 63));
                    squares[lane] += x * x;
                }
            }
        }
        let units = |sums: [f64; 8]| (sums.iter().sum::<f64>() / UNIT).round() as i128;
        Checksum {
            signed: units(signed),
            squares: units(squares),
            rows: 1,
        }
    }
}

impl Sink for Checksum {
    fn write(&mut self, range: &RowRange<'_>, from: &Data) -> Result<(), StreamError> {
        if range.role != Role::Out {
            return Ok(());
        }
        let RowRange {
            batch,
            tokens,
            heads,
            ..
        } = *range;
        let rows = tokens.count * heads.len();
        let arch = Arch::new();
        let sum = with_typed!(Data, from, numbers => {
            let width = numbers.len() / rows;
            let some_rows = |(first, numbers): (usize, &[_])| {
                arch.dispatch(
                    #[inline(always)]
                    || {
                        let each = numbers.chunks_exact(width).enumerate();
                        each.fold(Checksum::default(), |sum, (row, numbers)| {
                            let row = first * ROWS + row;
                            let token = tokens.first + row / heads.len() * tokens.stride;
                            let place = [batch, token, heads[row % heads.len()]];
                            sum + Checksum::row(place, numbers)
                        })
                    },
                )
            };
            let tasks = numbers.par_chunks(ROWS * width).enumerate();
            tasks.map(some_rows).reduce(Checksum::default, std::ops::Add::add)
        });
        *self = *self + sum;
        Ok(())
    }
}
