//! Where things lie: operands for rows in a shard and for rows packed into a parcel.

use std::sync::Arc;

use super::Plan;
use super::program::TokenRows;
use super::rings::{Parcel, Section};
use crate::job::{Block, Causal, Job, Operand};
use crate::pattern::Lane;
use crate::rows::{Rows, Sight, sight};
use crate::sharding::Run;

/// What a row of a buffer consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Width {
    /// A key or value: `dim` numbers for each key head.
    Kv,
    /// A query or its gradient: `dim` numbers for each head.
    Query,
    /// One number for each slot.
    Cell,
    /// `dim` numbers for each slot.
    WideCell,
}

impl Width {
    /// All of them, in the order of their declaration.
    const ALL: [Width; 4] = [Width::Kv, Width::Query, Width::Cell, Width::WideCell];
}

/// What each head of a lane adds to an address, in buffers of every width. Made once per lane:
/// all of its jobs share them.
#[derive(Debug, Clone)]
pub(super) struct HeadAddresses {
    resident: [Arc<[usize]>; 4],
    packed: [Arc<[usize]>; 4],
}

impl HeadAddresses {
    pub fn new(lane: &Lane, dim: usize) -> HeadAddresses {
        let resident = |width: Width| {
            let heads = lane.heads.iter().map(|head| match width {
                Width::Kv => head.kv_head * dim,
                Width::Query => head.head * dim,
                Width::Cell => head.slot,
                Width::WideCell => head.slot * dim,
            });
            heads.collect()
        };
        let packed = |width: Width| {
            let heads = lane.heads.iter().enumerate().map(|(i, head)| match width {
                Width::Kv => {
                    let kv = lane.kv_heads.binary_search(&head.kv_head);
                    kv.expect("a lane lists every key head its heads read") * dim
                }
                Width::Query | Width::WideCell => i * dim,
                Width::Cell => i,
            });
            heads.collect()
        };
        HeadAddresses {
            resident: Width::ALL.map(resident),
            packed: Width::ALL.map(packed),
        }
    }

    fn resident(&self, width: Width) -> Arc<[usize]> {
        Arc::clone(&self.resident[width as usize])
    }

    fn packed(&self, width: Width) -> Arc<[usize]> {
        Arc::clone(&self.packed[width as usize])
    }
}

/// Where a section lies packed: its rows may have those of other parcels beside them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// Address of its first row.
    pub offset: usize,
    /// Rows of one segment, with those of the others.
    pub rows: usize,
}

/// A buffer that holds whole rows `[batch, rows, heads, …]` of one or more shards.
#[derive(Debug, Clone, Copy)]
pub(super) struct Resident {
    /// Rows of a batch entry.
    pub rows: usize,
    /// Row at which the shard in question begins.
    pub base: usize,
}

impl Plan {
    /// Numbers in a row of a resident buffer.
    pub(super) fn resident_width(&self, width: Width) -> usize {
        let shape = &self.request.shape;
        match width {
            Width::Kv => shape.kv_heads * shape.dim,
            Width::Query => shape.heads * shape.dim,
            Width::Cell => self.slots,
            Width::WideCell => self.slots * shape.dim,
        }
    }

    /// Numbers in a row of a section: only the heads of its lane travel.
    fn packed_width(&self, lane: &Lane, width: Width) -> usize {
        let dim = self.request.shape.dim;
        match width {
            Width::Kv => lane.kv_heads.len() * dim,
            Width::Query | Width::WideCell => lane.heads.len() * dim,
            Width::Cell => lane.heads.len(),
        }
    }

    /// Elements of a parcel.
    pub(super) fn parcel_elements(&self, parcel: &Parcel, width: Width) -> usize {
        let of = |section: &Section| self.section_elements(section, width);
        parcel.sections.iter().map(of).sum()
    }

    fn section_elements(&self, section: &Section, width: Width) -> usize {
        self.request.shape.batch * section.total_rows() * self.section_row(section, width)
    }

    /// Numbers in a row of a section.
    pub(super) fn section_row(&self, section: &Section, width: Width) -> usize {
        self.packed_width(&self.lanes[section.lane], width)
    }

