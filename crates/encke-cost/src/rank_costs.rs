//! The cost of each rank's program on a device, as a short list of times and bytes.
//!
//! The decision here: a program is reduced to costs as soon as it is built, and dropped. The costs
//! of a dense ring of 1024 ranks are a million rounds of a few dozen bytes each; the programs would
//! take gigabytes. Messages of one round between the same two ranks are one transfer: both ends
//! post them together, and both plans put them in the same round, which [`check_transfers`]
//! asserts.

use encke_core::host;
use encke_core::job::{Block, Job};
use encke_core::plan::Plan;
use encke_core::plan::program::{Message, Port, RankPlan, Task};
use encke_core::{DType, Shape};

use crate::error::CostError;
use crate::job_costs::{
    diagonal_pairs, flops_per_pair, has_few_instances, instances, is_strided, longest_task,
    row_bytes, tiled_pairs,
};
use crate::machine::{DeviceModel, Machine, Rate};

/// The time of some tasks on a device that does nothing else.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct TaskTime {
    /// Launch latency: it occupies nothing.
    pub delay_s: f64,
    /// On the rank's own thread.
    pub thread_s: f64,
    /// On the workers, if the tasks could use all of them.
    pub workers_s: f64,
    /// On as many of the workers as the tasks can use.
    pub limited_s: f64,
}

impl TaskTime {
    /// Adds a task that takes `seconds` on all workers and can use this share of them.
    fn add_on_workers(&mut self, seconds: f64, share: f64) {
        self.workers_s += seconds;
        self.limited_s += seconds / share;
    }

    /// The mean share of the workers that the tasks can use.
    pub fn worker_share(&self) -> f64 {
        match self.limited_s > 0.0 {
            true => self.workers_s / self.limited_s,
            false => 1.0,
        }
    }
}

/// Everything that a rank sends to, or receives from, one peer in a round.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PeerBytes {
    pub peer: u32,
    pub bytes: u64,
}

/// The costs of one round.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct RoundCost {
    pub before: TaskTime,
    pub meanwhile: TaskTime,
    /// The end of this round's range in the rank's list of sends; the previous round's end begins
    /// it.
    pub sends_end: u32,
    /// The same for receives.
    pub receives_end: u32,
}

/// The costs of one rank's program.
#[derive(Debug, Clone, Default)]
pub(crate) struct RankCosts {
    pub load: TaskTime,
    pub rounds: Vec<RoundCost>,
    sends: Vec<PeerBytes>,
    receives: Vec<PeerBytes>,
    /// Floating-point operations of its jobs.
    pub flops: f64,
    /// The time of these operations at the device's FLOP/s.
    pub arithmetic_s: f64,
}

impl RankCosts {
    /// What it sends in a round.
    pub fn sends(&self, round: usize) -> &[PeerBytes] {
        let begin = round
            .checked_sub(1)
            .map_or(0, |before| self.rounds[before].sends_end);
        &self.sends[begin as usize..self.rounds[round].sends_end as usize]
    }

    /// What it receives in a round.
    pub fn receives(&self, round: usize) -> &[PeerBytes] {
        let begin = round
            .checked_sub(1)
            .map_or(0, |before| self.rounds[before].receives_end);
        &self.receives[begin as usize..self.rounds[round].receives_end as usize]
    }

    fn new(plan: &RankPlan, model: &CostModel<'_>) -> RankCosts {
        let mut costs = RankCosts::default();
        let bytes = |port: &Port| plan.buffers[port.buffer.0].bytes();
        if let Some(speed) = model.device.load_bytes_per_s {
            let copied = plan.inputs.iter().filter(|port| !model.is_contiguous(port));
            costs.load.thread_s = copied.map(bytes).sum::<usize>() as f64 / speed;
        }
        if let Some(speed) = model.device.allocate_bytes_per_s {
            let is_whole =
                |port: &&Port| host::whole_run(&port.runs) == Some((0, model.shape.tokens));
            let handed_over = plan.outputs.iter().filter(is_whole);
            costs.load.thread_s += handed_over.map(bytes).sum::<usize>() as f64 / speed;
        }
        for round in &plan.rounds {
            let mut time = |tasks: &[Task]| {
                let mut time = TaskTime::default();
                for task in tasks {
                    model.add(plan, task, &mut time);
                    if let Some((flops, rate)) = model.flops(task) {
                        costs.flops += flops;
                        costs.arithmetic_s += flops / rate;
                    }
                }
                time
            };
            let (before, meanwhile) = (time(&round.before), time(&round.meanwhile));
            add_messages(plan, &round.sends, &mut costs.sends);
            add_messages(plan, &round.receives, &mut costs.receives);
            costs.rounds.push(RoundCost {
                before,
                meanwhile,
                sends_end: costs.sends.len() as u32,
                receives_end: costs.receives.len() as u32,
            });
        }
        costs
    }
}

