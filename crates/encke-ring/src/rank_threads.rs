//! Ranks on threads of this process: starts them, connects them, and joins them.
//!
//! What a rank does on its thread is the caller's closure. The decision here: the thread that
//! failed first is the one the call's error names; the others, which stopped because of it, are
//! listed beside it.

use std::time::{Duration, Instant};

use encke_core::kernel::Kernel;

use crate::error::{RankError, RingError, catch_panic};
use crate::rank::Rank;
use crate::threads::{Endpoint, endpoints};
use crate::trace::{Event, Recorder};

/// How the ranks of a call ended that has a result.
#[derive(Debug)]
pub struct JoinedRanks {
    /// What the surviving ranks recorded.
    pub events: Vec<Event>,
    /// The ranks that died, and how. Empty unless the call survives deaths.
    pub deaths: Vec<(usize, RankError)>,
}

/// What one rank recorded, or how it failed.
pub type RankResult = Result<Vec<Event>, RankError>;

/// Runs `work` for every rank on a thread of its own, each with one endpoint of the transport that
/// connects them. No exchange waits longer than `deadline`. A panic counts as an error of its rank.
/// A failure stops the other ranks; where the call `survives` deaths, a death does not.
pub fn run_on_threads<K: Kernel>(
    ranks: &mut [Rank<K>],
    deadline: Duration,
    survives: bool,
    work: impl Fn(&mut Rank<K>, Endpoint<K::Buffer>, &mut Recorder) -> Result<(), RankError> + Sync,
) -> Result<JoinedRanks, RingError> {
    let origin = Instant::now();
    let run = |rank: &mut Rank<K>, endpoint: Endpoint<K::Buffer>| {
        let number = rank.plan().rank;
        let mut recorder = Recorder::new(number, origin);
        let group = endpoint.group();
        let result = catch_panic(|| work(rank, endpoint, &mut recorder));
        match &result {
            Err(error) if survives && error.is_death() => group.mark_dead(number),
            Err(error) if !error.is_consequence() => group.fail(number, error.to_string()),
            _ => {}
        }
        result.map(|()| recorder.finish())
    };
    let endpoints = endpoints(ranks.len(), deadline);
    let group = endpoints.first().map(Endpoint::group);
    let results = match ranks {
        // One rank runs on the caller's thread: starting a thread takes as long as a short call.
        [rank] => endpoints
            .into_iter()
            .map(|endpoint| run(rank, endpoint))
            .collect(),
        ranks => spawn_and_join(ranks, endpoints, &run)?,
    };
    let first = group.and_then(|group| group.failure());
    join_results(results, first.map(|(rank, _)| rank), survives)
}

fn spawn_and_join<K: Kernel>(
    ranks: &mut [Rank<K>],
    endpoints: Vec<Endpoint<K::Buffer>>,
    run: &(impl Fn(&mut Rank<K>, Endpoint<K::Buffer>) -> RankResult + Sync),
) -> Result<Vec<RankResult>, RingError> {
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (rank, endpoint) in ranks.iter_mut().zip(endpoints) {
            let number = rank.plan().rank;
            let group = endpoint.group();
            let named = std::thread::Builder::new().name(format!("encke-rank-{number}"));
            match named.spawn_scoped(scope, move || run(rank, endpoint)) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    // The ranks that are running must stop, or the scope would wait for them.
                    group.fail(number, error.to_string());
                    return Err(RingError::Thread {
                        rank: number,
                        reason: error.to_string(),
                    });
                }
            }
        }
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().expect("a rank catches its own panics")
        };
        Ok(threads.into_iter().map(join).collect())
    })
}

/// What the ranks recorded, and which of them died. Where the call `survives` and a rank has
/// finished, deaths do not fail it; any other failure does, and the error names the rank that
/// failed `first`.
pub fn join_results(
    results: Vec<RankResult>,
    first: Option<usize>,
    survives: bool,
) -> Result<JoinedRanks, RingError> {
    let survives = survives && results.iter().any(Result::is_ok);
    let (mut events, mut errors) = (Vec::new(), Vec::new());
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Ok(recorded) => events.extend(recorded),
            Err(error) => errors.push((rank, error)),
        }
    }
    if errors.iter().all(|(_, error)| survives && error.is_death()) {
        let deaths = errors;
        return Ok(JoinedRanks { events, deaths });
    }
    let at = errors.iter().position(|(rank, _)| Some(*rank) == first);
    let (rank, source) = errors.remove(at.unwrap_or(0));
    Err(RingError::Rank {
        rank,
        source,
        others: errors,
    })
}
