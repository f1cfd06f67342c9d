//! Gradients of rows that no branch selects: zeros that nobody need write twice.
//!
//! As a program is put together, it clears a gradient, adds to it job by job and returns all of it.
//! Under a dilated branch most rows are never added to. Who they are can be read off the program, so
//! whoever carries it out can clear, and return, only the others.

use super::program::{BufferId, Fill, RankPlan, Role, Task};
use crate::job::{Block, Job, Operand};

/// Blocks above which a list of them is not worth its while.
const MOST: usize = 64;

impl RankPlan {
    /// Gradients at most half of whose numbers are added to, with the rows that are (each block from
    /// its place to the same): in all others stay the zeros that were there before the program.
    pub fn sparse_gradients(&self) -> Vec<(BufferId, Vec<Block>)> {
        let gradients = [Role::Dq, Role::Dk, Role::Dv];
        let ports = self.outputs.iter();
        let ids = ports.filter(|port| gradients.contains(&port.role));
        let sparse = ids.filter_map(|port| {
            let rows = self.added_to(port.buffer)?;
            let numbers: usize = rows.iter().map(Block::numbers).sum();
            let few = 2 * numbers <= self.buffers[port.buffer.0].elements && rows.len() <= MOST;
            few.then_some((port.buffer, rows))
        });
        sparse.collect()
    }

    /// The rows of a buffer that is cleared at first and only added to then; None where anything
    /// else is done to it.
    fn added_to(&self, id: BufferId) -> Option<Vec<Block>> {
        let received = self.rounds.iter().flat_map(|round| &round.receives);
        if received.into_iter().any(|message| message.buffer == id) {
            return None;
        }
        let (mut rows, mut cleared) = (Vec::new(), 0);
        let note = |rows: &mut Vec<Block>, block: Block| {
            // Those of several rounds are mostly the same.
            if !rows.contains(&block) {
                rows.push(block);
            }
        };
        for round in &self.rounds {
            for task in round.before.iter().chain(&round.meanwhile) {
                if !task.holds().contains(&id) {
                    continue;
                }
                if rows.len() > MOST {
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
                        note(&mut rows, of_job(job, job.queries, at));
                    }
                    Task::Backward { job, .. } => {
                        note(&mut rows, of_job(job, job.keys, &job.k));
                    }
                    _ => return None,
                }
            }
        }
        (cleared == 1).then_some(rows)
    }
}

/// The same rows, from their place to the same.
fn in_place(block: &Block, at: &Operand) -> Block {
    Block {
        from: at.clone(),
        to: at.clone(),
        ..block.clone()
    }
}

/// The rows that an operand of a job names; heads that share theirs count once.
fn of_job(job: &Job, rows: usize, at: &Operand) -> Block {
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
        width: job.dim,
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
    fn what_is_added_to_is_what_is_selected() {
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
                    let numbers = rows.iter().flat_map(|block| {
                        let width = block.width;
                        assert_eq!(block.from, block.to);
                        block.addresses().flat_map(move |(_, to)| to..to + width)
                    });
                    assert_eq!(numbers.collect::<BTreeSet<_>>(), expected);
                    selected += expected.len();
                }
            }
            assert_eq!(selected, TOKENS / 4 * DIM * (HEADS + 2));
        }
    }

    #[test]
    fn what_is_mostly_added_to_is_not_sparse() {
        for (lengths, rates) in [(&[32][..], &[1][..]), (&[8, 32], &[1, 4])] {
            let program = plan(lengths, rates, 1, Cut::Contiguous).rank(0).unwrap();
            assert_eq!(program.sparse_gradients(), []);
        }
        let program = plan(&[32], &[2], 1, Cut::Contiguous).rank(0).unwrap();
        assert_eq!(program.sparse_gradients().len(), 3, "just half");
    }
}
