//! Programs executed on labels instead of values: an input element is the label of its row, a sum
//! is the list of the pairs in it. Ranks advance in random order and stop in any round that their
//! messages allow, so the tests do not depend on how a transport detects deaths.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use encke_core::conformance::Random;
use encke_core::job::{Block, Job};
use encke_core::plan::Plan;
use encke_core::plan::membership::{Agreement, Continuation, Epoch, RankProgress};
use encke_core::plan::program::{BufferId, Message, RankPlan, Role, Task};
use encke_core::{Error, Shape};

/// (query row, key row); an input is (its row, `INPUT`).
pub type LabelPair = (u32, u32);
const INPUT: u32 = u32::MAX;
type Cells = Vec<Vec<LabelPair>>;

/// One rank that executes its program on labels.
pub struct LabelRank {
    program: RankPlan,
    buffers: Vec<Cells>,
    done: usize,
    finished: bool,
    pairs: u128,
}

fn empty(program: &RankPlan) -> Vec<Cells> {
    let buffers = program.buffers.iter();
    buffers.map(|b| vec![Vec::new(); b.elements]).collect()
}

/// The rows of a port, in the order of its buffer: (batch, token).
fn rows<'a>(
    shape: &Shape,
    runs: &'a [encke_core::sharding::Run],
) -> impl Iterator<Item = (usize, usize)> + 'a {
    let tokens = move || runs.iter().flat_map(|run| run.tokens());
    (0..shape.batch).flat_map(move |b| tokens().map(move |t| (b, t)))
}

impl LabelRank {
    fn new(program: RankPlan, shape: &Shape) -> LabelRank {
        let mut buffers = empty(&program);
        for port in &program.inputs {
            let heads = match port.role {
                Role::Q => shape.heads,
                Role::K | Role::V => shape.kv_heads,
                _ => continue,
            };
            for (i, (b, t)) in rows(shape, &port.runs).enumerate() {
                for h in 0..heads {
                    let label = ((b * shape.tokens + t) * heads + h) as u32;
                    buffers[port.buffer.0][i * heads + h] = vec![(label, INPUT)];
                }
            }
        }
        LabelRank {
            program,
            buffers,
            done: 0,
            finished: false,
            pairs: 0,
        }
    }

    fn resume(&mut self, continuation: Continuation) {
        let Continuation { program, keeps } = continuation;
        let mut buffers = empty(&program);
        for (buffer, kept) in buffers.iter_mut().zip(&keeps) {
            if let Some(BufferId(old)) = kept {
                assert_eq!(buffer.len(), self.buffers[*old].len(), "a kept buffer fits");
                *buffer = std::mem::take(&mut self.buffers[*old]);
            }
        }
        (self.program, self.buffers) = (program, buffers);
        (self.done, self.finished) = (0, false);
    }

    /// Runs the tasks of the next round; returns the messages it sends.
    fn advance(&mut self) -> Vec<(Message, Cells)> {
        let round = self.program.rounds[self.done].clone();
        for task in round.before.iter().chain(&round.meanwhile) {
            self.perform(task);
        }
        self.done += 1;
        let sent = |message: Message| {
            let cells = self.buffers[message.buffer.0][..message.address.elements].to_vec();
            (message, cells)
        };
        round.sends.into_iter().map(sent).collect()
    }

