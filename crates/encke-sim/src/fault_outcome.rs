//! What a call under hardship must be: right to the bit, or ended on every rank by an error that
//! names what it must, inside the deadline. One that went on after a death must be right as well,
//! but for rounding: its sums were made in another order. Tests and the command judge by this.

use encke_core::Data;
use encke_core::conformance::Configuration;
use encke_core::kernel::Kernel;
use encke_core::plan::program::Role;
use encke_core::plan::rings::Rotating;
use encke_core::plan::{Plan, Queries};
use encke_core::transport::TransportError;
use encke_core::{Error, Tensor};
use encke_ring::{Outcome, RankError, RingError};

use crate::fault_config::{FaultConfig, FaultKind};
use crate::fault_run::{self, FaultRun};
use crate::lockstep;
use crate::sample::RandomCall;

/// How a trial ended.
#[derive(Debug, Clone, PartialEq)]
pub enum FaultOutcome {
    /// With the bits of an undisturbed run.
    Right,
    /// With the same numbers up to rounding, after deaths.
    Survived {
        /// How many ranks died.
        deaths: usize,
    },
    /// With an error on every rank, this one first.
    Failed {
        /// How the first rank to fail ended.
        first: RankError,
    },
    /// With other numbers, which must never be.
    Wrong {
        /// The output that has them.
        output: String,
    },
    /// In some other way that must never be.
    Broken {
        /// How.
        how: String,
    },
}

impl FaultOutcome {
    /// Whether this may happen.
    pub fn holds(&self) -> bool {
        !matches!(
            self,
            FaultOutcome::Wrong { .. } | FaultOutcome::Broken { .. }
        )
    }
}

/// The call and the hardship of a seed: any configuration, forward or backward.
pub fn draw(kind: FaultKind, seed: u64) -> encke_core::Result<(RandomCall, FaultConfig)> {
    let backward = (seed / FaultKind::ALL.len() as u64) % 2 == 1;
    let sample = RandomCall::new(&Configuration::random(seed), backward)?;
    let hardship = FaultConfig::random(kind, seed, sample.plan.ranks(), sample.rounds()?);
    Ok((sample, hardship))
}

/// The same for a call that is to survive: any configuration that can.
pub fn draw_surviving(
    kind: FaultKind,
    seed: u64,
    redundancy: usize,
) -> encke_core::Result<(RandomCall, FaultConfig)> {
    let backward = (seed / FaultKind::ALL.len() as u64) % 2 == 1;
    let drawn = (0..).map(|again: u64| Configuration::random(seed ^ (again << 40)));
    let mut drawn = drawn.filter(|drawn| drawn.request.sharding.ranks() > redundancy);
    let mut configuration = drawn
        .next()
        .expect("seeds never end, and rings have up to 32 ranks");
    configuration.request.queries = Queries::Sharded;
    configuration.request.redundancy = redundancy;
    configuration.request.schedule.backward = Rotating::Keys;
    let sample = RandomCall::new(&configuration, backward)?;
    let (ranks, rounds) = (sample.plan.ranks(), sample.rounds()?);
    let hardship = FaultConfig::random(kind, seed, ranks, rounds);
    Ok((sample, hardship.with_more_deaths(ranks, rounds)))
}

/// Runs a call under hardship and undisturbed, and compares. An error says that it could not begin.
pub fn try_out<K: Kernel<Buffer = Data>>(
    kernel: &K,
    sample: &RandomCall,
    hardship: &FaultConfig,
) -> Result<(FaultRun, FaultOutcome), RingError> {
    let inputs = sample.inputs();
    let undisturbed = lockstep::run(kernel, &sample.plan, &inputs)?;
    let trial = fault_run::run(kernel, &sample.plan, &inputs, hardship)?;
    let verdict = judge(&sample.plan, hardship, &trial, &undisturbed);
    Ok((trial, verdict))
}

