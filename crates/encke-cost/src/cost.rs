//! What a program costs on a device: each rank's plan as a short list of numbers.
//!
//! The decision here: a program is turned into costs as soon as it is made, and dropped. The costs of
//! a dense ring of 1024 ranks are a million rounds of a few dozen bytes; the programs would be
//! gigabytes. Messages of one round between the same two ranks are one hop: both ends post them
//! together, and both plans name the same round, which is checked.

use encke_core::host;
use encke_core::job::{Block, Job};
use encke_core::plan::Plan;
use encke_core::plan::program::{Message, Port, RankPlan, Task};
use encke_core::{DType, Shape};

use super::error::ClockError;
use super::machine::{Device, FEW, Machine, Rate};

/// Time of some tasks on a device with nothing else to do.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Work {
    /// Waiting for jobs to be taken up: nobody computes, and others may.
    pub delay_s: f64,
    /// On the rank's own thread.
    pub alone_s: f64,
    /// On all cores of the device, if it could use them all.
    pub spread_s: f64,
    /// The same with as many of the cores as it can use.
    pub least_s: f64,
}

impl Work {
    /// Adds something for the cores that can use so much of them.
    fn spread(&mut self, seconds: f64, share: f64) {
        self.spread_s += seconds;
        self.least_s += seconds / share;
    }

    /// The part of the cores it can use, over all of its time.
    pub fn share(&self) -> f64 {
        match self.least_s > 0.0 {
            true => self.spread_s / self.least_s,
            false => 1.0,
        }
    }
}

/// Everything that one rank sends to, or receives from, another one in a round.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Hop {
    pub peer: u32,
    pub bytes: u64,
}

/// A round as the clock sees it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct RoundCost {
    pub before: Work,
    pub meanwhile: Work,
    /// Where this round's hops end; they begin where those of the round before end.
    pub sends_end: u32,
    pub receives_end: u32,
}

/// A rank's program as the clock sees it.
#[derive(Debug, Clone, Default)]
pub(super) struct Program {
    pub load: Work,
    pub rounds: Vec<RoundCost>,
    sends: Vec<Hop>,
    receives: Vec<Hop>,
    /// Operations of its jobs.
    pub flops: f64,
    /// Time of its jobs if there were nothing but arithmetic.
    pub ideal_s: f64,
}

impl Program {
    /// What it sends in a round.
    pub fn sends(&self, round: usize) -> &[Hop] {
        let begin = round
            .checked_sub(1)
            .map_or(0, |before| self.rounds[before].sends_end);
        &self.sends[begin as usize..self.rounds[round].sends_end as usize]
    }

    /// What it receives in a round.
    pub fn receives(&self, round: usize) -> &[Hop] {
        let begin = round
            .checked_sub(1)
            .map_or(0, |before| self.rounds[before].receives_end);
        &self.receives[begin as usize..self.rounds[round].receives_end as usize]
    }

    fn new(plan: &RankPlan, pricing: &Pricing<'_>) -> Program {
        let mut program = Program::default();
        if let Some(speed) = pricing.device.load_bytes_per_s {
            let copied = plan
                .inputs
                .iter()
                .filter(|port| !pricing.in_one_piece(port));
            let copied = copied.map(|port| plan.buffers[port.buffer.0].bytes());
            program.load.alone_s = copied.sum::<usize>() as f64 / speed;
        }
        if let Some(speed) = pricing.device.fresh_bytes_per_s {
            let all = |port: &&Port| host::whole_run(&port.runs) == Some((0, pricing.shape.tokens));
            let given_away = plan.outputs.iter().filter(all);
            let bytes = given_away.map(|port| plan.buffers[port.buffer.0].bytes());
            program.load.alone_s += bytes.sum::<usize>() as f64 / speed;
        }
        for round in &plan.rounds {
            let mut price = |tasks: &[Task]| {
                let mut work = Work::default();
                for task in tasks {
                    pricing.add(plan, task, &mut work);
                    if let Some((flops, rate)) = pricing.flops(task) {
                        program.flops += flops;
                        program.ideal_s += flops / rate;
                    }
                }
                work
            };
            let (before, meanwhile) = (price(&round.before), price(&round.meanwhile));
            bundle(plan, &round.sends, &mut program.sends);
            bundle(plan, &round.receives, &mut program.receives);
            program.rounds.push(RoundCost {
                before,
                meanwhile,
                sends_end: program.sends.len() as u32,
                receives_end: program.receives.len() as u32,
            });
        }
        program
    }
}

