//! Addresses: operands for rows of a shard and for rows packed into a parcel.

use std::sync::Arc;

use super::program::{BufferId, Message, Origin, Role, TokenRows};
use super::rings::{Parcel, Section};
use super::topology::Plan;
use super::width::Width;
use crate::job::{Band, Block, Job, JobDropout, Mask, Operand};
use crate::pattern::Lane;
use crate::rows::{Rows, Segments, Visibility, visibility};
use crate::sharding::Run;
use crate::transport::Address;

/// Where a packed section is. Its rows may be interleaved with those of other parcels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PackedLocation {
    /// Address of its first row.
    pub offset: usize,
    /// Rows of one segment, interleaved ones included.
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
    /// Elements in a row of a resident buffer.
    pub(super) fn resident_width(&self, width: Width) -> usize {
        let shape = &self.request.shape;
        let heads = match width {
            Width::Key | Width::Value => shape.kv_heads,
            Width::Query => shape.heads,
            Width::Cell | Width::WideCell => self.slots,
            Width::Delta => self.delta_slots(),
        };
        heads * width.of_head(shape)
    }

    /// Elements in a packed row: only the heads of its lane are sent.
    fn packed_width(&self, lane: &Lane, width: Width) -> usize {
        let heads = match width.is_of_keys() {
            true => lane.kv_heads.len(),
            false => lane.heads.len(),
        };
        heads * width.of_head(&self.request.shape)
    }

    /// Elements of a parcel.
    pub(super) fn parcel_elements(&self, parcel: &Parcel, width: Width) -> usize {
        let of = |section: &Section| self.section_elements(section, width);
        parcel.sections.iter().map(of).sum()
    }

    fn section_elements(&self, section: &Section, width: Width) -> usize {
        self.request.shape.batch * section.total_rows() * self.section_row(section, width)
    }

    /// Elements in a row of a section.
    pub(super) fn section_row(&self, section: &Section, width: Width) -> usize {
        self.packed_width(&self.lanes[section.lane], width)
    }

    /// The sections of a parcel in a buffer of its own, each with its location.
    pub(super) fn sections<'a>(
        &self,
        parcel: &'a Parcel,
        width: Width,
    ) -> impl Iterator<Item = (PackedLocation, &'a Section)> {
        parcel.sections.iter().scan(0, move |end, section| {
            let location = PackedLocation {
                offset: *end,
                rows: section.rows.count,
            };
            *end += self.section_elements(section, width);
            Some((location, section))
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

    /// Rows of a packed section.
    pub(super) fn packed(&self, at: PackedLocation, section: &Section, width: Width) -> Operand {
        let heads = self.heads[section.lane].packed(width);
        self.packed_with(at, section, width, heads)
    }

    pub(super) fn packed_with(
        &self,
        at: PackedLocation,
        section: &Section,
        width: Width,
        heads: Arc<[usize]>,
    ) -> Operand {
        let row = self.section_row(section, width);
        Operand {
            offset: at.offset,
            batch: section.segments.count * at.rows * row,
            segment: at.rows * row,
            row,
            heads,
        }
    }

    /// The copy of a section from one location to another. The rows of a segment are contiguous in
    /// both, so each segment is one piece.
    pub(super) fn between(
        &self,
        section: &Section,
        from: PackedLocation,
        to: PackedLocation,
        width: Width,
    ) -> Block {
        let at = |location| self.packed_with(location, section, width, Arc::new([0]));
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

    /// The copies that pack the rows of a shard (`at`) into its parcel.
    pub(super) fn packing(&self, parcel: &Parcel, at: Resident, width: Width) -> Vec<Block> {
        let head_width = width.of_head(&self.request.shape);
        self.sections(parcel, width)
            .map(|(location, section)| {
                let lane = &self.lanes[section.lane];
                let heads = &self.heads[section.lane];
                // A key head is packed once, however many heads of the lane read it.
                let (resident, packed): (Arc<[usize]>, Arc<[usize]>) = match width.is_of_keys() {
                    true => (
                        lane.kv_heads.iter().map(|head| head * head_width).collect(),
                        (0..lane.kv_heads.len()).map(|i| i * head_width).collect(),
                    ),
                    false => (heads.resident(width), heads.packed(width)),
                };
                Block {
                    batch: self.request.shape.batch,
                    segments: section.segments.count,
                    rows: section.rows.count,
                    heads: resident.len(),
                    width: head_width,
                    from: self.resident_with(&section.rows, at, width, resident),
                    to: self.packed_with(location, section, width, packed),
                }
            })
            .collect()
    }

    /// A message of one parcel; `address.elements` is set here.
    pub(super) fn parcel_message(
        &self,
        address: Address,
        buffer: BufferId,
        (role, width): (Option<Role>, Width),
        parcel: &Parcel,
    ) -> Message {
        let of = |section: &Section| self.section_rows(&[section], width);
        Message {
            address: Address {
                elements: self.parcel_elements(parcel, width),
                ..address
            },
            buffer,
            origin: role.map(|role| Origin {
                role,
                rows: parcel.sections.iter().map(of).collect(),
            }),
        }
    }

    /// The rows of sections of one lane and the same segments, interleaved in each segment: tokens
    /// of keys, or indices of queries.
    pub(super) fn section_rows(&self, sections: &[&Section], width: Width) -> TokenRows {
        let section = sections[0];
        let lane = &self.lanes[section.lane];
        let (heads, first) = match width.is_of_keys() {
            true => (lane.kv_heads.iter().copied().collect(), 0),
            false => {
                let heads = lane.heads.iter().map(|head| head.head).collect();
                (heads, self.request.positions().start)
            }
        };
        let run = |section: &&Section| Run {
            first: section.segments.start + section.rows.position - first,
            stride: section.rows.position_step,
            count: section.rows.count,
        };
        TokenRows {
            segments: section.segments.count,
            segment_step: section.segments.step,
            rows: sections.iter().map(run).collect(),
            heads,
        }
    }

    /// A job of `lane` over some segments; None if the mask hides every key from every query.
    pub(super) fn job(
        &self,
        lane: usize,
        segments: Segments,
        (q_rows, q): (&Rows, Operand),
        (k_rows, k): (&Rows, Operand),
        cells: Operand,
        dq: Option<Operand>,
    ) -> Option<Job> {
        let request = &self.request;
        let window = request.pattern.window_of(k_rows, segments.prefix);
        let seen = visibility(window, q_rows, k_rows);
        let heads = &self.lanes[lane].heads;
        let transform = request.transform(heads);
        let dropout = request.dropout.map(|dropout| {
            let (pattern, shape) = (&request.pattern, &request.shape);
            let document = pattern.document_of(segments.start, shape.tokens).start;
            // A padded batch has the coins that it has without its padding.
            let (entry, origin) = pattern.entry_of(segments.start);
            let heads = heads.iter().map(|of| of.head + shape.heads * entry);
            JobDropout {
                dropout,
                first_token: segments.start - origin,
                segment_step: segments.step,
                document: document - origin,
                heads: heads.collect(),
                all_heads: shape.heads,
            }
        });
        let sloping = transform.as_ref().is_some_and(|of| of.slopes.is_some());
        let needs_positions = sloping || dropout.is_some();
        let mask = match seen {
            Visibility::None => return None,
            Visibility::All if !needs_positions => None,
            _ => Some(Mask::Band(Band {
                query: q_rows.position,
                query_step: q_rows.position_step,
                key: k_rows.position,
                key_step: k_rows.position_step,
                window,
            })),
        };
        let job = Job {
            batch: request.shape.batch,
            segments: segments.count,
            queries: q_rows.count,
            keys: k_rows.count,
            heads: heads.len(),
            dim: request.shape.dim,
            value_dim: request.shape.value_dim,
            q,
            k,
            cells,
            delta: None,
            dq,
            mask,
            transform,
            dropout,
            scale: request.scale(),
            gain: request.pattern.gain(),
            tiles: None,
        };
        // Between the steps of its positions a window may show no key at all.
        (seen == Visibility::All || job.pairs() > 0).then_some(job)
    }
}

/// The same copies in the opposite direction.
pub(super) fn reversed(blocks: Vec<Block>) -> Vec<Block> {
    let reverse = |block: Block| Block {
        from: block.to,
        to: block.from,
        ..block
    };
    blocks.into_iter().map(reverse).collect()
}

/// A copy of `rows` adjacent cells of `width` elements from the start of one buffer to the start of
/// another; with one row, of `width` contiguous elements.
pub(super) fn flat(rows: usize, width: usize) -> Block {
    let start = Operand {
        offset: 0,
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
        from: start.clone(),
        to: start,
    }
}