/// Holds a trial against the undisturbed run, and its errors against what they must say.
pub fn judge(
    plan: &Plan,
    hardship: &FaultConfig,
    trial: &FaultRun,
    undisturbed: &Outcome,
) -> FaultOutcome {
    let broken = |how: String| FaultOutcome::Broken { how };
    for end in &trial.ends {
        let latest = match plan.request().redundancy {
            0 => hardship.latest_end(end.rank, end.round),
            _ => hardship.latest_end_of_all(&trial.epochs),
        };
        if end.at > latest {
            return broken(format!("rank {} ended after {latest:?}: {end:?}", end.rank));
        }
    }
    let (rank, first, others) = match &trial.result {
        Ok(outcome) => return compare(outcome, undisturbed),
        Err(RingError::Rank {
            rank,
            source,
            others,
        }) => (*rank, source, others),
        Err(other) => return broken(format!("not an error of a rank: {other}")),
    };
    if first.is_consequence() {
        return broken(format!("the first failure follows from another: {first}"));
    }
    let all = || {
        let others = others.iter().map(|(rank, error)| (*rank, error));
        others.chain([(rank, first)])
    };
    let mut failed: Vec<usize> = all().map(|(rank, _)| rank).collect();
    failed.sort_unstable();
    if failed != (0..plan.ranks()).collect::<Vec<_>>() {
        return broken(format!("only ranks {failed:?} ended with an error"));
    }
    match all().find(|(rank, error)| !is_named(plan, hardship, *rank, error)) {
        Some((rank, error)) => broken(format!("rank {rank} ended with {error:?}")),
        None => FaultOutcome::Failed {
            first: first.clone(),
        },
    }
}

fn compare(outcome: &Outcome, undisturbed: &Outcome) -> FaultOutcome {
    let deaths = outcome.deaths.len();
    let same = |got: &Tensor, expected: &Tensor| match deaths {
        0 => got.data().bytes() == expected.data().bytes(),
        _ => difference(got, expected) <= ROUNDING,
    };
    let mut pairs = outcome.tensors().iter().zip(undisturbed.tensors());
    let wrong = pairs.find(|((_, got), (_, expected))| !same(got, expected));
    if let Some(((role, _), _)) = wrong {
        let role: Role = *role;
        let output = format!("{role:?}").to_lowercase();
        return FaultOutcome::Wrong { output };
    }
    match deaths {
        0 => FaultOutcome::Right,
        deaths => FaultOutcome::Survived { deaths },
    }
}

/// What another order of sums may change in f64, relative to the largest number.
const ROUNDING: f64 = 1e-11;

/// The largest difference, relative to the largest number; infinities must agree.
fn difference(got: &Tensor, expected: &Tensor) -> f64 {
    let (got, expected) = (got.to_f64(), expected.to_f64());
    let finite = expected.iter().filter(|x| x.is_finite());
    let scale = finite.fold(1e-3, |most: f64, x| most.max(x.abs()));
    let each = got.iter().zip(&expected).map(|(a, b)| match a == b {
        true => 0.0,
        false => (a - b).abs() / scale,
    });
    // What is no number differs from everything.
    each.fold(0.0, |most, x| match x.is_nan() {
        true => f64::INFINITY,
        false => x.max(most),
    })
}

/// Whether an error is of a kind that hardship may end a rank with, and names that rank, a peer it
/// really waited for, the round and the times.
fn is_named(plan: &Plan, hardship: &FaultConfig, rank: usize, error: &RankError) -> bool {
    let Ok(program) = plan.rank(rank) else {
        return false;
    };
    let expects = |peer: usize, round: usize| {
        // After a death programs are others, and any rank may send to any other.
        if !hardship.deaths.is_empty() && plan.request().redundancy > 0 {
            return peer < plan.ranks() && peer != rank;
        }
        let round = program.rounds.get(round);
        let mut receives = round.iter().flat_map(|round| &round.receives);
        receives.any(|message| message.address.peer == peer)
    };
    match error {
        RankError::Transport(TransportError::Deadline {
            rank: who,
            peer,
            round,
            waited,
            limit,
        }) => {
            let timed = *limit == hardship.deadline && waited == limit;
            *who == rank && expects(*peer, *round) && timed
        }
        RankError::Transport(TransportError::Corrupt {
            rank: who,
            peer,
            round,
            got,
            expected,
            ..
        }) => *who == rank && expects(*peer, *round) && got != expected,
        RankError::Transport(TransportError::PeerFailed {
            rank: who, peer, ..
        }) => *who == rank && *peer != rank,
        RankError::Died { rank: who, round } => {
            let is_it = |at: usize| at == *round || plan.request().redundancy > 0;
            let mut deaths = hardship.deaths.iter();
            *who == rank && deaths.any(|death| death.rank == rank && is_it(death.round))
        }
        RankError::Lost(Error::LostShard { shard, keepers }) => {
            let dies = |rank: usize| hardship.deaths.iter().any(|death| death.rank == rank);
            let kept = plan.keepers(*shard).eq(keepers.iter().copied());
            kept && dies(*shard) && keepers.iter().all(|keeper| dies(*keeper))
        }
        _ => false,
    }
}
