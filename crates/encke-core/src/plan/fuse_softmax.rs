//! Where a softmax begins and ends: a pass over the finished forward program of a rank.
//!
//! As it is put together, a program empties its carry, continues it job by job and finishes it: what
//! every kernel and every continuation understands. But the first job of a cell need not read that
//! it has seen nothing, and the last one can write out and lse itself. So tasks that fill and finish
//! disappear, and with them a pass over the largest numbers that a rank has.
//!
//! The decision here: it is done afterwards and only where it is plain to see. All jobs must be on
//! runs of one row of cells; where branches scatter them, or carries travel, the program stays as
//! it was. A job some of whose cells end and some of which do not (the first rank of a zigzag) is
//! cut in two between them. A program that survivors may have to go on from keeps its carry to the
//! end, since a continuation finishes it, and may begin without one in round 0 alone, since whoever
//! has come through that round has it all.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ops::Range;

use super::program::{BufferId, CarryIds, RankPlan, Role, Round, Task};
use crate::job::Job;

impl RankPlan {
    /// Outputs of which cells that see nothing are left as the zeros they were allocated as: those
    /// that are not finished, in one piece or by their last jobs.
    pub fn sparse_outputs(&self) -> Vec<BufferId> {
        let tasks = || {
            let rounds = self.rounds.iter();
            rounds.flat_map(|round| round.before.iter().chain(&round.meanwhile))
        };
        let finished = |id: BufferId| {
            tasks().any(|task| match task {
                Task::Finish { out, .. } | Task::Conclude { out, .. } => *out == id,
                _ => false,
            })
        };
        let ports = self.outputs.iter().filter(|port| port.role == Role::Out);
        ports
            .map(|port| port.buffer)
            .filter(|id| !finished(*id))
            .collect()
    }
}

/// The program with a softmax that begins in its first job and ends in its last one, where that can
/// be; only the beginning where somebody `can_go_on` from it.
pub(super) fn fuse(mut program: RankPlan, can_go_on: bool) -> RankPlan {
    let Some(softmax) = Softmax::of(&program) else {
        return program;
    };
    let Some(line) = softmax.line() else {
        return program;
    };
    if can_go_on && !line.begins_in(0) {
        return program;
    }
    for (number, round) in program.rounds.iter_mut().enumerate() {
        softmax.rewrite(number, round, &line, !can_go_on);
    }
    while program.rounds.last().is_some_and(is_idle) && program.rounds.len() > 1 {
        program.rounds.pop();
    }
    program
}

fn is_idle(round: &Round) -> bool {
    *round == Round::default()
}

/// The one softmax of a program: its carry, its end, and its jobs with their rounds.
struct Softmax {
    carry: CarryIds,
    out: BufferId,
    lse: BufferId,
    cells: usize,
    jobs: Vec<(usize, Job)>,
}

impl Softmax {
    /// None where there are several, or where a carry is used in another way.
    fn of(program: &RankPlan) -> Option<Softmax> {
        let mut finishes = program.rounds.iter().enumerate().flat_map(|(round, of)| {
            let before = of.before.iter();
            before.filter_map(move |task| match task {
                Task::Finish {
                    cells,
                    carry,
                    out,
                    lse,
                    ..
                } => Some((round, *cells, *carry, *out, *lse)),
                _ => None,
            })
        });
        let (end, cells, carry, out, lse) = finishes.next()?;
        let mut softmax = Softmax {
            carry,
            out,
            lse,
            cells,
            jobs: Vec::new(),
        };
        let sole = finishes.next().is_none();
        let all = program.rounds.iter().enumerate();
        let usual = all.clone().all(|(number, round)| {
            let messages = || round.sends.iter().chain(&round.receives);
            let apart = |task: &Task| !softmax.touches(task);
            let before = |task: &Task| match task {
                Task::Fill { .. } => number == 0 || apart(task),
                Task::Finish { .. } => true,
                _ => apart(task),
            };
            let meanwhile = |task: &Task| match task {
                Task::Forward { carry, begins, .. } => {
                    number < end && !begins && *carry == softmax.carry
                }
                _ => apart(task),
            };
            round.before.iter().all(before)
                && round.meanwhile.iter().all(meanwhile)
                && messages().all(|message| !softmax.has(message.buffer))
        });
        for (number, round) in all {
            let jobs = round.meanwhile.iter().filter_map(|task| match task {
                Task::Forward { job, .. } => Some((number, job.clone())),
                _ => None,
            });
            softmax.jobs.extend(jobs);
        }
        (sole && usual && !softmax.jobs.is_empty()).then_some(softmax)
    }

    fn has(&self, id: BufferId) -> bool {
        let Softmax { carry, .. } = self;
        [carry.acc, carry.m, carry.l, self.out, self.lse].contains(&id)
    }

