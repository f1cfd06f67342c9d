//! A program under construction: buffers, ports and rounds of one rank.
//!
//! The forward and backward programs, the rotation of parcels and the reduction of sums all add
//! tasks and messages through this type, each in an `impl ProgramBuilder` of its own file.

use super::layout::Resident;
use super::position::{RingPosition, TAGS};
use super::program::{
    BufferId, BufferPlan, CarryIds, Component, Fill, Message, Port, RankPlan, Role, Round, Task,
};
use super::rings::Parcel;
use super::schedule::Schedule;
use super::topology::Plan;
use super::width::Width;
use crate::dtype::DType;
use crate::job::{Block, Job};
use crate::sharding::Run;

/// The buffers, ports and rounds of one rank's program.
pub(super) struct ProgramBuilder<'a> {
    pub plan: &'a Plan,
    pub rank: usize,
    /// This rank's keys.
    pub rows: usize,
    /// This rank's queries.
    pub query_rows: usize,
    buffers: Vec<BufferPlan>,
    rounds: Vec<Round>,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
}

impl<'a> ProgramBuilder<'a> {
    pub fn new(plan: &'a Plan, rank: usize) -> ProgramBuilder<'a> {
        ProgramBuilder {
            plan,
            rank,
            rows: plan.shards.rows(rank),
            query_rows: plan.shards.query_rows(rank),
            buffers: Vec::new(),
            rounds: vec![Round::default()],
            inputs: Vec::new(),
            outputs: Vec::new(),
        }
    }

    /// The program, with adjacent jobs joined.
    pub fn finish(mut self) -> RankPlan {
        self.join();
        self.program()
    }

    /// The program, with adjacent jobs joined and local work moved to overlap the last messages.
    /// The round in which sums return to their owners has no jobs of its own, so half of the rank's
    /// attention to itself, which depends on no message, is deferred to it.
    pub fn finish_balanced(mut self) -> RankPlan {
        self.join();
        let idle = |round: &Round| {
            let exchanges = !round.sends.is_empty() || !round.receives.is_empty();
            exchanges && round.meanwhile.is_empty()
        };
        if let Some(last) = self.rounds.iter().rposition(idle).filter(|last| *last > 0) {
            let local = std::mem::take(&mut self.rounds[0].meanwhile);
            let (now, later) = halves(local);
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

    /// The round with this number; creates it and all earlier rounds as needed.
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

    /// Plans a buffer.
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

    /// Plans a buffer `[batch, rows, width]`.
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

    /// Plans replicas of the inputs of each of `shards`, named as their owners name them.
    pub fn replicas(&mut self, shards: impl Iterator<Item = usize>) {
        let rank = self.rank;
        for shard in shards {
            self.rank = shard;
            for (role, name, dtype, width) in self.plan.inputs() {
                let runs = match width.is_of_keys() {
                    true => self.runs_of(shard),
                    false => self.query_runs_of(shard),
                };
                let rows = runs.iter().map(|run| run.count).sum();
                let buffer = self.resident(name, Component::Replica, dtype, rows, width);
                self.input(role, buffer, runs);
            }
        }
        self.rank = rank;
    }

    /// Plans a carry for `[batch, rows]`.
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

    /// The buffers of this rank's inputs with these roles, in their order.
    pub fn query_inputs<X, Y, Z>(&self, tensors: &[(Role, X, Y, Z)]) -> Vec<BufferId> {
        let buffer = |role: Role| {
            let mut ports = self.inputs.iter();
            let port = ports.find(|port| port.role == role);
            port.expect("the tensors that travel are inputs").buffer
        };
        tensors.iter().map(|of| buffer(of.0)).collect()
    }

    /// The keys of one rank by token, in the order of its rows.
    pub fn runs_of(&self, rank: usize) -> Vec<Run> {
        let with_base = self.plan.shards.runs(rank);
        with_base.iter().map(|&(run, _)| run).collect()
    }

    /// The queries of one rank by index in q, in the order of its rows.
    pub fn query_runs_of(&self, rank: usize) -> Vec<Run> {
        self.plan.request.query_runs(rank)
    }

    /// The queries of all ranks, shard after shard: the row order of replicated buffers.
    pub fn all_query_runs(&self) -> Vec<Run> {
        (0..self.plan.ranks())
            .flat_map(|rank| self.query_runs_of(rank))
            .collect()
    }

    /// This rank's rows in a buffer that holds nothing else.
    pub fn own(&self, width: Width) -> Resident {
        let rows = match width.is_of_keys() {
            true => self.rows,
            false => self.query_rows,
        };
        Resident { rows, base: 0 }
    }

    /// The queries of `rank` in a buffer that holds those of all ranks.
    pub fn among_all(&self, rank: usize) -> Resident {
        Resident {
            rows: self.plan.request.shape.queries,
            base: (0..rank)
                .map(|earlier| self.plan.shards.query_rows(earlier))
                .sum(),
        }
    }

    /// This rank's positions in its rings, with the plan's schedule or with another. A schedule of
    /// two levels is the plan's own.
    pub fn positions(&self, schedule: Schedule) -> Vec<RingPosition<'a>> {
        let (plan, width) = (self.plan, schedule.width);
        let position = |&(index, member): &(usize, usize)| {
            let ring = &plan.rings[index];
            RingPosition {
                index,
                ring,
                member,
                width: ring.width(width),
                nodes: (schedule.node > 1).then(|| plan.node_ring(index)).flatten(),
                tags: (plan.rings.len() + 1) * TAGS,
            }
        };
        plan.rings_of[self.rank].iter().map(position).collect()
    }

    /// Elements of the largest of some parcels.
    pub fn largest<'p>(&self, parcels: impl Iterator<Item = &'p Parcel>, width: Width) -> usize {
        let elements = parcels.map(|parcel| self.plan.parcel_elements(parcel, width));
        elements.max().unwrap_or(0)
    }

    /// Tasks that reset a carry to "no key seen".
    pub fn clear_carry(&mut self, round: usize, carry: CarryIds) {
        for (buffer, value) in [
            (carry.acc, Fill::Zero),
            (carry.m, Fill::MinusInfinity),
            (carry.l, Fill::Zero),
        ] {
            self.fill(round, buffer, value);
        }
    }

    pub fn fill(&mut self, round: usize, buffer: BufferId, value: Fill) {
        let task = Task::Fill { buffer, value };
        self.round(round).before.push(task);
    }

    pub fn copy(
        &mut self,
        round: usize,
        blocks: Vec<Block>,
        add: bool,
        from: BufferId,
        to: BufferId,
    ) {
        self.round(round).before.push(Task::Copy {
            blocks,
            add,
            from,
            to,
        });
    }

    /// Packs a parcel. Blocks that are adjacent in both buffers become one.
    pub fn pack(&mut self, round: usize, blocks: Vec<Block>, from: BufferId, to: BufferId) {
        let mut joined: Vec<Block> = Vec::new();
        for block in blocks {
            match joined.last().and_then(|last| last.join_rows(&block)) {
                Some(both) => *joined.last_mut().expect("joined with the last block") = both,
                None => joined.push(block),
            }
        }
        let blocks = joined;
        let task = Task::Pack { blocks, from, to };
        self.round(round).before.push(task);
    }

    pub fn send(&mut self, round: usize, message: Message) {
        self.round(round).sends.push(message);
    }

    pub fn receive(&mut self, round: usize, message: Message) {
        self.round(round).receives.push(message);
    }
}

/// Splits tasks where half of the pairs are done. A job across that point is cut in the middle of
/// its queries.
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

/// How many earlier tasks are considered for joining: the jobs of one shard are adjacent in the
/// list.
const WINDOW: usize = 4;

/// Joins tasks to earlier ones of the same round where `join_jobs` can join their jobs. Tasks of a
/// round do not depend on one another, so reordering them is safe.
fn join(tasks: &mut Vec<Task>, join_jobs: fn(&Job, &Job) -> Option<Job>) {
    let mut done: Vec<Task> = Vec::with_capacity(tasks.len());
    for task in tasks.drain(..) {
        let start = done.len().saturating_sub(WINDOW);
        let found = done[start..].iter().enumerate().find_map(|(i, earlier)| {
            let job = join_jobs(earlier.job()?, task.job()?)?;
            Some((start + i, earlier.joined(&task, job)?))
        });
        match found {
            Some((index, joined)) => done[index] = joined,
            None => done.push(task),
        }
    }
    *tasks = done;
}