/// Adds the messages of a round to a list, those with one peer as one hop.
fn bundle(plan: &RankPlan, messages: &[Message], hops: &mut Vec<Hop>) {
    let begin = hops.len();
    for message in messages {
        let (peer, bytes) = (
            message.address.peer as u32,
            plan.message_bytes(message) as u64,
        );
        match hops[begin..].iter_mut().find(|hop| hop.peer == peer) {
            Some(hop) => hop.bytes += bytes,
            None => hops.push(Hop { peer, bytes }),
        }
    }
}

/// The costs of all ranks' programs.
pub(super) fn programs(plan: &Plan, machine: &Machine) -> Result<Vec<Program>, ClockError> {
    let request = plan.request();
    let pricing = Pricing {
        device: &machine.device,
        rate: machine.device.rate(request.dtype, request.shape.dim)?,
        dtype: request.dtype,
        shape: request.shape,
        in_ring: plan.ranks() > 1,
    };
    let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let share = plan.ranks().div_ceil(threads).max(1);
    let of = |ranks: std::ops::Range<usize>| -> Result<Vec<Program>, ClockError> {
        ranks
            .map(|rank| Ok(Program::new(&plan.rank(rank)?, &pricing)))
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
            .collect::<Result<Vec<Vec<Program>>, _>>()
    })?;
    let programs: Vec<Program> = parts.into_iter().flatten().collect();
    check(&programs);
    Ok(programs)
}

/// What is sent in a round is received in it, or the clock would wait for ever.
fn check(programs: &[Program]) {
    for (from, program) in programs.iter().enumerate() {
        for round in 0..program.rounds.len() {
            for hop in program.sends(round) {
                let there = &programs[hop.peer as usize];
                let expected = round < there.rounds.len()
                    && there.receives(round).contains(&Hop {
                        peer: from as u32,
                        bytes: hop.bytes,
                    });
                assert!(
                    expected,
                    "rank {} does not expect the {} bytes that rank {from} sends in round {round}",
                    hop.peer, hop.bytes
                );
            }
        }
    }
    let sent: usize = programs.iter().map(|program| program.sends.len()).sum();
    let received: usize = programs.iter().map(|program| program.receives.len()).sum();
    assert_eq!(sent, received, "every hop has two ends");
}

/// A device's price for tasks in one type.
struct Pricing<'a> {
    device: &'a Device,
    rate: &'a Rate,
    dtype: DType,
    shape: Shape,
    /// Whether there is more than one rank.
    in_ring: bool,
}

