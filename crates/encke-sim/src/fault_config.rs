//! Everything that can go wrong in a simulated run, in one value: how often, how badly, and the
//! seed that decides when.
//!
//! Nothing here acts. The [`wire`](crate::wire) and the [`trial`](crate::trial) ask it, in an order
//! that depends on nothing else, so the same value brings the same run back, fault for fault.

use encke_core::conformance::Random;
use serde::Serialize;
use std::time::Duration;

/// All hardship of a run. Odds are shares of messages, from 0 to 1; times are virtual.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FaultConfig {
    /// Decides which messages are hit, where and how.
    pub seed: u64,
    /// How long an exchange may wait for what it is to receive.
    pub deadline: Duration,
    /// What a round of jobs takes.
    pub compute: Duration,
    /// What a message takes at least.
    pub latency: Duration,
    /// Odds that a message takes longer; those sent after it over the same link wait behind it.
    pub delay: f64,
    /// How much longer at most.
    pub longest_delay: Duration,
    /// Odds that a message is held back so that later ones overtake it.
    pub reordering: f64,
    /// Odds that a message never arrives.
    pub loss: f64,
    /// Odds that a message arrives with a changed byte, in its envelope or in its contents.
    pub corruption: f64,
    /// Odds that a message arrives a second time, later.
    pub duplication: f64,
    /// Ranks that are gone when they should begin a round.
    pub deaths: Vec<RankDeath>,
    /// How long it takes until a death is known, where it can be survived.
    pub detection: Duration,
    /// A rank that takes longer for its jobs.
    pub slow: Option<SlowRank>,
    /// What receivers look at.
    pub checks: ReceiverChecks,
}

/// A rank that dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct RankDeath {
    /// The rank.
    pub rank: usize,
    /// How many times the call has gone on after a death before.
    pub epoch: usize,
    /// The round it does not begin. Where deaths are survived, a rank that does not get there in
    /// its epoch dies at the end of it.
    pub round: usize,
}

impl RankDeath {
    /// A death in the first epoch.
    pub fn new(rank: usize, round: usize) -> RankDeath {
        let epoch = 0;
        RankDeath { rank, epoch, round }
    }
}

/// A rank that is slow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SlowRank {
    /// The rank.
    pub rank: usize,
    /// How many times longer its jobs take.
    pub times: u32,
}

/// What a receiver checks. Anything but [`ReceiverChecks::All`] is a mutant, there to show in tests that
/// it is these checks, and nothing else, that keep wrong numbers out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReceiverChecks {
    /// Everything.
    All,
    /// A mutant: changed messages are taken as they are.
    NoChecksum,
    /// A mutant: a message of another round is as good as the right one.
    NoRound,
}

/// The kinds of hardship, one by one and all together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultKind {
    /// Messages that take longer.
    Delay,
    /// Messages that overtake each other.
    Reordering,
    /// Messages that never arrive.
    Loss,
    /// Messages that arrive changed.
    Corruption,
    /// Messages that arrive twice.
    Duplication,
    /// A rank that dies.
    RankDeath,
    /// A rank that is slow.
    Slowness,
    /// All of it at once.
    Everything,
}

impl FaultKind {
    /// All kinds.
    pub const ALL: [FaultKind; 8] = [
        FaultKind::Delay,
        FaultKind::Reordering,
        FaultKind::Loss,
        FaultKind::Corruption,
        FaultKind::Duplication,
        FaultKind::RankDeath,
        FaultKind::Slowness,
        FaultKind::Everything,
    ];

    /// The name reports use.
    pub fn name(self) -> &'static str {
        match self {
            FaultKind::Delay => "delay",
            FaultKind::Reordering => "reordering",
            FaultKind::Loss => "loss",
            FaultKind::Corruption => "corruption",
            FaultKind::Duplication => "duplication",
            FaultKind::RankDeath => "death",
            FaultKind::Slowness => "slowness",
            FaultKind::Everything => "everything",
        }
    }
}