    /// The sections of a parcel that has a buffer to itself, each with where it lies.
    pub(super) fn sections<'a>(
        &self,
        parcel: &'a Parcel,
        width: Width,
    ) -> impl Iterator<Item = (Place, &'a Section)> {
        parcel.sections.iter().scan(0, move |end, section| {
            let place = Place {
                offset: *end,
                rows: section.rows.count,
            };
            *end += self.section_elements(section, width);
            Some((place, section))
        })
    }

    /// Rows in a resident buffer.
    pub(super) fn resident(&self, lane: usize, rows: &Rows, at: Resident, width: Width) -> Operand {
        let heads = self.heads[lane].resident(width);
        self.resident_with(rows, at, width, heads)
    }

    fn resident_with(
        &self,
        rows: &Rows,
        at: Resident,
        width: Width,
        heads: Arc<[usize]>,
    ) -> Operand {
        let row = self.resident_width(width);
        Operand {
            offset: (at.base + rows.row) * row,
            batch: at.rows * row,
            segment: rows.segment_step * row,
            row: rows.row_step * row,
            heads,
        }
    }

    /// Rows of a section that lies packed.
    pub(super) fn packed(&self, place: Place, section: &Section, width: Width) -> Operand {
        let heads = self.heads[section.lane].packed(width);
        self.packed_with(place, section, width, heads)
    }

    fn packed_with(
        &self,
        place: Place,
        section: &Section,
        width: Width,
        heads: Arc<[usize]>,
    ) -> Operand {
        let row = self.section_row(section, width);
        Operand {
            offset: place.offset,
            batch: section.segments.count * place.rows * row,
            segment: place.rows * row,
            row,
            heads,
        }
    }

    /// The copy of a section from one place to another: all rows of a segment at once, since they
    /// lie side by side in both.
    pub(super) fn between(&self, section: &Section, from: Place, to: Place, width: Width) -> Block {
        let at = |place| self.packed_with(place, section, width, Arc::new([0]));
        Block {
            batch: self.request.shape.batch,
            segments: section.segments.count,
            rows: 1,
            heads: 1,
            width: section.rows.count * self.section_row(section, width),
            from: at(from),
            to: at(to),
        }
    }

    /// The copies between a shard (`at`) and its parcel: (resident, packed) operands, whole rows.
    pub(super) fn packing(&self, parcel: &Parcel, at: Resident, width: Width) -> Vec<Block> {
        let dim = self.request.shape.dim;
        self.sections(parcel, width)
            .map(|(place, section)| {
                let lane = &self.lanes[section.lane];
                let heads = &self.heads[section.lane];
                // A key head is packed once, however many heads of the lane read it.
                let (resident, packed): (Arc<[usize]>, Arc<[usize]>) = match width {
                    Width::Kv => (
                        lane.kv_heads.iter().map(|head| head * dim).collect(),
                        (0..lane.kv_heads.len()).map(|i| i * dim).collect(),
                    ),
                    _ => (heads.resident(width), heads.packed(width)),
                };
                Block {
                    batch: self.request.shape.batch,
                    segments: section.segments.count,
                    rows: section.rows.count,
                    heads: resident.len(),
                    width: if width == Width::Cell { 1 } else { dim },
                    from: self.resident_with(&section.rows, at, width, resident),
                    to: self.packed_with(place, section, width, packed),
                }
            })
            .collect()
    }

    /// The rows of a parcel by token, in the order they are packed in.
    pub(super) fn token_rows(&self, parcel: &Parcel, width: Width) -> Arc<[TokenRows]> {
        let of = |section: &Section| self.section_rows(&[section], width);
        parcel.sections.iter().map(of).collect()
    }

    /// The rows of sections of one lane and the same segments, side by side in each of these.
    pub(super) fn section_rows(&self, sections: &[&Section], width: Width) -> TokenRows {
        let section = sections[0];
        let lane = &self.lanes[section.lane];
        let heads = match width {
            Width::Kv => lane.kv_heads.iter().copied().collect(),
            _ => lane.heads.iter().map(|head| head.head).collect(),
        };
        let run = |section: &&Section| Run {
            first: section.segments.first * lane.segment + section.rows.position,
            stride: section.rows.position_step,
            count: section.rows.count,
        };
        TokenRows {
            segments: section.segments.count,
            segment_step: section.segments.step * lane.segment,
            rows: sections.iter().map(run).collect(),
            heads,
        }
    }

    /// A job of `lane` over `segments` segments, if any query of it sees any key.
    pub(super) fn job(
        &self,
        lane: usize,
        segments: usize,
        (q_rows, q): (&Rows, Operand),
        (k_rows, k): (&Rows, Operand),
        cells: Operand,
        dq: Option<Operand>,
    ) -> Option<Job> {
        let request = &self.request;
        let causal = match sight(request.pattern.is_causal(), q_rows, k_rows) {
            Sight::None => return None,
            Sight::All => None,
            Sight::Part => Some(Causal {
                query: q_rows.position,
                query_step: q_rows.position_step,
                key: k_rows.position,
                key_step: k_rows.position_step,
            }),
        };
        Some(Job {
            batch: request.shape.batch,
            segments,
            queries: q_rows.count,
            keys: k_rows.count,
            heads: self.lanes[lane].heads.len(),
            dim: request.shape.dim,
            q,
            k,
            cells,
            dq,
            causal,
            scale: request.scale(),
            gain: request.pattern.gain(),
        })
    }
}

/// The same copies, the other way.
pub(super) fn reversed(blocks: Vec<Block>) -> Vec<Block> {
    let reverse = |block: Block| Block {
        from: block.to,
        to: block.from,
        ..block
    };
    blocks.into_iter().map(reverse).collect()
}

/// A copy of `elements` contiguous numbers, or (with a `width`) of so many cells.
pub(super) fn flat(rows: usize, width: usize, from: usize, to: usize) -> Block {
    let at = |offset| Operand {
        offset,
        batch: 0,
        segment: 0,
        row: 1,
        heads: Arc::new([0]),
    };
    Block {
        batch: 1,
        segments: 1,
        rows,
        heads: 1,
        width,
        from: at(from),
        to: at(to),
    }
}
