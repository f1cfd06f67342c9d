//! Sparse gradients: which rows of dq, dk and dv a program ever adds to.
//!
//! A program clears a gradient, adds to it job by job and returns all of it. Under a dilated branch
//! most rows are never added to. The program shows which, so a rank whose buffer is already zero
//! needs to clear, and copy out, only the others.

use super::program::{BufferId, Fill, RankPlan, Role, Task};
use crate::job::{Block, Job, Operand};

/// Longer lists of blocks cost more than clearing the whole buffer.
const MAX_BLOCKS: usize = 64;

impl RankPlan {
    /// The gradients of which at most half of the elements are added to, with the rows that are (as
    /// blocks from a location to itself). All other rows stay zero if they were zero before.
    pub fn sparse_gradients(&self) -> Vec<(BufferId, Vec<Block>)> {
        let gradients = [Role::Dq, Role::Dk, Role::Dv];
        let ports = self.outputs.iter();
        let ids = ports.filter(|port| gradients.contains(&port.role));
        let sparse = ids.filter_map(|port| {
            let rows = self.added_to(port.buffer)?;
            let elements: usize = rows.iter().map(Block::elements).sum();
            let few =
                2 * elements <= self.buffers[port.buffer.0].elements && rows.len() <= MAX_BLOCKS;
            few.then_some((port.buffer, rows))
        });
        sparse.collect()
    }

    /// The rows that are added to in a buffer that is cleared once and then only added to; None if
    /// any other task or message writes the buffer.
    fn added_to(&self, id: BufferId) -> Option<Vec<Block>> {
        let received = self.rounds.iter().flat_map(|round| &round.receives);
        if received.into_iter().any(|message| message.buffer == id) {
            return None;
        }
        let (mut rows, mut cleared) = (Vec::new(), 0);
        let note = |rows: &mut Vec<Block>, block: Block| {
            // Most rounds add to the same rows.
            if !rows.contains(&block) {
                rows.push(block);
            }
        };
        for round in &self.rounds {
            for task in round.before.iter().chain(&round.meanwhile) {
                if !task.holds().contains(&id) {
                    continue;
                }
                if rows.len() > MAX_BLOCKS {
                    return None;
                }
                match task {
                    Task::Fill {
                        value: Fill::Zero, ..
                    } if rows.is_empty() => cleared += 1,
                    Task::Copy {
                        blocks, add: true, ..
                    } => {
                        for block in blocks {
                            note(&mut rows, in_place(block, &block.to));
                        }
                    }
                    Task::Backward { job, dq, .. } if *dq == id => {
                        let at = job.dq.as_ref().unwrap_or(&job.q);
                        note(&mut rows, of_job(job, job.queries, at, job.dim));
                    }
                    Task::Backward { job, dk, .. } if *dk == id => {
                        note(&mut rows, of_job(job, job.keys, &job.k, job.dim));
                    }
                    Task::Backward { job, .. } => {
                        note(
                            &mut rows,
                            of_job(job, job.keys, &job.values(), job.value_dim),
                        );
                    }
                    _ => return None,
                }
            }
        }
        (cleared == 1).then_some(rows)
    }
}

/// The same rows as a block from a location to itself.
fn in_place(block: &Block, at: &Operand) -> Block {
    Block {
        from: at.clone(),
        to: at.clone(),
        ..block.clone()
    }
}

/// The rows of a job's operand, `width` elements each; heads that share a key head count once.
fn of_job(job: &Job, rows: usize, at: &Operand, width: usize) -> Block {
    let mut heads = at.heads.to_vec();
    heads.sort_unstable();
    heads.dedup();
    let at = Operand {
        heads: heads.as_slice().into(),
        ..at.clone()
    };
    Block {
        batch: job.batch,
        segments: job.segments,
        rows,
        heads: heads.len(),
        width,
        from: at.clone(),
        to: at,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::plan::{Pass, Plan, Request};
    use crate::sharding::{Cut, Sharding};
    use crate::{DType, GroupScale, Mode, Pattern, Shape};

    const TOKENS: usize = 64;
    const HEADS: usize = 2;
    const DIM: usize = 3;

    fn plan(lengths: &[usize], rates: &[usize], ranks: usize, cut: Cut) -> Plan {
        let scale = GroupScale::One;
        let pattern = Pattern::dilated(lengths, rates, Mode::Group { scale }).unwrap();
        let shape = Shape::new(1, TOKENS, HEADS, 1, DIM).unwrap();
        let sharding = Sharding::new(ranks, cut).unwrap();
        let mut request = Request::new(shape, pattern, sharding, DType::F32);
        request.pass = Pass::Backward { dlse: false };
        Plan::new(request).unwrap()
    }

    #[test]
    fn sparse_rows_are_the_rows_the_pattern_selects() {
        for (ranks, cut) in [
            (1, Cut::Contiguous),
            (3, Cut::Contiguous),
            (3, Cut::Zigzag),
            (2, Cut::Striped),
        ] {
            let plan = plan(&[32], &[4], ranks, cut.clone());
            let mut selected = 0;
            for rank in 0..ranks {
                let program = plan.rank(rank).unwrap();
                let sparse = program.sparse_gradients();
                assert_eq!(sparse.len(), 3, "rank {rank} of {ranks}, {cut:?}");
                for (id, rows) in sparse {
                    let port = program.outputs.iter().find(|port| port.buffer == id);
                    let port = port.unwrap();
                    let heads = if port.role == Role::Dq { HEADS } else { 1 };
                    let tokens: Vec<usize> =
                        port.runs.iter().flat_map(|run| run.tokens()).collect();
                    let expected = tokens
                        .iter()
                        .enumerate()
                        .filter(|(_, token)| *token % 4 == 0);
                    let row = |(row, _): (usize, _)| row * heads * DIM..(row + 1) * heads * DIM;
                    let expected: BTreeSet<usize> = expected.flat_map(row).collect();
                    let elements = rows.iter().flat_map(|block| {
                        let width = block.width;
                        assert_eq!(block.from, block.to);
                        block.addresses().flat_map(move |(_, to)| to..to + width)
                    });
                    assert_eq!(elements.collect::<BTreeSet<_>>(), expected);
                    selected += expected.len();
                }
            }
            assert_eq!(selected, TOKENS / 4 * DIM * (HEADS + 2));
        }
    }

    #[test]
    fn a_gradient_with_more_than_half_of_its_rows_is_not_sparse() {
        for (lengths, rates) in [(&[32][..], &[1][..]), (&[8, 32], &[1, 4])] {
            let program = plan(lengths, rates, 1, Cut::Contiguous).rank(0).unwrap();
            assert_eq!(program.sparse_gradients(), []);
        }
        let program = plan(&[32], &[2], 1, Cut::Contiguous).rank(0).unwrap();
        assert_eq!(program.sparse_gradients().len(), 3, "exactly half");
    }
}