impl Pricing<'_> {
    /// Whether an input's rows lie as the rank would hold them, so that they are read in place.
    fn in_one_piece(&self, port: &Port) -> bool {
        let run = host::whole_run(&port.runs);
        run.is_some_and(|(_, count)| self.shape.batch == 1 || count == self.shape.tokens)
    }

    /// Operations of a job and how many of them the device does in a second.
    fn flops(&self, task: &Task) -> Option<(f64, f64)> {
        let (job, each, rate) = match task {
            Task::Forward { job, .. } | Task::Conclude { job, .. } | Task::Attend { job, .. } => {
                (job, 4, self.rate.forward.flops)
            }
            Task::Backward { job, .. } => (job, 10, self.rate.backward.flops),
            _ => return None,
        };
        Some(((job.pairs() * each * job.dim as u128) as f64, rate))
    }

    fn add(&self, plan: &RankPlan, task: &Task, work: &mut Work) {
        let stored = |id: usize| plan.buffers[id].dtype.bytes();
        let sum = self.dtype.sum().bytes();
        match task {
            Task::Fill { buffer, .. } => {
                work.spread(self.cells(plan.buffers[buffer.0].bytes()), 1.0);
            }
            Task::Copy {
                blocks,
                add,
                from,
                to,
            } => {
                let each = stored(from.0) + stored(to.0) * (1 + usize::from(*add));
                work.alone_s += self.copies(blocks, each, *add);
            }
            Task::Pack { blocks, from, to } => {
                work.alone_s += self.copies(blocks, stored(from.0) + stored(to.0), false);
            }
            Task::Merge { blocks, .. } => {
                // Two carries are read and one is written: acc, m and l of each cell.
                let cells = |block: &Block| block.elements() / block.width.max(1);
                let of = |block: &Block| 3 * sum * (block.elements() + 2 * cells(block));
                let bytes: usize = blocks.iter().map(of).sum();
                work.alone_s += self.cells(bytes);
            }
            Task::Finish {
                cells, dim, out, ..
            } => {
                let bytes = cells * (dim * (sum + stored(out.0)) + 3 * sum);
                work.spread(self.cells(bytes), 1.0);
            }
            Task::Delta {
                cells,
                dim,
                out,
                dout,
                ..
            } => {
                let each = dim * (stored(out.0) + stored(dout.0)) + sum;
                work.spread(self.cells(cells * each), 1.0);
            }
            Task::Forward { job, .. } | Task::Conclude { job, .. } | Task::Attend { job, .. } => {
                self.job(job, false, work)
            }
            Task::Backward { job, .. } => self.job(job, true, work),
        }
    }

    /// A task of copies, at `each` bytes a number.
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
        let side_by_side = block.heads * block.width;
        if block.from.row > side_by_side || block.to.row > side_by_side {
            seconds *= slower(device.apart_bytes_per_s);
        }
        seconds
    }

    fn cells(&self, bytes: usize) -> f64 {
        self.device.task_overhead_s + bytes as f64 / self.device.cell_bytes_per_s
    }

    /// A job is taken up after a while, and computed on as many cores as it has work for.
    fn job(&self, job: &Job, backward: bool, work: &mut Work) {
        let (speed, each) = match backward {
            true => (self.rate.backward, 10.0),
            false => (self.rate.forward, 4.0),
        };
        let pairs = tiled_pairs(job, speed.tile) + diagonal(job, speed.diagonal_keys);
        let mut arithmetic_s = pairs * each * job.dim as f64 / speed.flops;
        if is_few(job) {
            arithmetic_s *= 1.0 + speed.few_slower;
        }
        if is_apart(job) {
            arithmetic_s *= 1.0 + speed.apart_slower;
        }
        let rows_s = row_bytes(job, self.dtype, backward) / speed.row_bytes_per_s;
        let mut seconds = arithmetic_s + rows_s + singles(job) as f64 * speed.single_s;
        if self.in_ring {
            seconds *= 1.0 + speed.ring_slower;
        }
        work.delay_s += self.device.job_overhead_s;
        work.spread(seconds, speed.share(longest(job, speed.task_rows)));
    }
}

/// Whether a job is few single attentions.
pub(super) fn is_few(job: &Job) -> bool {
    singles(job) < FEW
}

/// Whether a job's rows have gaps between them, as those of a dilated branch have where they are at
/// home: its keys or its queries, whichever have not come as a parcel.
pub(super) fn is_apart(job: &Job) -> bool {
    let row = job.heads * job.dim;
    job.k.row > row || job.q.row > row
}

/// The queries of all single attentions of a job.
pub(super) fn query_rows(job: &Job) -> usize {
    singles(job) * job.queries
}

/// The part of a job that is its longest task, where so many queries of a single attention are one.
/// Under a causal mask the last queries see the most.
pub(super) fn longest(job: &Job, task_rows: f64) -> f64 {
    let tasks = match task_rows > 0.0 {
        true => (job.queries as f64 / task_rows).max(1.0),
        false => return 0.0,
    };
    let of_single = match job.causal {
        Some(_) => 1.0 - (1.0 - 1.0 / tasks).powi(2),
        None => 1.0 / tasks,
    };
    of_single / singles(job).max(1) as f64
}

/// How many single attentions a job is.
pub(super) fn singles(job: &Job) -> usize {
    job.batch * job.segments * job.heads
}

