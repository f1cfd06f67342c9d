//! The allowed outcomes of a call with injected faults, used by tests and by `encke verify`.
//!
//! The result must be right to the bit, or every rank must end inside its deadline with an error
//! that names the rank, the peer, the round and the times. A call that recovered from deaths must
//! be right up to rounding, because its sums are in another order.

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
use crate::random_call::RandomCall;

/// The outcome of a [`FaultRun`].
#[derive(Debug, Clone, PartialEq)]
pub enum FaultOutcome {
    /// The bits of a run without faults.
    Correct,
    /// The right values up to rounding, after deaths.
    Survived {
        /// The number of ranks that died.
        deaths: usize,
    },
    /// A valid error on every rank.
    Failed {
        /// The error of the first rank to fail.
        first: RankError,
    },
    /// Wrong values, which is never allowed.
    Wrong {
        /// The output that is wrong.
        output: String,
    },
    /// Any other violation of the contract.
    Violation {
        /// What was violated.
        how: String,
    },
}

impl FaultOutcome {
    /// Whether this outcome is allowed.
    pub fn is_allowed(&self) -> bool {
        !matches!(
            self,
            FaultOutcome::Wrong { .. } | FaultOutcome::Violation { .. }
        )
    }
}

/// The call and the faults of a seed: any configuration, forward or backward.
pub fn random_case(kind: FaultKind, seed: u64) -> encke_core::Result<(RandomCall, FaultConfig)> {
    let backward = (seed / FaultKind::ALL.len() as u64) % 2 == 1;
    let call = RandomCall::new(&Configuration::any(seed), backward)?;
    let config = FaultConfig::random(kind, seed, call.plan.ranks(), call.rounds()?);
    Ok((call, config))
}

/// The same for a call that survives deaths: any configuration that can.
pub fn random_surviving_case(
    kind: FaultKind,
    seed: u64,
    redundancy: usize,
) -> encke_core::Result<(RandomCall, FaultConfig)> {
    let backward = (seed / FaultKind::ALL.len() as u64) % 2 == 1;
    let configurations = (0..).map(|again: u64| Configuration::any(seed ^ (again << 40)));
    let mut configurations =
        configurations.filter(|drawn: &Configuration| drawn.request.sharding.ranks() > redundancy);
    let mut configuration = configurations
        .next()
        .expect("the iterator is infinite, and rings have up to 32 ranks");
    configuration.request.queries = Queries::Sharded;
    configuration.request.redundancy = redundancy;
    configuration.request.schedule.backward = Rotating::Keys;
    let call = RandomCall::new(&configuration, backward)?;
    let (ranks, rounds) = (call.plan.ranks(), call.rounds()?);
    let config = FaultConfig::random(kind, seed, ranks, rounds);
    Ok((call, config.with_more_deaths(ranks, rounds)))
}

/// Runs a call with and without faults, and compares. An error means that the call could not begin.
pub fn run_and_check<K: Kernel<Buffer = Data>>(
    kernel: &K,
    call: &RandomCall,
    config: &FaultConfig,
) -> Result<(FaultRun, FaultOutcome), RingError> {
    let inputs = call.inputs();
    let expected = lockstep::run(kernel, &call.plan, &inputs)?;
    let run = fault_run::run(kernel, &call.plan, &inputs, config)?;
    let outcome = classify(&call.plan, config, &run, &expected);
    Ok((run, outcome))
}