impl FaultConfig {
    /// None at all.
    pub fn none(seed: u64) -> FaultConfig {
        FaultConfig {
            seed,
            deadline: Duration::from_millis(100),
            compute: Duration::from_millis(1),
            latency: Duration::from_micros(50),
            delay: 0.0,
            longest_delay: Duration::ZERO,
            reordering: 0.0,
            loss: 0.0,
            corruption: 0.0,
            duplication: 0.0,
            deaths: Vec::new(),
            detection: Duration::from_millis(30),
            slow: None,
            checks: ReceiverChecks::All,
        }
    }

    /// Hardship of one kind for a ring, mild or severe as the seed has it: some runs survive it
    /// and some do not.
    pub fn random(kind: FaultKind, seed: u64, ranks: usize, rounds: usize) -> FaultConfig {
        let mut random = Random::new(seed ^ 0xfa_17);
        let mut hardship = FaultConfig::none(seed);
        let is = |one: FaultKind| kind == one || kind == FaultKind::Everything;
        let odds = [0.003, 0.03, 0.3];
        if is(FaultKind::Delay) {
            hardship.delay = random.pick(&odds);
            hardship.longest_delay = Duration::from_millis(random.pick(&[5, 80, 250]));
        }
        if is(FaultKind::Reordering) {
            hardship.reordering = random.pick(&odds);
        }
        if is(FaultKind::Loss) {
            hardship.loss = random.pick(&odds);
        }
        if is(FaultKind::Corruption) {
            hardship.corruption = random.pick(&odds);
        }
        if is(FaultKind::Duplication) {
            hardship.duplication = random.pick(&odds);
        }
        if is(FaultKind::RankDeath) {
            let (rank, round) = (random.below(ranks), random.below(rounds.max(1)));
            hardship.deaths.push(RankDeath::new(rank, round));
        }
        if is(FaultKind::Slowness) {
            let (rank, times) = (random.below(ranks), random.pick(&[3, 60, 300]));
            hardship.slow = Some(SlowRank { rank, times });
        }
        hardship
    }

    /// The same for a ring that survives deaths: where one dies, up to two more do, in the same epoch
    /// or later, and it takes longer or shorter to notice.
    pub fn with_more_deaths(mut self, ranks: usize, rounds: usize) -> FaultConfig {
        let mut random = Random::new(self.seed ^ 0xdead);
        if self.deaths.is_empty() {
            return self;
        }
        for _ in 0..random.pick(&[0, 0, 1, 2]) {
            self.deaths.push(RankDeath {
                rank: random.below(ranks),
                epoch: random.below(3),
                round: random.below(rounds.max(1)),
            });
        }
        self.detection = Duration::from_millis(random.pick(&[1, 30, 400]));
        self
    }

    /// What a round of jobs takes on a rank.
    pub fn compute_on(&self, rank: usize) -> Duration {
        match self.slow {
            Some(slow) if slow.rank == rank => self.compute * slow.times,
            _ => self.compute,
        }
    }

    /// When a rank has ended its round at the latest, in one way or the other: in every round it
    /// computes, and then waits no longer than the deadline.
    pub fn latest_end(&self, rank: usize, round: usize) -> Duration {
        (self.compute_on(rank) + self.deadline) * (round as u32 + 1)
    }

    /// When every rank has ended at the latest, where deaths are survived: everyone can wait for the
    /// slowest in every round of every epoch, and until each death is known.
    pub fn latest_end_of_all(&self, epochs: &[usize]) -> Duration {
        let slowest = self.compute * self.slow.map_or(1, |slow| slow.times.max(1));
        let rounds: usize = epochs.iter().map(|rounds| rounds + 1).sum();
        let known = self.detection.max(self.latency) * epochs.len() as u32;
        (slowest + self.deadline) * rounds as u32 + known
    }
}
