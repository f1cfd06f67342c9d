//! Ring all-gather of finished rows, for replicated queries: every rank ends with all of them.

use super::builder::ProgramBuilder;
use super::layout::flat;
use super::position::TAGS;
use super::program::{BufferId, Component, Message};
use super::width::Width;
use crate::dtype::DType;
use crate::job::Block;
use crate::transport::Address;

impl ProgramBuilder<'_> {
    /// The two buffers in which finished rows rotate, each large enough for any rank's rows.
    pub fn all_gather_buffers(&mut self, dtype: DType, width: Width) -> [BufferId; 2] {
        let rows = (0..self.plan.ranks()).map(|rank| self.plan.shards.query_rows(rank));
        let rows = rows.max().unwrap_or(0);
        [0, 1].map(|_| self.resident("sharing", Component::Sharing, dtype, rows, width))
    }

    /// Gathers the finished rows of all ranks into `all`, from round `start` on. This rank's rows
    /// must be in the first of the `rotating` buffers by then.
    pub fn all_gather(
        &mut self,
        start: usize,
        tag: usize,
        rotating: [BufferId; 2],
        all: BufferId,
        width: Width,
    ) {
        let (ranks, batch) = (self.plan.ranks(), self.plan.request.shape.batch);
        let row = self.plan.resident_width(width);
        let tag = (self.plan.rings.len() * TAGS + tag) as u64;
        let owner = |distance: usize| (self.rank + ranks - distance) % ranks;
        let steps = (0..ranks).map(|distance| {
            let (rows, at) = (
                self.plan.shards.query_rows(owner(distance)),
                self.among_all(owner(distance)),
            );
            let mut block: Block = flat(batch, rows * row);
            block.to.offset = at.base * row;
            (block.from.row, block.to.row) = (rows * row, at.rows * row);
            (block, batch * rows * row)
        });
        let steps: Vec<(Block, usize)> = steps.collect();
        let (next, previous) = (owner(ranks - 1), owner(1));
        for (distance, (block, elements)) in steps.into_iter().enumerate() {
            let buffer = rotating[distance % 2];
            let message = |peer: usize| Message {
                address: Address {
                    peer,
                    tag,
                    elements,
                },
                buffer,
                origin: None,
            };
            self.copy(start + distance, vec![block], false, buffer, all);
            if elements == 0 {
                continue;
            }
            if distance > 0 {
                self.receive(start + distance - 1, message(previous));
            }
            if distance + 1 < ranks {
                self.send(start + distance, message(next));
            }
        }
    }
}
