//! Every fault that is injected into a simulated run, in one value: rates, severities and a seed.
//!
//! Nothing here acts. The [`network`](crate::network) and the [`fault_run`](crate::fault_run) query
//! it in an order that depends on nothing else, so the same value reproduces the same run, fault
//! for fault.

use encke_core::conformance::Random;
use serde::Serialize;
use std::time::Duration;

/// The faults of a run. Odds are fractions of messages, from 0 to 1; times are virtual.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FaultConfig {
    /// Seeds the choice of messages, positions and severities.
    pub seed: u64,
    /// How long an exchange may wait for its receives.
    pub deadline: Duration,
    /// The time of the jobs of a round.
    pub compute: Duration,
    /// The least time of a message.
    pub latency: Duration,
    /// Odds that a message is delayed; later ones on the same link wait behind it.
    pub delay: f64,
    /// The longest delay.
    pub longest_delay: Duration,
    /// Odds that a message is held back so that later ones overtake it.
    pub reordering: f64,
    /// Odds that a message never arrives.
    pub loss: f64,
    /// Odds that a message arrives with a changed byte, in its envelope or its contents.
    pub corruption: f64,
    /// Odds that a message arrives a second time, later.
    pub duplication: f64,
    /// Ranks that die before a round.
    pub deaths: Vec<RankDeath>,
    /// How long it takes to detect a death, where it can be survived.
    pub detection: Duration,
    /// A rank whose jobs take longer.
    pub slow: Option<SlowRank>,
    /// The checks of receivers.
    pub checks: ReceiverChecks,
}

/// A rank that dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct RankDeath {
    /// The rank.
    pub rank: usize,
    /// The epoch: how many times the call has recovered from deaths before.
    pub epoch: usize,
    /// The round before which it dies. Where deaths are survived, a rank that does not reach this
    /// round in its epoch dies at the end of the epoch.
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
    /// The factor by which its jobs take longer.
    pub times: u32,
}

/// What a receiver checks. All but [`ReceiverChecks::All`] are mutants, which show in tests that
/// these checks are what keeps wrong values out of results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReceiverChecks {
    /// Everything.
    All,
    /// A mutant that accepts corrupted messages.
    NoChecksum,
    /// A mutant that accepts messages of other rounds.
    NoRound,
}

/// The kinds of faults, one by one and all together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultKind {
    /// Delayed messages.
    Delay,
    /// Messages that overtake each other on a link.
    Reordering,
    /// Messages that never arrive.
    Loss,
    /// Messages that arrive with a changed byte.
    Corruption,
    /// Messages that arrive twice.
    Duplication,
    /// A rank that dies.
    Death,
    /// A rank that is slow.
    Slowness,
    /// All of them at once.
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
        FaultKind::Death,
        FaultKind::Slowness,
        FaultKind::Everything,
    ];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            FaultKind::Delay => "delay",
            FaultKind::Reordering => "reordering",
            FaultKind::Loss => "loss",
            FaultKind::Corruption => "corruption",
            FaultKind::Duplication => "duplication",
            FaultKind::Death => "death",
            FaultKind::Slowness => "slowness",
            FaultKind::Everything => "everything",
        }
    }
}

impl FaultConfig {
    /// No faults.
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

    /// Faults of one kind for a ring, mild or severe depending on the seed: some runs complete and
    /// some do not.
    pub fn random(kind: FaultKind, seed: u64, ranks: usize, rounds: usize) -> FaultConfig {
        let mut random = Random::new(seed ^ 0xfa_17);
        let mut config = FaultConfig::none(seed);
        let has = |fault: FaultKind| kind == fault || kind == FaultKind::Everything;
        let odds = [0.003, 0.03, 0.3];
        if has(FaultKind::Delay) {
            config.delay = random.pick(&odds);
            config.longest_delay = Duration::from_millis(random.pick(&[5, 80, 250]));
        }
        if has(FaultKind::Reordering) {
            config.reordering = random.pick(&odds);
        }
        if has(FaultKind::Loss) {
            config.loss = random.pick(&odds);
        }
        if has(FaultKind::Corruption) {
            config.corruption = random.pick(&odds);
        }
        if has(FaultKind::Duplication) {
            config.duplication = random.pick(&odds);
        }
        if has(FaultKind::Death) {
            let (rank, round) = (random.below(ranks), random.below(rounds.max(1)));
            config.deaths.push(RankDeath::new(rank, round));
        }
        if has(FaultKind::Slowness) {
            let (rank, times) = (random.below(ranks), random.pick(&[3, 60, 300]));
            config.slow = Some(SlowRank { rank, times });
        }
        config
    }

    /// For a ring that survives deaths: if there is a death, adds up to two more, in the same epoch
    /// or later, and draws the detection time.
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

    /// The time of the jobs of a round on a rank.
    pub fn compute_on(&self, rank: usize) -> Duration {
        match self.slow {
            Some(slow) if slow.rank == rank => self.compute * slow.times,
            _ => self.compute,
        }
    }

    /// The latest time at which a rank ends a round or fails: in every round it computes, then
    /// waits at most until its deadline.
    pub fn latest_end(&self, rank: usize, round: usize) -> Duration {
        (self.compute_on(rank) + self.deadline) * (round as u32 + 1)
    }

    /// The latest time at which all ranks end, where deaths are survived: each may wait for the
    /// slowest rank in every round of every epoch, and until each death is detected. `epochs` has
    /// the rounds of each epoch.
    pub fn latest_end_of_all(&self, epochs: &[usize]) -> Duration {
        let slowest = self.compute * self.slow.map_or(1, |slow| slow.times.max(1));
        let rounds: usize = epochs.iter().map(|rounds| rounds + 1).sum();
        let detection = self.detection.max(self.latency) * epochs.len() as u32;
        (slowest + self.deadline) * rounds as u32 + detection
    }
}
