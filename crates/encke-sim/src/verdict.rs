//! What a call under hardship must be: right to the bit, or ended on every rank by an error that
//! names what it must, inside the deadline. Tests and the command judge by this.

use encke_core::Data;
use encke_core::conformance::Configuration;
use encke_core::kernel::Kernel;
use encke_core::plan::Plan;
use encke_core::transport::TransportError;
use encke_ring::{Outcome, RankError, RingError};

use crate::hardship::{Death, Hardship, Kind};
use crate::lockstep;
use crate::sample::Sample;
use crate::trial::{self, Trial};

/// How a trial ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// With the bits of an undisturbed run.
    Right,
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

impl Verdict {
    /// Whether this may happen.
    pub fn holds(&self) -> bool {
        matches!(self, Verdict::Right | Verdict::Failed { .. })
    }
}

/// The call and the hardship of a seed: any configuration, forward or backward.
pub fn draw(kind: Kind, seed: u64) -> encke_core::Result<(Sample, Hardship)> {
    let backward = (seed / Kind::ALL.len() as u64) % 2 == 1;
    let sample = Sample::new(&Configuration::random(seed), backward)?;
    let hardship = Hardship::random(kind, seed, sample.plan.ranks(), sample.rounds()?);
    Ok((sample, hardship))
}

/// Runs a call under hardship and undisturbed, and compares. An error says that it could not begin.
pub fn try_out<K: Kernel<Buffer = Data>>(
    kernel: &K,
    sample: &Sample,
    hardship: &Hardship,
) -> Result<(Trial, Verdict), RingError> {
    let inputs = sample.inputs();
    let undisturbed = lockstep::run(kernel, &sample.plan, &inputs)?;
    let trial = trial::run(kernel, &sample.plan, &inputs, hardship)?;
    let verdict = judge(&sample.plan, hardship, &trial, &undisturbed);
    Ok((trial, verdict))
}

/// Holds a trial against the undisturbed run, and its errors against what they must say.
pub fn judge(plan: &Plan, hardship: &Hardship, trial: &Trial, undisturbed: &Outcome) -> Verdict {
    let broken = |how: String| Verdict::Broken { how };
    for end in &trial.ends {
        let latest = hardship.latest_end(end.rank, end.round);
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
        None => Verdict::Failed {
            first: first.clone(),
        },
    }
}

fn compare(outcome: &Outcome, undisturbed: &Outcome) -> Verdict {
    let pairs = outcome.tensors().iter().zip(undisturbed.tensors());
    for ((role, got), (_, expected)) in pairs {
        if got.data().bytes() != expected.data().bytes() {
            let output = format!("{role:?}").to_lowercase();
            return Verdict::Wrong { output };
        }
    }
    Verdict::Right
}

/// Whether an error is of a kind that hardship may end a rank with, and names that rank, a peer it
/// really waited for, the round and the times.
fn is_named(plan: &Plan, hardship: &Hardship, rank: usize, error: &RankError) -> bool {
    let Ok(program) = plan.rank(rank) else {
        return false;
    };
    let expects = |peer: usize, round: usize| {
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
            let round = *round;
            *who == rank && hardship.death == Some(Death { rank, round })
        }
        _ => false,
    }
}
