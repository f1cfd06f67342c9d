//! Random layouts of operands in buffers.
//!
//! The decision here: batch, segment, row and head are nested in random order with random gaps.
//! Resident tokens, packed parcels and dilation are all special cases of that. Rows of q, k and v
//! begin at multiples of the head dimension, as they do in every plan.

use super::random::Random;
use crate::job::Operand;

/// The value of gaps between rows: reading it makes a result NaN, writing it is detected.
pub(super) const GAP: f64 = f64::NAN;

/// Numbers of batch entries, segments and rows.
pub(super) type RowCounts = [usize; 3];

/// An operand and its buffer.
pub(super) struct Layout {
    pub operand: Operand,
    /// Elements of the buffer, gaps included.
    pub elements: usize,
    /// All addresses of the operand.
    pub addresses: Vec<usize>,
    unit: usize,
}

impl Layout {
    /// Rows of `unit` elements; head h is in slot `slots[h]`, and several heads may share a slot.
    pub fn new(
        random: &mut Random,
        [batch, segments, rows]: RowCounts,
        slots: &[usize],
        unit: usize,
    ) -> Layout {
        let gap = |random: &mut Random| unit * random.pick(&[0, 0, 0, 1, 2]);
        let slot_count = slots.iter().max().expect("a case has heads") + 1;
        let counts = [batch, segments, rows, slot_count];
        let mut strides = [0; 4];
        let mut extent = unit;
        let mut order = [0, 1, 2, 3];
        random.shuffle(&mut order);
        for axis in order {
            strides[axis] = extent + gap(random);
            extent += strides[axis] * (counts[axis] - 1);
        }
        let operand = Operand {
            offset: gap(random),
            batch: strides[0],
            segment: strides[1],
            row: strides[2],
            heads: slots.iter().map(|slot| slot * strides[3]).collect(),
        };
        let mut addresses = Vec::new();
        for b in 0..batch {
            for s in 0..segments {
                let rows = (0..rows).flat_map(|i| (0..slots.len()).map(move |h| (i, h)));
                addresses.extend(rows.map(|(i, h)| operand.at(b, s, i, h)));
            }
        }
        Layout {
            elements: operand.offset + extent + gap(random),
            operand,
            addresses,
            unit,
        }
    }

    /// A buffer of `width` values per element: rows filled by channel, gaps marked.
    pub fn values(&self, width: usize, mut number: impl FnMut(usize) -> f64) -> Vec<f64> {
        let mut values = vec![GAP; self.elements * width];
        let row = self.unit * width;
        for at in &self.addresses {
            for c in 0..row {
                values[at * width + c] = number(c);
            }
        }
        values
    }
}

/// Slots for heads, in random order.
pub(super) fn shuffled(random: &mut Random, heads: usize) -> Vec<usize> {
    // One slot more than there are heads, so that one slot of the buffer is unused.
    let mut slots: Vec<usize> = (0..=heads).collect();
    random.shuffle(&mut slots);
    slots.truncate(heads);
    slots
}