    fn perform(&mut self, task: &Task) {
        match task {
            Task::Fill { buffer, .. } => self.buffers[buffer.0].iter_mut().for_each(Vec::clear),
            Task::Copy {
                blocks,
                add,
                from,
                to,
            } => {
                let source = self.buffers[from.0].clone();
                for block in blocks {
                    copy(block, *add, &source, &mut self.buffers[to.0]);
                }
            }
            Task::Pack { blocks, from, to } => {
                let source = self.buffers[from.0].clone();
                for block in blocks {
                    copy(block, false, &source, &mut self.buffers[to.0]);
                }
            }
            Task::Forward {
                job,
                q,
                k,
                starts,
                carry,
                ..
            } => {
                if *starts {
                    for cell in cells(job) {
                        self.buffers[carry.acc.0][cell].clear();
                    }
                }
                for (pair, cell, ..) in self.pairs_of(job, *q, *k) {
                    self.buffers[carry.acc.0][cell].push(pair);
                }
            }
            Task::Conclude {
                job,
                q,
                k,
                carry,
                out,
                ..
            } => {
                for cell in cells(job) {
                    self.buffers[out.0][cell] = self.buffers[carry.acc.0][cell].clone();
                }
                for (pair, cell, ..) in self.pairs_of(job, *q, *k) {
                    self.buffers[out.0][cell].push(pair);
                }
            }
            Task::Attend { job, q, k, out, .. } => {
                for (pair, cell, ..) in self.pairs_of(job, *q, *k) {
                    self.buffers[out.0][cell].push(pair);
                }
            }
            Task::Finish { carry, out, .. } => {
                self.buffers[out.0] = self.buffers[carry.acc.0].clone();
            }
            Task::Backward {
                job,
                q,
                k,
                dq,
                dk,
                dv,
                ..
            } => {
                for (pair, _, q_at, k_at) in self.pairs_of(job, *q, *k) {
                    self.buffers[dq.0][q_at].push(pair);
                    self.buffers[dk.0][k_at].push(pair);
                    self.buffers[dv.0][k_at].push(pair);
                }
            }
            Task::Delta { .. } => {}
            Task::Merge { .. } => panic!("queries are sharded: no carry travels"),
        }
    }

    /// The pairs of a job, each with the addresses of its cell, its dq and its dk.
    fn pairs_of(
        &mut self,
        job: &Job,
        q: BufferId,
        k: BufferId,
    ) -> Vec<(LabelPair, usize, usize, usize)> {
        let label = |buffer: BufferId, at: usize| {
            let cell = &self.buffers[buffer.0][at];
            assert!(
                cell.len() == 1 && cell[0].1 == INPUT,
                "a row that is not an input"
            );
            cell[0].0
        };
        let mut found = Vec::new();
        for (b, s) in (0..job.batch).flat_map(|b| (0..job.segments).map(move |s| (b, s))) {
            for (h, i) in (0..job.heads).flat_map(|h| (0..job.queries).map(move |i| (h, i))) {
                for j in job.visible(i) {
                    let (q_at, k_at) = (job.q.at(b, s, i, h), job.k.at(b, s, j, h));
                    let pair = (label(q, q_at), label(k, k_at));
                    found.push((pair, job.cells.at(b, s, i, h), q_at, k_at));
                }
            }
        }
        self.pairs += found.len() as u128;
        found
    }
}

/// Every cell of a job.
fn cells(job: &Job) -> Vec<usize> {
    let places = (0..job.batch).flat_map(|b| (0..job.segments).map(move |s| (b, s)));
    let rows = (0..job.queries).flat_map(|i| (0..job.heads).map(move |h| (i, h)));
    let rows: Vec<(usize, usize)> = rows.collect();
    places
        .flat_map(|(b, s)| rows.iter().map(move |&(i, h)| job.cells.at(b, s, i, h)))
        .collect()
}

fn copy(block: &Block, add: bool, source: &Cells, target: &mut Cells) {
    for (from, to) in block.addresses() {
        for i in 0..block.width {
            if !add {
                target[to + i].clear();
            }
            target[to + i].extend(&source[from + i]);
        }
    }
}

/// A call on labels, in which given ranks die.
pub struct LabelCall {
    pub epoch: Epoch,
    ranks: Vec<Option<LabelRank>>,
    messages: HashMap<(usize, usize, u64, usize), Cells>,
    random: Random,
}

impl LabelCall {
    pub fn new(plan: &Arc<Plan>, seed: u64) -> LabelCall {
        let epoch = Epoch::first(plan);
        let shape = &plan.request().shape;
        let rank_state = |rank| {
            Some(LabelRank::new(
                epoch.program(rank).expect("it exists"),
                shape,
            ))
        };
        LabelCall {
            ranks: (0..plan.ranks()).map(rank_state).collect(),
            epoch,
            messages: HashMap::new(),
            random: Random::new(seed),
        }
    }

