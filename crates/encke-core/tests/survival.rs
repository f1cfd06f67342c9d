//! Continuations proven against the pattern: whoever dies, in whatever round, in the end every pair
//! is in every result it belongs to, as often as its multiplicity says.
//!
//! Programs are carried out on labels instead of numbers: an input is the name of its row, a sum is
//! the list of the pairs in it. Ranks advance in any order, and stop in any round that their
//! messages allow, so nothing depends on how a transport notices deaths.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use proptest::prelude::*;

use encke_core::conformance::{Configuration, Random};
use encke_core::job::{Block, Job};
use encke_core::plan::program::{BufferId, Component, Message, RankPlan, Role, Task};
use encke_core::plan::survival::{Agreement, Continuation, Epoch, Standing};
use encke_core::plan::{Pass, Plan, Queries, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{DType, Error, Pattern, Shape};

/// (query row, key row); an input is (its row, `INPUT`).
type Pair = (u32, u32);
const INPUT: u32 = u32::MAX;
type Cells = Vec<Vec<Pair>>;

/// One rank that carries its program out on labels.
struct Player {
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
            Task::Forward {
                job, q, k, carry, ..
            } => {
                for (pair, cell, ..) in self.met(job, *q, *k) {
                    self.buffers[carry.acc.0][cell].push(pair);
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
struct World {
    epoch: Epoch,
    players: Vec<Option<Player>>,
    mail: HashMap<(usize, usize, u64, usize), Cells>,
    random: Random,
}

impl World {
    fn new(plan: &Arc<Plan>, seed: u64) -> World {
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
    fn run(&mut self, death: Option<(usize, usize)>, mut patience: usize) -> Agreement {
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
            Some(Standing {
                done: player.done,
                finished: player.finished,
            })
        };
        Agreement {
            standings: self.players.iter().map(standing).collect(),
        }
    }

    fn go_on(&mut self, agreement: &Agreement) -> Result<(), Error> {
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
    fn output(&self, role: Role, heads: usize) -> BTreeMap<(usize, usize, usize), Vec<Pair>> {
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

/// The pairs that belong into every row: of queries, and of keys.
fn expected(request: &Request) -> [BTreeMap<(usize, usize, usize), Vec<Pair>>; 2] {
    let shape = &request.shape;
    let (mut of_queries, mut of_keys) = (BTreeMap::new(), BTreeMap::new());
    for (b, t) in (0..shape.batch).flat_map(|b| (0..shape.tokens).map(move |t| (b, t))) {
        for h in 0..shape.heads {
            of_queries.insert((b, t, h), Vec::new());
        }
        for h in 0..shape.kv_heads {
            of_keys.insert((b, t, h), Vec::new());
        }
    }
    for (b, h) in (0..shape.batch).flat_map(|b| (0..shape.heads).map(move |h| (b, h))) {
        for (q, k) in (0..shape.tokens).flat_map(|q| (0..shape.tokens).map(move |k| (q, k))) {
            let kv_head = shape.kv_head(h);
            let pair = (
                ((b * shape.tokens + q) * shape.heads + h) as u32,
                ((b * shape.tokens + k) * shape.kv_heads + kv_head) as u32,
            );
            for _ in 0..request.pattern.multiplicity(shape, h, q, k) {
                of_queries.entry((b, q, h)).or_default().push(pair);
                of_keys.entry((b, k, kv_head)).or_default().push(pair);
            }
        }
    }
    for rows in [&mut of_queries, &mut of_keys] {
        rows.values_mut().for_each(|pairs| pairs.sort_unstable());
    }
    [of_queries, of_keys]
}

fn assert_complete(world: &World) {
    let request = world.epoch.plan().request();
    let shape = request.shape;
    let [of_queries, of_keys] = expected(request);
    match request.pass {
        Pass::Forward => assert_eq!(world.output(Role::Out, shape.heads), of_queries),
        Pass::Backward { .. } => {
            assert_eq!(world.output(Role::Dq, shape.heads), of_queries);
            assert_eq!(world.output(Role::Dk, shape.kv_heads), of_keys);
            assert_eq!(world.output(Role::Dv, shape.kv_heads), of_keys);
        }
    }
}

/// A random call that is to survive, of one number a row.
fn case(seed: u64, redundancy: usize) -> Arc<Plan> {
    let mut random = Random::new(seed ^ 0xdead);
    let drawn = (0..).map(|i| Configuration::random(seed ^ (i << 32)));
    let mut drawn = drawn.filter(|drawn| {
        let ranks = drawn.request.sharding.ranks();
        ranks > redundancy && ranks <= 8
    });
    let drawn = drawn.next().expect("most have more ranks");
    let passes = [Pass::Forward, Pass::Backward { dlse: false }];
    let request = Request {
        shape: Shape {
            dim: 1,
            ..drawn.request.shape
        },
        queries: Queries::Sharded,
        pass: random.pick(&passes),
        redundancy,
        ..drawn.request
    };
    Arc::new(Plan::new(request).expect("a random case is legal"))
}

/// Deaths one after the other, each in any round of its epoch, until the call ends or a shard is
/// lost, which is only ever said when it is true.
fn lives(seed: u64, redundancy: usize, deaths: usize) {
    let plan = case(seed, redundancy);
    let mut world = World::new(&plan, seed);
    let mut random = Random::new(seed ^ 0xfade);
    for _ in 0..deaths {
        let living: Vec<usize> = world.epoch.living().collect();
        if living.len() == 1 {
            break;
        }
        let victim = living[random.below(living.len())];
        let rounds = world.epoch.program(victim).expect("it lives").rounds.len();
        let death = (victim, random.below(rounds + 2));
        let patience = random.pick(&[0, 3, 1000]);
        let agreement = world.run(Some(death), patience);
        assert!(!world.epoch.is_last(&agreement));
        match world.go_on(&agreement) {
            Ok(()) => {}
            Err(Error::LostShard { shard, keepers }) => {
                let gone = |rank: &usize| agreement.standings[*rank].is_none();
                assert!(gone(&shard) && keepers.iter().all(gone));
                assert!(plan.shards().rows(shard) > 0);
                return;
            }
            Err(other) => panic!("{other}"),
        }
    }
    let agreement = world.run(None, 0);
    assert!(world.epoch.is_last(&agreement), "{agreement:?}");
    assert_complete(&world);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn after_a_death_every_pair_is_computed_once(seed in any::<u64>()) {
        lives(seed, 1, 1);
    }

    #[test]
    fn after_several_deaths_too(seed in any::<u64>()) {
        lives(seed, 1, 3);
    }

    #[test]
    fn with_more_keepers_more_may_die(seed in any::<u64>()) {
        lives(seed, 2, 4);
    }

    /// Bytes of a plan that is to survive: the same messages, and the inputs of one more shard.
    #[test]
    fn replicas_are_booked(seed in any::<u64>()) {
        let plan = case(seed, 1);
        let bare = Plan::new(Request { redundancy: 0, ..plan.request().clone() }).expect("legal");
        prop_assert_eq!(
            plan.explain().expect("legal").sent_bytes,
            bare.explain().expect("legal").sent_bytes
        );
        for rank in 0..plan.ranks() {
            let kept = (rank + plan.ranks() - 1) % plan.ranks();
            let (program, other) = (plan.rank(rank).expect("exists"), bare.rank(kept).expect("exists"));
            let inputs = other.inputs.iter().map(|port| other.buffers[port.buffer.0].bytes());
            let replica = program.memory().get(&Component::Replica).copied();
            prop_assert_eq!(replica, Some(inputs.sum()));
        }
    }
}

fn dense(ranks: usize, pass: Pass) -> Arc<Plan> {
    let shape = Shape::new(1, 8 * ranks, 2, 1, 1).expect("sizes are positive");
    let sharding = Sharding::new(ranks, Cut::Contiguous).expect("ranks are positive");
    let request = Request {
        pass,
        redundancy: 1,
        ..Request::new(shape, Pattern::dense(), sharding, DType::F64)
    };
    Arc::new(Plan::new(request).expect("legal"))
}

/// What survivors have got is not computed again: the later a rank dies, the less is left to do
/// beside what it had, and never as much as a call from the start.
#[test]
fn survivors_keep_their_work() {
    for pass in [Pass::Forward, Pass::Backward { dlse: false }] {
        let plan = dense(4, pass);
        let all = plan.explain().expect("legal").pairs;
        for victim in 0..4 {
            let mut left = Vec::new();
            for round in 0..=4 {
                let mut world = World::new(&plan, 1);
                let agreement = world.run(Some((victim, round)), usize::MAX);
                world.go_on(&agreement).expect("its keeper lives");
                let pairs = world.epoch.pairs().expect("legal");
                left.push(pairs);
                let agreement = world.run(None, 0);
                assert!(world.epoch.is_last(&agreement));
                assert_complete(&world);
            }
            assert!(
                left.is_sorted_by(|a, b| a >= b),
                "{pass:?} {victim}: {left:?}"
            );
            assert!(left.iter().all(|pairs| *pairs < all), "{left:?} of {all}");
            // In the end all that is left is what the dead rank had computed itself.
            let own = plan.rank(victim).expect("exists").pairs();
            if pass == Pass::Forward {
                assert_eq!(left[4], own, "{left:?}");
            }
        }
    }
}

#[test]
fn what_cannot_be_survived_is_refused() {
    let plan = dense(4, Pass::Forward);
    let request = |queries, redundancy| Request {
        queries,
        redundancy,
        ..plan.request().clone()
    };
    let replicated = Plan::new(request(Queries::Replicated, 1)).expect_err("not supported");
    assert_eq!(replicated, Error::RedundantQueries { redundancy: 1 });
    let many = Plan::new(request(Queries::Sharded, 4)).expect_err("too many");
    let words = "redundancy 4 on 4 ranks: each rank's inputs are kept by as many others, of which \
                 there are 3";
    assert!(many.to_string().starts_with(words), "{many}");
    let gone = |ranks: &[usize]| Agreement {
        standings: (0..4)
            .map(|rank| {
                let standing = Standing {
                    done: 1,
                    finished: false,
                };
                (!ranks.contains(&rank)).then_some(standing)
            })
            .collect(),
    };
    let lost = Epoch::first(&plan).next(&gone(&[1, 2])).expect_err("lost");
    let shard = Error::LostShard {
        shard: 1,
        keepers: vec![2],
    };
    assert_eq!(lost, shard);
    let later = Epoch::first(&plan).next(&gone(&[1])).expect("2 keeps it");
    assert_eq!(later.host(1), Some(2));
    assert_eq!(later.next(&gone(&[1, 2])).expect_err("lost"), shard);
    assert!(later.next(&gone(&[1, 3])).is_ok());
}