/// Appends the messages of a round, summed by peer.
fn add_messages(plan: &RankPlan, messages: &[Message], peers: &mut Vec<PeerBytes>) {
    let begin = peers.len();
    for message in messages {
        let (peer, bytes) = (
            message.address.peer as u32,
            plan.message_bytes(message) as u64,
        );
        match peers[begin..].iter_mut().find(|of| of.peer == peer) {
            Some(of) => of.bytes += bytes,
            None => peers.push(PeerBytes { peer, bytes }),
        }
    }
}

/// The costs of all ranks, computed on all cores.
pub(crate) fn rank_costs(plan: &Plan, machine: &Machine) -> Result<Vec<RankCosts>, CostError> {
    let request = plan.request();
    let model = CostModel {
        device: &machine.device,
        rate: machine.device.rate(request.dtype, request.shape.dim)?,
        dtype: request.dtype,
        shape: request.shape,
        in_ring: plan.ranks() > 1,
    };
    let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let share = plan.ranks().div_ceil(threads).max(1);
    let of = |ranks: std::ops::Range<usize>| -> Result<Vec<RankCosts>, CostError> {
        ranks
            .map(|rank| Ok(RankCosts::new(&plan.rank(rank)?, &model)))
            .collect()
    };
    let parts = std::thread::scope(|scope| {
        let starts = (0..plan.ranks()).step_by(share);
        let parts: Vec<_> = starts
            .map(|first| {
                let ranks = first..(first + share).min(plan.ranks());
                scope.spawn(|| of(ranks))
            })
            .collect();
        let join = |part: std::thread::ScopedJoinHandle<'_, _>| match part.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        parts
            .into_iter()
            .map(join)
            .collect::<Result<Vec<Vec<RankCosts>>, _>>()
    })?;
    let ranks: Vec<RankCosts> = parts.into_iter().flatten().collect();
    check_transfers(&ranks);
    Ok(ranks)
}

/// Asserts that every send has its receive in the same round; the simulation would stall otherwise.
fn check_transfers(ranks: &[RankCosts]) {
    for (from, rank) in ranks.iter().enumerate() {
        for round in 0..rank.rounds.len() {
            for sent in rank.sends(round) {
                let receiver = &ranks[sent.peer as usize];
                let is_received = round < receiver.rounds.len()
                    && receiver.receives(round).contains(&PeerBytes {
                        peer: from as u32,
                        bytes: sent.bytes,
                    });
                assert!(
                    is_received,
                    "rank {} does not receive the {} bytes that rank {from} sends in round {round}",
                    sent.peer, sent.bytes
                );
            }
        }
    }
    let sent: usize = ranks.iter().map(|rank| rank.sends.len()).sum();
    let received: usize = ranks.iter().map(|rank| rank.receives.len()).sum();
    assert_eq!(sent, received, "every send has one receive");
}

/// The cost of tasks on a device in one dtype.
struct CostModel<'a> {
    device: &'a DeviceModel,
    rate: &'a Rate,
    dtype: DType,
    shape: Shape,
    /// Whether there is more than one rank.
    in_ring: bool,
}