/// The bytes of a job's rows: stored ones read once, sums read and written.
pub(super) fn row_bytes(job: &Job, dtype: DType, backward: bool) -> f64 {
    let (stored, sum) = (dtype.bytes(), dtype.sum().bytes());
    let each = job.batch * job.segments * job.heads * job.dim;
    let (queries, keys) = (job.queries * each, job.keys * each);
    let bytes = match backward {
        // q and dout are read, dq is added to; k and v are read, dk and dv are added to.
        true => queries * (2 * stored + 2 * sum) + keys * (2 * stored + 4 * sum),
        false => queries * (stored + 2 * sum) + keys * 2 * stored,
    };
    bytes as f64
}

/// The pairs of a job that is computed so many queries and keys at a time, with those that are empty.
pub(super) fn tiled_pairs(job: &Job, [queries, keys]: [usize; 2]) -> f64 {
    let part = |rows: usize, of: usize| {
        let all = rows.next_multiple_of(of.max(1));
        all as f64 / rows.max(1) as f64
    };
    job.pairs() as f64 * part(job.queries, queries) * part(job.keys, keys)
}

/// Pairs on the diagonal that are paid for without being seen: never more than the mask hides.
pub(super) fn diagonal(job: &Job, keys: f64) -> f64 {
    if job.causal.is_none() {
        return 0.0;
    }
    let each = (job.batch * job.segments * job.heads) as f64 * job.queries as f64;
    let hidden = each * job.keys as f64 - job.pairs() as f64;
    (each * keys).min(hidden)
}

#[cfg(test)]
mod tests {
    use super::*;
    use encke_core::plan::rings::Rotating;
    use encke_core::plan::{Pass, Request};
    use encke_core::sharding::{Cut, Sharding};
    use encke_core::{MixingGradient, Mode, OffsetRule, Pattern};

    #[test]
    fn tiles_that_are_not_full_cost_as_much_as_full_ones() {
        let shape = Shape::new(1, 85, 2, 2, 64).unwrap();
        let sharding = Sharding::new(1, Cut::Contiguous).unwrap();
        let request = Request::new(shape, Pattern::dense(), sharding, DType::Bf16);
        let program = Plan::new(request).unwrap().rank(0).unwrap();
        let tasks = program.rounds.iter().flat_map(|round| &round.meanwhile);
        let mut jobs = tasks.filter_map(|task| match task {
            Task::Forward { job, .. } | Task::Attend { job, .. } => Some(job),
            _ => None,
        });
        let job = jobs.next().expect("one attention");
        for (tile, rows) in [
            ([1, 1], [85, 85]),
            ([32, 1], [96, 85]),
            ([32, 48], [96, 96]),
            ([128, 85], [128, 85]),
        ] {
            let expected = (2 * rows[0] * rows[1]) as f64;
            assert!((tiled_pairs(job, tile) - expected).abs() < 1e-6, "{tile:?}");
        }
    }

    #[test]
    fn rows_of_a_dilated_branch_have_gaps_whoever_travels() {
        let mode = Mode::Mix {
            offsets: OffsetRule::HeadMod,
            gradient: MixingGradient::Exact,
        };
        for (dilation, expected) in [(1, false), (4, true)] {
            for freight in [Rotating::Keys, Rotating::Queries] {
                let pattern = Pattern::dilated(&[256], &[dilation], mode).unwrap();
                let shape = Shape::new(1, 256, 4, 4, 64).unwrap();
                let sharding = Sharding::new(2, Cut::Contiguous).unwrap();
                let mut request = Request::new(shape, pattern, sharding, DType::F32);
                request.pass = Pass::Backward { dlse: false };
                request.schedule = request.schedule.with_backward(freight);
                let program = Plan::new(request).unwrap().rank(0).unwrap();
                let tasks = program.rounds.iter().flat_map(|round| &round.meanwhile);
                let jobs = tasks.filter_map(|task| match task {
                    Task::Backward { job, .. } => Some(is_apart(job)),
                    _ => None,
                });
                let apart: Vec<bool> = jobs.collect();
                assert!(apart.len() > 1, "jobs at home and with rotating");
                assert!(
                    apart.iter().all(|is| *is == expected),
                    "{freight:?} {apart:?}"
                );
            }
        }
    }
}
