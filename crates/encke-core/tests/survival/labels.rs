//! Programs carried out on labels instead of numbers: an input is the name of its row, a sum is the
//! list of the pairs in it. Ranks advance in any order, and stop in any round that their messages
//! allow, so nothing depends on how a transport notices deaths.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use encke_core::conformance::Random;
use encke_core::job::{Block, Job};
use encke_core::plan::Plan;
use encke_core::plan::membership::{Agreement, Continuation, Epoch, RankProgress};
use encke_core::plan::program::{BufferId, Message, RankPlan, Role, Task};
use encke_core::{Error, Shape};

/// (query row, key row); an input is (its row, `INPUT`).
pub type Pair = (u32, u32);
const INPUT: u32 = u32::MAX;
type Cells = Vec<Vec<Pair>>;

/// One rank that carries its program out on labels.
pub struct Player {
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

impl Player {
    fn new(program: RankPlan, shape: &Shape) -> Player {
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
        Player {
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

    /// Does the tasks of the next round; returns what it sends.
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
                begins,
                carry,
                ..
            } => {
                if *begins {
                    for cell in cells(job) {
                        self.buffers[carry.acc.0][cell].clear();
                    }
                }
                for (pair, cell, ..) in self.met(job, *q, *k) {
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
                for (pair, cell, ..) in self.met(job, *q, *k) {
                    self.buffers[out.0][cell].push(pair);
                }
            }
            Task::Attend { job, q, k, out, .. } => {
                for (pair, cell, ..) in self.met(job, *q, *k) {
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
                for (pair, _, q_at, k_at) in self.met(job, *q, *k) {
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
    fn met(&mut self, job: &Job, q: BufferId, k: BufferId) -> Vec<(Pair, usize, usize, usize)> {
        let label = |buffer: BufferId, at: usize| {
            let cell = &self.buffers[buffer.0][at];
            assert!(
                cell.len() == 1 && cell[0].1 == INPUT,
                "a row that is no input"
            );
            cell[0].0
        };
        let mut met = Vec::new();
        for (b, s) in (0..job.batch).flat_map(|b| (0..job.segments).map(move |s| (b, s))) {
            for (h, i) in (0..job.heads).flat_map(|h| (0..job.queries).map(move |i| (h, i))) {
                for j in 0..job.visible(i) {
                    let (q_at, k_at) = (job.q.at(b, s, i, h), job.k.at(b, s, j, h));
                    let pair = (label(q, q_at), label(k, k_at));
                    met.push((pair, job.cells.at(b, s, i, h), q_at, k_at));
                }
            }
        }
        self.pairs += met.len() as u128;
        met
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

/// A call on labels, in which ranks die as told.
pub struct World {
    pub epoch: Epoch,
    players: Vec<Option<Player>>,
    mail: HashMap<(usize, usize, u64, usize), Cells>,
    random: Random,
}

impl World {
    pub fn new(plan: &Arc<Plan>, seed: u64) -> World {
        let epoch = Epoch::first(plan);
        let shape = &plan.request().shape;
        let player = |rank| Some(Player::new(epoch.program(rank).expect("it exists"), shape));
        World {
            players: (0..plan.ranks()).map(player).collect(),
            epoch,
            mail: HashMap::new(),
            random: Random::new(seed),
        }
    }

    /// Whether everything a rank waits for in the round it has done last has come.
    fn is_served(&self, rank: usize) -> bool {
        let Some(player) = &self.players[rank] else {
            return false;
        };
        let Some(last) = player.done.checked_sub(1) else {
            return true;
        };
        let mut receives = player.program.rounds[last].receives.iter();
        receives.all(|message| {
            let from = (message.address.peer, rank, message.address.tag, last);
            self.mail.contains_key(&from)
        })
    }

    fn step(&mut self, rank: usize) {
        let player = self.players[rank].as_mut().expect("it lives");
        if let Some(last) = player.done.checked_sub(1) {
            for message in player.program.rounds[last].receives.clone() {
                let from = (message.address.peer, rank, message.address.tag, last);
                let cells = self.mail.remove(&from).expect("it was served");
                assert_eq!(cells.len(), message.address.elements);
                player.buffers[message.buffer.0][..cells.len()].clone_from_slice(&cells);
            }
        }
        if player.done == player.program.rounds.len() {
            player.finished = true;
            return;
        }
        let round = player.done;
        for (message, cells) in player.advance() {
            let to = (rank, message.address.peer, message.address.tag, round);
            let twice = self.mail.insert(to, cells);
            assert!(twice.is_none(), "two messages under one tag");
        }
    }

    /// Lets ranks advance in any order until nobody can, or until everyone stops because `victim`
    /// has died after so many rounds. `patience` is how many steps are taken after that.
    pub fn run(&mut self, death: Option<(usize, usize)>, mut patience: usize) -> Agreement {
        loop {
            if let Some((victim, round)) = death
                && self.players[victim]
                    .as_ref()
                    .is_some_and(|player| player.done >= round || player.finished)
            {
                self.players[victim] = None;
            }
            let able: Vec<usize> = (0..self.players.len())
                .filter(|rank| self.is_served(*rank))
                .filter(|rank| self.players[*rank].as_ref().is_some_and(|p| !p.finished))
                .collect();
            let gone = death.is_some_and(|(victim, _)| self.players[victim].is_none());
            if able.is_empty() || (gone && patience == 0) {
                break;
            }
            patience -= usize::from(gone);
            let rank = able[self.random.below(able.len())];
            self.step(rank);
        }
        if let Some((victim, _)) = death {
            self.players[victim] = None;
        }
        let standing = |player: &Option<Player>| {
            let player = player.as_ref()?;
            Some(RankProgress {
                done: player.done,
                finished: player.finished,
            })
        };
        Agreement {
            progress: self.players.iter().map(standing).collect(),
        }
    }

    pub fn go_on(&mut self, agreement: &Agreement) -> Result<(), Error> {
        self.epoch = self.epoch.next(agreement)?;
        self.mail.clear();
        for (rank, player) in self.players.iter_mut().enumerate() {
            if let Some(player) = player {
                player.resume(self.epoch.continuation(rank, &player.program)?);
            }
        }
        Ok(())
    }

    /// The pairs in every row of an output, by (batch, token, head).
    pub fn output(&self, role: Role, heads: usize) -> BTreeMap<(usize, usize, usize), Vec<Pair>> {
        let shape = self.epoch.plan().request().shape;
        let mut all = BTreeMap::new();
        for player in self.players.iter().flatten() {
            for port in player
                .program
                .outputs
                .iter()
                .filter(|port| port.role == role)
            {
                for (i, (b, t)) in rows(&shape, &port.runs).enumerate() {
                    for h in 0..heads {
                        let mut pairs = player.buffers[port.buffer.0][i * heads + h].clone();
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