/// Compares a run with the outcome without faults, and checks its errors.
pub fn classify(
    plan: &Plan,
    config: &FaultConfig,
    run: &FaultRun,
    expected: &Outcome,
) -> FaultOutcome {
    let violation = |how: String| FaultOutcome::Violation { how };
    for end in &run.ends {
        let latest = match plan.request().redundancy {
            0 => config.latest_end(end.rank, end.round),
            _ => config.latest_end_of_all(&run.epochs),
        };
        if end.at > latest {
            return violation(format!("rank {} ended after {latest:?}: {end:?}", end.rank));
        }
    }
    let (rank, first, others) = match &run.result {
        Ok(outcome) => return compare(outcome, expected),
        Err(RingError::Rank {
            rank,
            source,
            others,
        }) => (*rank, source, others),
        Err(other) => return violation(format!("not an error of a rank: {other}")),
    };
    if first.is_consequence() {
        return violation(format!("the first failure follows from another: {first}"));
    }
    let all = || {
        let others = others.iter().map(|(rank, error)| (*rank, error));
        others.chain([(rank, first)])
    };
    let mut failed: Vec<usize> = all().map(|(rank, _)| rank).collect();
    failed.sort_unstable();
    if failed != (0..plan.ranks()).collect::<Vec<_>>() {
        return violation(format!("only ranks {failed:?} ended with an error"));
    }
    match all().find(|(rank, error)| !is_valid(plan, config, *rank, error)) {
        Some((rank, error)) => violation(format!("rank {rank} ended with {error:?}")),
        None => FaultOutcome::Failed {
            first: first.clone(),
        },
    }
}

fn compare(outcome: &Outcome, expected: &Outcome) -> FaultOutcome {
    let deaths = outcome.deaths.len();
    let same = |got: &Tensor, expected: &Tensor| match deaths {
        0 => got.data().bytes() == expected.data().bytes(),
        _ => difference(got, expected) <= ROUNDING,
    };
    let mut pairs = outcome.tensors().iter().zip(expected.tensors());
    let wrong = pairs.find(|((_, got), (_, expected))| !same(got, expected));
    if let Some(((role, _), _)) = wrong {
        let role: Role = *role;
        let output = format!("{role:?}").to_lowercase();
        return FaultOutcome::Wrong { output };
    }
    match deaths {
        0 => FaultOutcome::Correct,
        deaths => FaultOutcome::Survived { deaths },
    }
}

/// What another order of summation may change in f64, relative to the largest value.
const ROUNDING: f64 = 1e-11;

/// The largest difference relative to the largest value; infinities must be equal.
fn difference(got: &Tensor, expected: &Tensor) -> f64 {
    let (got, expected) = (got.to_f64(), expected.to_f64());
    let finite = expected.iter().filter(|x| x.is_finite());
    let scale = finite.fold(1e-3, |most: f64, x| most.max(x.abs()));
    let each = got.iter().zip(&expected).map(|(a, b)| match a == b {
        true => 0.0,
        false => (a - b).abs() / scale,
    });
    // NaN differs from everything.
    each.fold(0.0, |most, x| match x.is_nan() {
        true => f64::INFINITY,
        false => x.max(most),
    })
}

/// Whether an error is of a kind that injected faults may cause, and names this rank, a peer that
/// the rank receives from in that round, and the times.
fn is_valid(plan: &Plan, config: &FaultConfig, rank: usize, error: &RankError) -> bool {
    let Ok(program) = plan.rank(rank) else {
        return false;
    };
    let receives_from = |peer: usize, round: usize| {
        // After a death the programs change, and any rank may send to any other.
        if !config.deaths.is_empty() && plan.request().redundancy > 0 {
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
            let timed = *limit == config.deadline && waited == limit;
            *who == rank && receives_from(*peer, *round) && timed
        }
        RankError::Transport(TransportError::Corrupt {
            rank: who,
            peer,
            round,
            got,
            expected,
            ..
        }) => *who == rank && receives_from(*peer, *round) && got != expected,
        RankError::Transport(TransportError::PeerFailed {
            rank: who, peer, ..
        }) => *who == rank && *peer != rank,
        RankError::Died { rank: who, round } => {
            let is_round = |at: usize| at == *round || plan.request().redundancy > 0;
            let mut deaths = config.deaths.iter();
            *who == rank && deaths.any(|death| death.rank == rank && is_round(death.round))
        }
        RankError::Lost(Error::LostShard { shard, keepers }) => {
            let dies = |rank: usize| config.deaths.iter().any(|death| death.rank == rank);
            let kept = plan.keepers(*shard).eq(keepers.iter().copied());
            kept && dies(*shard) && keepers.iter().all(|keeper| dies(*keeper))
        }
        _ => false,
    }
}