    /// Whether all messages of the last round that a rank has run have arrived.
    fn has_messages(&self, rank: usize) -> bool {
        let Some(rank_state) = &self.ranks[rank] else {
            return false;
        };
        let Some(last) = rank_state.done.checked_sub(1) else {
            return true;
        };
        let mut receives = rank_state.program.rounds[last].receives.iter();
        receives.all(|message| {
            let from = (message.address.peer, rank, message.address.tag, last);
            self.messages.contains_key(&from)
        })
    }

    fn step(&mut self, rank: usize) {
        let rank_state = self.ranks[rank].as_mut().expect("it is alive");
        if let Some(last) = rank_state.done.checked_sub(1) {
            for message in rank_state.program.rounds[last].receives.clone() {
                let from = (message.address.peer, rank, message.address.tag, last);
                let cells = self.messages.remove(&from).expect("it has arrived");
                assert_eq!(cells.len(), message.address.elements);
                rank_state.buffers[message.buffer.0][..cells.len()].clone_from_slice(&cells);
            }
        }
        if rank_state.done == rank_state.program.rounds.len() {
            rank_state.finished = true;
            return;
        }
        let round = rank_state.done;
        for (message, cells) in rank_state.advance() {
            let to = (rank, message.address.peer, message.address.tag, round);
            let twice = self.messages.insert(to, cells);
            assert!(twice.is_none(), "two messages under one tag");
        }
    }

    /// Advances ranks in random order until none can, or until all stop because of a death: (rank,
    /// number of rounds after which it dies). `patience` is the number of steps taken after that.
    pub fn run(&mut self, death: Option<(usize, usize)>, mut patience: usize) -> Agreement {
        loop {
            if let Some((victim, round)) = death
                && self.ranks[victim]
                    .as_ref()
                    .is_some_and(|rank_state| rank_state.done >= round || rank_state.finished)
            {
                self.ranks[victim] = None;
            }
            let able: Vec<usize> = (0..self.ranks.len())
                .filter(|rank| self.has_messages(*rank))
                .filter(|rank| self.ranks[*rank].as_ref().is_some_and(|p| !p.finished))
                .collect();
            let gone = death.is_some_and(|(victim, _)| self.ranks[victim].is_none());
            if able.is_empty() || (gone && patience == 0) {
                break;
            }
            patience -= usize::from(gone);
            let rank = able[self.random.below(able.len())];
            self.step(rank);
        }
        if let Some((victim, _)) = death {
            self.ranks[victim] = None;
        }
        let progress = |rank_state: &Option<LabelRank>| {
            let rank_state = rank_state.as_ref()?;
            Some(RankProgress {
                done: rank_state.done,
                finished: rank_state.finished,
            })
        };
        Agreement {
            progress: self.ranks.iter().map(progress).collect(),
        }
    }

    pub fn resume(&mut self, agreement: &Agreement) -> Result<(), Error> {
        self.epoch = self.epoch.next(agreement)?;
        self.messages.clear();
        for (rank, rank_state) in self.ranks.iter_mut().enumerate() {
            if let Some(rank_state) = rank_state {
                rank_state.resume(self.epoch.continuation(rank, &rank_state.program)?);
            }
        }
        Ok(())
    }

    /// The pairs in every row of an output, by (batch, token, head).
    pub fn output(
        &self,
        role: Role,
        heads: usize,
    ) -> BTreeMap<(usize, usize, usize), Vec<LabelPair>> {
        let shape = self.epoch.plan().request().shape;
        let mut all = BTreeMap::new();
        for rank_state in self.ranks.iter().flatten() {
            for port in rank_state
                .program
                .outputs
                .iter()
                .filter(|port| port.role == role)
            {
                for (i, (b, t)) in rows(&shape, &port.runs).enumerate() {
                    for h in 0..heads {
                        let mut pairs = rank_state.buffers[port.buffer.0][i * heads + h].clone();
                        pairs.sort_unstable();
                        let twice = all.insert((b, t, h), pairs);
                        assert!(twice.is_none(), "a row that two ranks return");
                    }
                }
            }
        }
        all
    }
}
