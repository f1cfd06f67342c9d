//! A checksum of an output that is not stored. It does not depend on the order in which rows
//! arrive.
//!
//! The decision here: the elements of a row are summed in a fixed order, and rows are summed as
//! integers, so another sharding changes the checksum only as far as it changes the output itself.
//! Each element has a pseudorandom sign that depends on its position: rounding errors of either
//! direction then add up like a random walk, and the sum detects much smaller errors than a mean.

use encke_core::plan::program::Role;
use encke_core::{DType, Data, Element, with_typed};
use pulp::Arch;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::error::StreamError;
use super::source::{RowRange, TensorSink};

/// Rows that one parallel task sums.
const ROWS: usize = 512;

/// The unit of the integer sums.
const UNIT: f64 = 1.0 / (1u64 << 32) as f64;

/// Sums over all elements of out, in units of 2^-32, and the number of rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checksum {
    #[serde(with = "text")]
    signed: i128,
    #[serde(with = "text")]
    squares: i128,
    rows: u64,
}

/// Serializes integers that are too long for JSON elements as text.
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
    /// The sum of all elements, each with the sign of its position.
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

    /// How far the values of two correct outputs of type `dtype` may differ: the norm of the output
    /// times 32 times the rounding unit. A row of a few hundred keys is off by about 6 units after
    /// its sums, and signs make the errors of all rows add up like a random walk.
    pub fn tolerance(&self, dtype: DType) -> f64 {
        32.0 * dtype.epsilon() * self.squares().sqrt()
    }

    /// A checksum of `rows` rows whose sums, in units of 2^-32, were computed on a device.
    pub fn of_units(signed: i128, squares: i128, rows: u64) -> Checksum {
        Checksum {
            signed,
            squares,
            rows,
        }
    }

    /// The checksum of one row; `place` is its batch entry, token and head.
    #[inline(always)]
    fn row<T: Element>(place: [usize; 3], row: &[T]) -> Checksum {
        let mut state = place.iter().fold(0x9e37_79b9_7f4a_7c15u64, |state, &x| {
            let state = (state ^ x as u64).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            state ^ (state >> 29)
        });
        let (mut signed, mut squares) = ([0.0f64; 8], [0.0f64; 8]);
        for elements in row.chunks(64) {
            state = (state ^ (state >> 32)).wrapping_mul(0x94d0_49bb_1331_11eb);
            let signs = state ^ (state >> 31);
            for (eight, x) in elements.chunks(8).enumerate() {
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

impl TensorSink for Checksum {
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
        let sum = with_typed!(Data, from, elements => {
            let width = elements.len() / rows;
            let some_rows = |(first, elements): (usize, &[_])| {
                arch.dispatch(
                    #[inline(always)]
                    || {
                        let each = elements.chunks_exact(width).enumerate();
                        each.fold(Checksum::default(), |sum, (row, elements)| {
                            let row = first * ROWS + row;
                            let token = tokens.first + row / heads.len() * tokens.stride;
                            let place = [batch, token, heads[row % heads.len()]];
                            sum + Checksum::row(place, elements)
                        })
                    },
                )
            };
            encke_pool::install(|| {
                let tasks = elements.par_chunks(ROWS * width).enumerate();
                tasks.map(some_rows).reduce(Checksum::default, std::ops::Add::add)
            })
        });
        *self = *self + sum;
        Ok(())
    }
}
