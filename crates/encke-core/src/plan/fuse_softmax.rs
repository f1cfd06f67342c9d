//! Fuses the start and the end of the softmax into jobs: a pass over a finished forward program.
//!
//! A program as built clears its carry, updates it job by job and finishes it. But the first job of
//! a cell need not read an empty carry, and the last one can write out and lse itself. This pass
//! removes the fill and finish tasks, and with them a sweep over the largest buffers of a rank.
//!
//! The decision here: fusing is a separate pass that applies only to simple programs. All jobs must
//! be on contiguous runs of the same cells; where carries are reduced between ranks, the program
//! stays as it was. Where branches select different cells, and one of them all (that without
//! dilation), its jobs become the last ones and finish every cell. A job that is the last one for
//! some of its cells only (the first rank of a zigzag sharding) is split. A resumable program keeps
//! its carry to the end, because a continuation finishes it, and is fused only at the start, and
//! only if every cell starts in round 0: a rank that completed round 0 then has a complete carry.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ops::Range;

use super::program::{BufferId, CarryIds, RankPlan, Role, Round, Task};
use crate::job::Job;

impl RankPlan {
    /// The outputs in which cells that see no key are never written and must be zero beforehand:
    /// those without a finish task and without a concluding job.
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

/// Fuses the softmax of a program where possible; of a `resumable` program only the start.
pub(super) fn fuse(mut program: RankPlan, resumable: bool) -> RankPlan {
    let Some(softmax) = SoftmaxTasks::of(&program) else {
        return program;
    };
    let Some(cells) = softmax.cell_runs() else {
        if let Some(last) = softmax.covering_jobs().filter(|_| !resumable) {
            softmax.end_with(last, &mut program);
        }
        return program;
    };
    if resumable && !cells.all_begin_in(0) {
        return program;
    }
    for (number, round) in program.rounds.iter_mut().enumerate() {
        softmax.rewrite(number, round, &cells, !resumable);
    }
    while program.rounds.last().is_some_and(is_idle) && program.rounds.len() > 1 {
        program.rounds.pop();
    }
    program
}

fn is_idle(round: &Round) -> bool {
    *round == Round::default()
}

/// The only softmax of a program: its carry, its outputs, and its jobs with their rounds.
struct SoftmaxTasks {
    carry: CarryIds,
    out: BufferId,
    lse: BufferId,
    cells: usize,
    jobs: Vec<(usize, Job)>,
}

impl SoftmaxTasks {
    /// None if there are several, or if any other task or message uses the buffers.
    fn of(program: &RankPlan) -> Option<SoftmaxTasks> {
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
        let mut softmax = SoftmaxTasks {
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
                Task::Forward { carry, starts, .. } => {
                    number < end && !starts && *carry == softmax.carry
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
        let SoftmaxTasks { carry, .. } = self;
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

    /// The cells of each job as a run of rows; None if they are not runs, or if some cell is in no
    /// job.
    fn cell_runs(&self) -> Option<CellRuns> {
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
        // If the addresses are distinct and as many as there are cells, every cell is one of them.
        let mut heads = model.cells.heads.to_vec();
        heads.sort_unstable();
        let distinct = heads.windows(2).all(|pair| pair[0] < pair[1])
            && heads.last()? - heads.first()? < step
            && (model.batch == 1 || model.cells.batch >= rows * step);
        let complete = model.batch * rows * model.heads == self.cells;
        let cells = CellRuns { runs };
        (distinct && complete && cells.cover(rows)).then_some(cells)
    }

    /// Jobs that together have every cell once, if all jobs are in round 0.
    fn covering_jobs(&self) -> Option<Range<usize>> {
        let (mut first, mut runs, mut found) = (0, Vec::new(), None);
        for (index, (round, job)) in self.jobs.iter().enumerate() {
            if *round > 0 {
                return None;
            }
            let own = dense_runs(job, self.cells).unwrap_or_default();
            runs.extend(own.clone());
            runs.sort_by_key(|run: &Range<usize>| run.start);
            if own.is_empty() || runs.windows(2).any(|pair| pair[0].end > pair[1].start) {
                // Jobs of another branch begin here, or after this one.
                (first, runs) = (index + usize::from(own.is_empty()), own);
            }
            let rows: usize = runs.iter().map(|run| run.len()).sum();
            if rows * job.batch * job.heads == self.cells && !runs.is_empty() {
                found = Some(first..index + 1);
            }
        }
        found
    }

    /// Moves jobs that have every cell to the end of round 0, where they finish the softmax.
    fn end_with(&self, last: Range<usize>, program: &mut RankPlan) {
        for round in &mut program.rounds {
            let finishes = |task: &Task| matches!(task, Task::Finish { .. });
            round.before.retain(|task| !finishes(task));
        }
        let jobs = &mut program.rounds[0].meanwhile;
        let forward = |task: &Task| matches!(task, Task::Forward { .. });
        let indices = (0..jobs.len()).filter(|&index| forward(&jobs[index]));
        let moved: Vec<usize> = indices.skip(last.start).take(last.len()).collect();
        let ends = moved.iter().filter_map(|&index| match &jobs[index] {
            Task::Forward { job, q, k, v, .. } => {
                Some(self.task((job.clone(), *q, *k, *v), false, true))
            }
            _ => None,
        });
        let ends: Vec<Task> = ends.collect();
        let mut index = 0..;
        jobs.retain(|_| !index.next().is_some_and(|index| moved.contains(&index)));
        jobs.extend(ends);
        while program.rounds.last().is_some_and(is_idle) && program.rounds.len() > 1 {
            program.rounds.pop();
        }
    }

    /// Rewrites one round: removes fills (and finishes, if `ends`), and lets jobs begin (and end)
    /// cells.
    fn rewrite(&self, number: usize, round: &mut Round, cells: &CellRuns, ends: bool) {
        round.before.retain(|task| match task {
            Task::Fill { buffer, .. } => !self.has(*buffer),
            Task::Finish { .. } => !ends,
            _ => true,
        });
        let before: usize = cells.runs.iter().filter(|(of, _)| *of < number).count();
        let mut indices = before..;
        let mut tasks = Vec::with_capacity(round.meanwhile.len());
        for task in round.meanwhile.drain(..) {
            let Task::Forward { job, q, k, v, .. } = &task else {
                tasks.push(task);
                continue;
            };
            let index = indices.next().unwrap_or(before);
            for (rows, starts, last) in cells.spans(index, ends) {
                let job = job.of_queries(rows);
                tasks.push(self.task((job, *q, *k, *v), starts, last));
            }
        }
        round.meanwhile = tasks;
    }

    fn task(
        &self,
        (job, q, k, v): (Job, BufferId, BufferId, BufferId),
        starts: bool,
        ends: bool,
    ) -> Task {
        let (carry, out, lse) = (self.carry, self.out, self.lse);
        match (starts, ends) {
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
            (starts, false) => Task::Forward {
                job,
                q,
                k,
                v,
                starts,
                carry,
            },
        }
    }
}

/// The runs of rows whose cells a job has, all heads of each, in every batch entry; None if it has
/// other cells. There are `cells` in all.
fn dense_runs(job: &Job, cells: usize) -> Option<Vec<Range<usize>>> {
    /// Of more segments no runs are listed.
    const MOST: usize = 1 << 16;
    let of = &job.cells;
    let mut heads = of.heads.to_vec();
    heads.sort_unstable();
    let first = *heads.first()?;
    let whole_rows = heads.len() == of.row
        && heads.iter().enumerate().all(|(i, head)| head - first == i)
        && (of.offset + first).is_multiple_of(of.row)
        && (job.segments == 1 || of.segment.is_multiple_of(of.row))
        && (job.batch == 1 || of.batch == cells / job.batch);
    let start = |segment: usize| (of.offset + first + segment * of.segment) / of.row;
    let runs = (0..job.segments).map(|segment| start(segment)..start(segment) + job.queries);
    (whole_rows && job.segments <= MOST).then(|| runs.collect())
}

/// The run of rows of each job, in execution order, with its round.
struct CellRuns {
    runs: Vec<(usize, Range<usize>)>,
}

/// Some rows of a job, whether it is their first job, and whether it is their last one.
type RowSpan = (Range<usize>, bool, bool);

impl CellRuns {
    /// Whether each of the first `rows` rows is in a run.
    fn cover(&self, rows: usize) -> bool {
        self.cut(0..rows)
            .all(|span| self.containing(&span).next().is_some())
    }

    /// Whether the first job of every row is in this round.
    fn all_begin_in(&self, round: usize) -> bool {
        let rows = self.runs.iter().map(|(_, run)| run.end).max();
        self.cut(0..rows.unwrap_or(0)).all(|span| {
            let first = self.containing(&span).next();
            first.is_some_and(|index| self.runs[index].0 == round)
        })
    }

    /// The indices of the runs that contain a span.
    fn containing(&self, span: &Range<usize>) -> impl Iterator<Item = usize> {
        let has = |run: &Range<usize>| run.start <= span.start && span.end <= run.end;
        let runs = self.runs.iter().enumerate();
        runs.filter(move |(_, (_, run))| has(run))
            .map(|(index, _)| index)
    }

    /// Rows cut wherever a run begins or ends.
    fn cut(&self, rows: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let ends = self.runs.iter().flat_map(|(_, run)| [run.start, run.end]);
        let mut cuts: BTreeSet<usize> = ends.filter(|cut| rows.contains(cut)).collect();
        cuts.extend([rows.start, rows.end]);
        let cuts: Vec<usize> = cuts.into_iter().collect();
        (1..cuts.len()).map(move |i| cuts[i - 1]..cuts[i])
    }

    /// The job with this index, cut between rows that begin or end in it and rows that do not.
    /// Rows count from the job's first one.
    fn spans(&self, index: usize, ends: bool) -> Vec<RowSpan> {
        let run = &self.runs[index].1;
        let mut spans: Vec<RowSpan> = Vec::new();
        for rows in self.cut(run.clone()) {
            let starts = self.containing(&rows).next() == Some(index);
            let last = ends && self.containing(&rows).last() == Some(index);
            let rows = rows.start - run.start..rows.end - run.start;
            match spans.last_mut() {
                Some(span) if (span.1, span.2) == (starts, last) => span.0.end = rows.end,
                _ => spans.push((rows, starts, last)),
            }
        }
        spans
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::pattern::{MixingGradient, Mode, OffsetRule, Pattern};
    use crate::plan::{Plan, Request};
    use crate::shape::Shape;
    use crate::sharding::{Cut, Sharding};

    fn request(ranks: usize, cut: Cut, causal: bool) -> Request {
        let shape = Shape::new(1, 64, 2, 1, 4).expect("a shape");
        let sharding = Sharding::new(ranks, cut).expect("a sharding");
        Request::new(shape, Pattern::dense().causal(causal), sharding, DType::F32)
    }

    /// Counts of tasks in a program: fills and finishes; jobs that begin cells, continue them, end
    /// them; jobs that are both first and last.
    fn kinds(request: &Request, rank: usize) -> [usize; 5] {
        let plan = Plan::new(request.clone()).expect("a plan");
        let mut kinds = [0; 5];
        for round in plan.rank(rank).expect("a rank").rounds {
            for task in round.before.iter().chain(&round.meanwhile) {
                match task {
                    Task::Fill { .. } | Task::Finish { .. } => kinds[0] += 1,
                    Task::Forward { starts: true, .. } => kinds[1] += 1,
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
    fn a_zigzag_job_is_split_where_it_is_the_last_for_half_of_its_rows() {
        let zigzag = request(4, Cut::Zigzag, true);
        // The first rank's first half sees only itself. The first halves of the other ranks end
        // with the first half of rank 0, in a job that the second halves continue from, unless it
        // is their last job too.
        let expected = [
            [0, 1, 5, 1, 1],
            [0, 1, 4, 2, 0],
            [0, 1, 3, 2, 0],
            [0, 1, 2, 1, 0],
        ];
        for (rank, expected) in expected.into_iter().enumerate() {
            assert_eq!(kinds(&zigzag, rank), expected, "rank {rank}");
        }
        // All of a causal ring's first rank sees only itself.
        assert_eq!(
            kinds(&request(4, Cut::Contiguous, true), 0),
            [0, 0, 0, 0, 1]
        );
    }

    #[test]
    fn a_branch_with_every_cell_finishes_those_of_all_branches() {
        let mode = Mode::Mix {
            offsets: OffsetRule::HeadMod,
            gradient: MixingGradient::Exact,
        };
        let kinds_of = |lengths: &[usize], rates: &[usize], redundancy: usize| {
            let pattern = Pattern::dilated(lengths, rates, mode).expect("a pattern");
            let shape = Shape::new(2, 60, 4, 2, 4).expect("a shape");
            let sharding = Sharding::contiguous(1 + redundancy).expect("ranks");
            let request = Request {
                redundancy,
                ..Request::new(shape, pattern, sharding, DType::F32)
            };
            kinds(&request, 0)
        };
        // Segments of 16 tokens and a last one of 12; four phases of 15 tokens.
        assert_eq!(kinds_of(&[16, 60], &[1, 4], 0), [3, 0, 1, 2, 0]);
        assert_eq!(kinds_of(&[60, 16], &[4, 1], 0), [3, 0, 1, 2, 0]);
        // Of two such branches it is the last one.
        assert_eq!(kinds_of(&[16, 30, 60], &[1, 1, 4], 0), [3, 0, 3, 1, 0]);
        // None has every cell.
        let filled = kinds_of(&[16, 60], &[2, 4], 0);
        assert_eq!((filled[0], filled[3]), (4, 0));
        // A carry that a continuation needs stays.
        let kept = kinds_of(&[16, 60], &[1, 4], 1);
        assert_eq!(kept[3], 0);
    }

    #[test]
    fn a_resumable_program_keeps_its_carry() {
        let kept = Request {
            redundancy: 1,
            ..request(4, Cut::Zigzag, true)
        };
        for rank in 0..4 {
            assert_eq!(kinds(&kept, rank), [1, 1, 6 - rank, 0, 0], "rank {rank}");
        }
    }

    #[test]
    fn a_split_job_has_the_pairs_of_the_whole() {
        let plan = Plan::new(request(1, Cut::Contiguous, true)).expect("a plan");
        let program = plan.rank(0).expect("a rank");
        let job = program.jobs().next().expect("a job");
        let (low, high) = (job.of_queries(0..20), job.of_queries(20..64));
        assert_eq!(low.pairs() + high.pairs(), job.pairs());
        for (part, first) in [(&low, 0), (&high, 20)] {
            for i in 0..part.queries {
                assert_eq!(part.visible(i), job.visible(first + i));
                assert_eq!(part.q.at(0, 0, i, 1), job.q.at(0, 0, first + i, 1));
                assert_eq!(part.cells.at(0, 0, i, 1), job.cells.at(0, 0, first + i, 1));
            }
        }
    }
}
