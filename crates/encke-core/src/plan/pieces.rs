//! Pieces: a parcel cut into equally many rows, so that a slow link takes a whole turn for it.
//!
//! A message belongs to one round, and a round ends when its messages have arrived. What shall
//! travel behind several rounds is therefore sent in as many messages. A piece is a parcel itself,
//! with some rows of each section (or some segments, where there are more of these), so packing,
//! sizes and origins are those of parcels.

use std::sync::Arc;

use super::layout::PackedLocation;
use super::rings::{Parcel, Section};
use super::topology::Plan;
use super::width::Width;
use crate::job::Block;

/// Some rows of a parcel.
#[derive(Debug, Clone)]
pub(super) struct ParcelPiece {
    pub parcel: Parcel,
    /// Of each section: its index in the whole, its first segment and its first row there.
    cuts: Vec<(usize, usize, usize)>,
}

impl ParcelPiece {
    /// Whether there are more pieces than rows, and this one has none.
    pub fn is_empty(&self) -> bool {
        self.cuts.is_empty()
    }
}

impl Parcel {
    /// This parcel in `count` pieces, some of which may be empty.
    pub(super) fn pieces(&self, count: usize) -> Vec<ParcelPiece> {
        let piece = |index: usize| {
            let part = |of: usize| of * index / count..of * (index + 1) / count;
            let (mut sections, mut cuts) = (Vec::new(), Vec::new());
            for (at, section) in self.sections.iter().enumerate() {
                let (segments, rows) = (section.segments.count, section.rows.count);
                if segments > rows {
                    let range = part(segments);
                    if range.is_empty() {
                        continue;
                    }
                    let mut cut = *section;
                    cut.segments.start += range.start * section.segments.step;
                    cut.segments.count = range.len();
                    cut.rows.row += range.start * section.rows.segment_step;
                    sections.push(cut);
                    cuts.push((at, range.start, 0));
                } else {
                    let range = part(rows);
                    let Some(rows) = section.rows.part(range.clone()) else {
                        continue;
                    };
                    sections.push(Section { rows, ..*section });
                    cuts.push((at, 0, range.start));
                }
            }
            let parcel = Parcel {
                sections,
                ..self.clone()
            };
            ParcelPiece { parcel, cuts }
        };
        (0..count).map(piece).collect()
    }
}

impl Plan {
    /// The copies of a piece to its location in the whole parcel.
    pub(super) fn assembling(
        &self,
        whole: &Parcel,
        piece: &ParcelPiece,
        width: Width,
    ) -> Vec<Block> {
        let sections: Vec<(PackedLocation, &Section)> = self.sections(whole, width).collect();
        let parts = self.sections(&piece.parcel, width).zip(&piece.cuts);
        let copy = |((from, part), &(at, segment, first)): (
            (PackedLocation, &Section),
            &(usize, usize, usize),
        )| {
            let (whole, section) = sections[at];
            let row = self.section_row(section, width);
            let to = PackedLocation {
                offset: whole.offset + (segment * whole.rows + first) * row,
                ..whole
            };
            let at = |location, section| self.packed_with(location, section, width, Arc::new([0]));
            Block {
                batch: self.request.shape.batch,
                segments: part.segments.count,
                rows: 1,
                heads: 1,
                width: part.rows.count * row,
                from: at(from, part),
                to: at(to, section),
            }
        };
        parts.map(copy).collect()
    }
}