    fn touches(&self, task: &Task) -> bool {
        let found = Cell::new(false);
        task.clone().rename(|id| {
            found.set(found.get() || self.has(id));
            id
        });
        found.get()
    }

    /// The cells of all jobs as runs of rows, where they are that and every cell is in one.
    fn line(&self) -> Option<Line> {
        let (_, model) = self.jobs.first()?;
        let first = self.jobs.iter().map(|(_, job)| job.cells.offset).min()?;
        let step = model.cells.row;
        let alike = |job: &Job| {
            let (a, b) = (&job.cells, &model.cells);
            let rows = (a.row, &a.heads, job.heads) == (step, &b.heads, model.heads);
            let places = (job.segments, job.batch) == (1, model.batch);
            let batches = job.batch == 1 || a.batch == b.batch;
            rows && places && batches && (a.offset - first).is_multiple_of(step)
        };
        if step == 0 || !self.jobs.iter().all(|(_, job)| alike(job)) {
            return None;
        }
        let mut runs = Vec::new();
        for (round, job) in &self.jobs {
            let start = (job.cells.offset - first) / step;
            runs.push((*round, start..start + job.queries));
        }
        let rows = runs.iter().map(|(_, run)| run.end).max()?;
        // As many different addresses as there are cells: every cell is one of them.
        let mut heads = model.cells.heads.to_vec();
        heads.sort_unstable();
        let distinct = heads.windows(2).all(|pair| pair[0] < pair[1])
            && heads.last()? - heads.first()? < step
            && (model.batch == 1 || model.cells.batch >= rows * step);
        let complete = model.batch * rows * model.heads == self.cells;
        let line = Line { runs };
        (distinct && complete && line.covers(rows)).then_some(line)
    }

    /// The tasks of one round: without fills and end, and with jobs that begin and (if wanted) end.
    fn rewrite(&self, number: usize, round: &mut Round, line: &Line, ends: bool) {
        round.before.retain(|task| match task {
            Task::Fill { buffer, .. } => !self.has(*buffer),
            Task::Finish { .. } => !ends,
            _ => true,
        });
        let before: usize = line.runs.iter().filter(|(of, _)| *of < number).count();
        let mut place = before..;
        let mut tasks = Vec::with_capacity(round.meanwhile.len());
        for task in round.meanwhile.drain(..) {
            let Task::Forward { job, q, k, v, .. } = &task else {
                tasks.push(task);
                continue;
            };
            let place = place.next().unwrap_or(before);
            for (rows, begins, last) in line.pieces(place, ends) {
                let job = job.of_queries(rows);
                tasks.push(self.task((job, *q, *k, *v), begins, last));
            }
        }
        round.meanwhile = tasks;
    }

    fn task(
        &self,
        (job, q, k, v): (Job, BufferId, BufferId, BufferId),
        begins: bool,
        ends: bool,
    ) -> Task {
        let (carry, out, lse) = (self.carry, self.out, self.lse);
        match (begins, ends) {
            (true, true) => Task::Attend {
                job,
                q,
                k,
                v,
                out,
                lse,
            },
            (false, true) => Task::Conclude {
                job,
                q,
                k,
                v,
                carry,
                out,
                lse,
            },
            (begins, false) => Task::Forward {
                job,
                q,
                k,
                v,
                begins,
                carry,
            },
        }
    }
}

/// The runs of rows that jobs are on, in the order of execution, each with its round.
struct Line {
    runs: Vec<(usize, Range<usize>)>,
}

/// Some rows of a job, whether they begin in it, and whether they end in it.
type Piece = (Range<usize>, bool, bool);

impl Line {
    /// Whether every one of so many rows is in a run.
    fn covers(&self, rows: usize) -> bool {
        self.pieces_of(0..rows)
            .all(|piece| self.at(&piece).next().is_some())
    }

    /// Whether every row begins in this round.
    fn begins_in(&self, round: usize) -> bool {
        let rows = self.runs.iter().map(|(_, run)| run.end).max();
        self.pieces_of(0..rows.unwrap_or(0)).all(|piece| {
            let first = self.at(&piece).next();
            first.is_some_and(|place| self.runs[place].0 == round)
        })
    }

    /// The places of the runs that a piece is in.
    fn at(&self, piece: &Range<usize>) -> impl Iterator<Item = usize> {
        let has = |run: &Range<usize>| run.start <= piece.start && piece.end <= run.end;
        let runs = self.runs.iter().enumerate();
        runs.filter(move |(_, (_, run))| has(run))
            .map(|(place, _)| place)
    }

    /// Rows cut wherever a run begins or ends.
    fn pieces_of(&self, rows: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let ends = self.runs.iter().flat_map(|(_, run)| [run.start, run.end]);
        let mut cuts: BTreeSet<usize> = ends.filter(|cut| rows.contains(cut)).collect();
        cuts.extend([rows.start, rows.end]);
        let cuts: Vec<usize> = cuts.into_iter().collect();
        (1..cuts.len()).map(move |i| cuts[i - 1]..cuts[i])
    }