impl CostModel<'_> {
    /// Whether an input's rows are contiguous in the caller's tensor, so that they are read in
    /// place.
    fn is_contiguous(&self, port: &Port) -> bool {
        let run = host::whole_run(&port.runs);
        run.is_some_and(|(_, count)| self.shape.batch == 1 || count == self.shape.tokens)
    }

    /// The operations of a job, and the device's FLOP/s for it.
    fn flops(&self, task: &Task) -> Option<(f64, f64)> {
        let (job, backward, rate) = match task {
            Task::Forward { job, .. } | Task::Conclude { job, .. } | Task::Attend { job, .. } => {
                (job, false, self.rate.forward.flops)
            }
            Task::Backward { job, .. } => (job, true, self.rate.backward.flops),
            _ => return None,
        };
        let each = u128::from(flops_per_pair(backward));
        Some(((job.pairs() * each * job.dim as u128) as f64, rate))
    }

    fn add(&self, plan: &RankPlan, task: &Task, time: &mut TaskTime) {
        let stored = |id: usize| plan.buffers[id].dtype.bytes();
        let sum = self.dtype.sum().bytes();
        match task {
            Task::Fill { buffer, .. } => {
                time.add_on_workers(self.cells(plan.buffers[buffer.0].bytes()), 1.0);
            }
            Task::Copy {
                blocks,
                add,
                from,
                to,
            } => {
                let each = stored(from.0) + stored(to.0) * (1 + usize::from(*add));
                time.thread_s += self.copies(blocks, each, *add);
            }
            Task::Pack { blocks, from, to } => {
                time.thread_s += self.copies(blocks, stored(from.0) + stored(to.0), false);
            }
            Task::Merge { blocks, .. } => {
                // Two softmax states are read and one is written: acc, m and l of each cell.
                let cells = |block: &Block| block.elements() / block.width.max(1);
                let of = |block: &Block| 3 * sum * (block.elements() + 2 * cells(block));
                let bytes: usize = blocks.iter().map(of).sum();
                time.thread_s += self.cells(bytes);
            }
            Task::Finish {
                cells, dim, out, ..
            } => {
                let bytes = cells * (dim * (sum + stored(out.0)) + 3 * sum);
                time.add_on_workers(self.cells(bytes), 1.0);
            }
            Task::Delta {
                cells,
                dim,
                out,
                dout,
                ..
            } => {
                let each = dim * (stored(out.0) + stored(dout.0)) + sum;
                time.add_on_workers(self.cells(cells * each), 1.0);
            }
            Task::Forward { job, .. } | Task::Conclude { job, .. } | Task::Attend { job, .. } => {
                self.job(job, false, time)
            }
            Task::Backward { job, .. } => self.job(job, true, time),
        }
    }

    /// The time of a copy task that moves `each` bytes for each element.
    fn copies(&self, blocks: &[Block], each: usize, add: bool) -> f64 {
        let copy = |block: &Block| self.copy(block, block.elements() * each, add);
        self.device.task_overhead_s + blocks.iter().map(copy).sum::<f64>()
    }

    fn copy(&self, block: &Block, bytes: usize, add: bool) -> f64 {
        let device = self.device;
        let mut seconds = bytes as f64 / device.bytes_per_s;
        let slower = |speed: Option<f64>| speed.map_or(1.0, |speed| device.bytes_per_s / speed);
        if add {
            seconds *= slower(device.add_bytes_per_s);
        }
        let contiguous = block.heads * block.width;
        if block.from.row > contiguous || block.to.row > contiguous {
            seconds *= slower(device.strided_bytes_per_s);
        }
        seconds
    }

    fn cells(&self, bytes: usize) -> f64 {
        self.device.task_overhead_s + bytes as f64 / self.device.cell_bytes_per_s
    }

    /// Adds a job: its launch latency, and its time on as many workers as it has tasks for.
    fn job(&self, job: &Job, backward: bool, time: &mut TaskTime) {
        let speed = match backward {
            true => self.rate.backward,
            false => self.rate.forward,
        };
        let pairs = tiled_pairs(job, speed.tile) + diagonal_pairs(job, speed.diagonal_keys);
        let each = f64::from(flops_per_pair(backward));
        let mut arithmetic_s = pairs * each * job.dim as f64 / speed.flops;
        if has_few_instances(job) {
            arithmetic_s *= 1.0 + speed.few_instances_slowdown;
        }
        if is_strided(job) {
            arithmetic_s *= 1.0 + speed.strided_slowdown;
        }
        let rows_s = row_bytes(job, self.dtype, backward) / speed.row_bytes_per_s;
        let mut seconds = arithmetic_s + rows_s + instances(job) as f64 * speed.instance_s;
        if self.in_ring {
            seconds *= 1.0 + speed.ring_slowdown;
        }
        time.delay_s += self.device.job_overhead_s;
        let longest = longest_task(job, speed.task_rows);
        time.add_on_workers(seconds, speed.worker_share(longest));
    }
}
