//! A program under construction.

use super::Plan;
use super::layout::{Resident, Width};
use super::program::{
    BufferId, BufferPlan, CarryIds, Component, Fill, Port, RankPlan, Role, Round, Task,
};
use crate::dtype::DType;
use crate::job::Job;
use crate::sharding::Run;

/// The buffers and rounds of one rank as they are put together.
pub(super) struct Builder<'a> {
    pub plan: &'a Plan,
    pub rank: usize,
    /// Rows of this rank's shard.
    pub rows: usize,
    buffers: Vec<BufferPlan>,
    rounds: Vec<Round>,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
}

impl<'a> Builder<'a> {
    pub fn new(plan: &'a Plan, rank: usize) -> Builder<'a> {
        Builder {
            plan,
            rank,
            rows: plan.shards.rows(rank),
            buffers: Vec::new(),
            rounds: vec![Round::default()],
            inputs: Vec::new(),
            outputs: Vec::new(),
        }
    }

    /// The program. Jobs that lie side by side have become one.
    pub fn finish(mut self) -> RankPlan {
        self.join();
        self.program()
    }

    /// The same where sums come home in the end: they would travel while nobody computes, so half of
    /// what the rank has to do with itself, which could be done at any time, waits for that round.
    pub fn finish_at_home(mut self) -> RankPlan {
        self.join();
        let idle = |round: &Round| {
            let travels = !round.sends.is_empty() || !round.receives.is_empty();
            travels && round.meanwhile.is_empty()
        };
        if let Some(last) = self.rounds.iter().rposition(idle).filter(|last| *last > 0) {
            let own = std::mem::take(&mut self.rounds[0].meanwhile);
            let (now, later) = halves(own);
            self.rounds[0].meanwhile = now;
            self.rounds[last].meanwhile = later;
        }
        self.program()
    }

    fn join(&mut self) {
        for round in &mut self.rounds {
            join(&mut round.meanwhile, Job::join_keys);
            join(&mut round.meanwhile, Job::join_queries);
        }
    }

    fn program(self) -> RankPlan {
        RankPlan {
            rank: self.rank,
            rows: self.rows,
            buffers: self.buffers,
            inputs: self.inputs,
            rounds: self.rounds,
            outputs: self.outputs,
        }
    }

    /// The round with this number; earlier ones come into being with it.
    pub fn round(&mut self, round: usize) -> &mut Round {
        if self.rounds.len() <= round {
            self.rounds.resize_with(round + 1, Round::default);
        }
        &mut self.rounds[round]
    }

    /// The number of the round after the last one.
    pub fn next_round(&self) -> usize {
        self.rounds.len()
    }

    pub fn buffer(
        &mut self,
        name: &'static str,
        component: Component,
        dtype: DType,
        elements: usize,
    ) -> BufferId {
        self.buffers.push(BufferPlan {
            name,
            component,
            shard: self.rank,
            dtype,
            elements,
        });
        BufferId(self.buffers.len() - 1)
    }

    /// A buffer `[batch, rows, width]`.
    pub fn resident(
        &mut self,
        name: &'static str,
        component: Component,
        dtype: DType,
        rows: usize,
        width: Width,
    ) -> BufferId {
        let elements = self.plan.request.shape.batch * rows * self.plan.resident_width(width);
        self.buffer(name, component, dtype, elements)
    }

    /// Room for the inputs of each of `shards`, under the names that their own ranks give them.
    pub fn replicas(&mut self, shards: impl Iterator<Item = usize>) {
        let rank = self.rank;
        for shard in shards {
            self.rank = shard;
            let (rows, runs) = (self.plan.shards.rows(shard), self.runs_of(shard));
            for (role, name, dtype, width) in self.plan.inputs() {
                let buffer = self.resident(name, Component::Replica, dtype, rows, width);
                self.input(role, buffer, runs.clone());
            }
        }
        self.rank = rank;
    }

    /// A carry for `[batch, rows]`.
    pub fn carry(&mut self, component: Component, rows: usize) -> CarryIds {
        let sum = self.plan.request.dtype.sum();
        CarryIds {
            acc: self.resident("acc", component, sum, rows, Width::WideCell),
            m: self.resident("m", component, sum, rows, Width::Cell),
            l: self.resident("l", component, sum, rows, Width::Cell),
        }
    }

    pub fn input(&mut self, role: Role, buffer: BufferId, runs: Vec<Run>) {
        self.inputs.push(Port { role, buffer, runs });
    }

    pub fn output(&mut self, role: Role, buffer: BufferId, runs: Vec<Run>) {
        self.outputs.push(Port { role, buffer, runs });
    }

    /// The tokens of one rank, in the order of its rows.
    pub fn runs_of(&self, rank: usize) -> Vec<Run> {
        let with_base = self.plan.shards.runs(rank);
        with_base.iter().map(|&(run, _)| run).collect()
    }

    /// The tokens of all ranks, shard after shard: the row order of replicated buffers.
    pub fn all_runs(&self) -> Vec<Run> {
        (0..self.plan.ranks())
            .flat_map(|rank| self.runs_of(rank))
            .collect()
    }

    /// This rank's shard in a buffer that holds nothing else.
    pub fn own(&self) -> Resident {
        Resident {
            rows: self.rows,
            base: 0,
        }
    }

    /// The shard of `rank` in a buffer that holds all shards.
    pub fn among_all(&self, rank: usize) -> Resident {
        Resident {
            rows: self.plan.request.shape.tokens,
            base: (0..rank)
                .map(|earlier| self.plan.shards.rows(earlier))
                .sum(),
        }
    }

    /// Tasks that make a carry empty.
    pub fn clear_carry(&mut self, round: usize, carry: CarryIds) {
        for (buffer, value) in [
            (carry.acc, Fill::Zero),
            (carry.m, Fill::MinusInfinity),
            (carry.l, Fill::Zero),
        ] {
            self.round(round).before.push(Task::Fill { buffer, value });
        }
    }
}

/// Tasks in two parts, split where half of the work is done; a job that lies across that place is cut in
/// the middle of its queries.
fn halves(tasks: Vec<Task>) -> (Vec<Task>, Vec<Task>) {
    let pairs = |task: &Task| task.job().map_or(0, Job::pairs);
    let all: u128 = tasks.iter().map(pairs).sum();
    let (mut now, mut later) = (Vec::new(), Vec::new());
    let mut before = 0;
    for task in tasks {
        let own = pairs(&task);
        match (2 * before >= all, 2 * (before + own) <= all) {
            (true, _) => later.push(task),
            (false, true) => now.push(task),
            (false, false) => {
                let cut = task.job().and_then(Job::halves);
                let cut = cut.and_then(|(low, high)| Some((task.with(low)?, task.with(high)?)));
                match cut {
                    Some((low, high)) => {
                        now.push(low);
                        later.push(high);
                    }
                    None => now.push(task),
                }
            }
        }
        before += own;
    }
    (now, later)
}

/// How far back a task looks for one to be joined to: the pieces of a shard come together.
const WINDOW: usize = 4;

/// Joins tasks to earlier ones of the same round where `pair` says that their jobs are one. Tasks of
/// a round do not depend on one another, so the order does not matter.
fn join(tasks: &mut Vec<Task>, pair: fn(&Job, &Job) -> Option<Job>) {
    let mut done: Vec<Task> = Vec::with_capacity(tasks.len());
    for task in tasks.drain(..) {
        let from = done.len().saturating_sub(WINDOW);
        let found = done[from..].iter().enumerate().find_map(|(at, earlier)| {
            let job = pair(earlier.job()?, task.job()?)?;
            Some((from + at, earlier.joined(&task, job)?))
        });
        match found {
            Some((at, joined)) => done[at] = joined,
            None => done.push(task),
        }
    }
    *tasks = done;
}