    /// The job at this place, cut between rows that begin or end in it and rows that do not, its
    /// rows counted from its own first one.
    fn pieces(&self, place: usize, ends: bool) -> Vec<Piece> {
        let run = &self.runs[place].1;
        let mut pieces: Vec<Piece> = Vec::new();
        for rows in self.pieces_of(run.clone()) {
            let begins = self.at(&rows).next() == Some(place);
            let last = ends && self.at(&rows).last() == Some(place);
            let rows = rows.start - run.start..rows.end - run.start;
            match pieces.last_mut() {
                Some(piece) if (piece.1, piece.2) == (begins, last) => piece.0.end = rows.end,
                _ => pieces.push((rows, begins, last)),
            }
        }
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::pattern::Pattern;
    use crate::plan::{Plan, Request};
    use crate::shape::Shape;
    use crate::sharding::{Cut, Sharding};

    fn request(ranks: usize, cut: Cut, causal: bool) -> Request {
        let shape = Shape::new(1, 64, 2, 1, 4).expect("a shape");
        let sharding = Sharding::new(ranks, cut).expect("a sharding");
        Request::new(shape, Pattern::dense().causal(causal), sharding, DType::F32)
    }

    /// How often each kind of task comes in a program: fills and finishes, beginnings, jobs between,
    /// conclusions, jobs that are all.
    fn kinds(request: &Request, rank: usize) -> [usize; 5] {
        let plan = Plan::new(request.clone()).expect("a plan");
        let mut kinds = [0; 5];
        for round in plan.rank(rank).expect("a rank").rounds {
            for task in round.before.iter().chain(&round.meanwhile) {
                match task {
                    Task::Fill { .. } | Task::Finish { .. } => kinds[0] += 1,
                    Task::Forward { begins: true, .. } => kinds[1] += 1,
                    Task::Forward { .. } => kinds[2] += 1,
                    Task::Conclude { .. } => kinds[3] += 1,
                    Task::Attend { .. } => kinds[4] += 1,
                    _ => {}
                }
            }
        }
        kinds
    }

    #[test]
    fn a_dense_ring_neither_fills_nor_finishes() {
        for cut in [Cut::Contiguous, Cut::Zigzag, Cut::Striped] {
            for rank in 0..4 {
                let full = kinds(&request(4, cut.clone(), false), rank);
                assert_eq!((full[0], full[4]), (0, 0), "{cut:?} {rank}");
                assert!(full[1] > 0 && full[3] > 0, "{cut:?} {rank}: {full:?}");
            }
        }
    }

    #[test]
    fn a_zigzag_is_cut_where_a_half_sees_nothing_else() {
        let zigzag = request(4, Cut::Zigzag, true);
        // The first rank's first half sees itself alone; those of others end with the first half of
        // the first rank, in a job that the second halves go on from, unless it is their last too.
        let expected = [
            [0, 1, 5, 1, 1],
            [0, 1, 4, 2, 0],
            [0, 1, 3, 2, 0],
            [0, 1, 2, 1, 0],
        ];
        for (rank, expected) in expected.into_iter().enumerate() {
            assert_eq!(kinds(&zigzag, rank), expected, "rank {rank}");
        }
        // So does the whole of a causal ring's first rank.
        assert_eq!(
            kinds(&request(4, Cut::Contiguous, true), 0),
            [0, 0, 0, 0, 1]
        );
    }

    #[test]
    fn who_may_have_to_go_on_keeps_the_carry() {
        let kept = Request {
            redundancy: 1,
            ..request(4, Cut::Zigzag, true)
        };
        for rank in 0..4 {
            assert_eq!(kinds(&kept, rank), [1, 1, 6 - rank, 0, 0], "rank {rank}");
        }
    }

    #[test]
    fn a_job_is_cut_into_the_same_pairs() {
        let plan = Plan::new(request(1, Cut::Contiguous, true)).expect("a plan");
        let program = plan.rank(0).expect("a rank");
        let job = program.jobs().next().expect("a job");
        let (low, high) = (job.of_queries(0..20), job.of_queries(20..64));
        assert_eq!(low.pairs() + high.pairs(), job.pairs());
        for (piece, first) in [(&low, 0), (&high, 20)] {
            for i in 0..piece.queries {
                assert_eq!(piece.visible(i), job.visible(first + i));
                assert_eq!(piece.q.at(0, 0, i, 1), job.q.at(0, 0, first + i, 1));
                assert_eq!(piece.cells.at(0, 0, i, 1), job.cells.at(0, 0, first + i, 1));
            }
        }
    }
}
