//! `longnet train` on a ring of threads: each is a rank and has its rows of every sequence.
//!
//! The steps are those of several processes, summed in the same order, with the same bits. The
//! decision here: a rank that fails notifies all others at once, and its error is the one reported.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use encke::Data;
use encke::threads::{Endpoint, endpoints};
use encke_lab::AlreadyReported;
use encke_ring::collectives::Collectives;

use crate::rank;
use crate::settings::TrainingConfig;
use crate::trainer::{ReplicaGroup, Trainer};
use crate::training_run::{RunInputs, TrainingRing, TrainingRun};

/// How long a rank may wait for another one.
const DEADLINE: Duration = Duration::from_secs(600);

/// Trains on a ring of `ranks` threads.
pub fn train(settings: &TrainingConfig, run: &TrainingRun<'_>, ranks: usize) -> Result<()> {
    let mut inputs = run.prepare(settings, true)?;
    let record = inputs.record.take();
    let threads = (0..ranks)
        .zip(endpoints(ranks, DEADLINE))
        .zip(endpoints(ranks, DEADLINE));
    let threads: Vec<RankThread> = threads
        .map(|((rank, ring), reduce)| RankThread {
            rank,
            ranks,
            ring,
            reduce,
        })
        .collect();
    let Some(failed) = threads.first().map(|thread| thread.reduce.group()) else {
        bail!("--ranks is 0; it must be at least 1");
    };
    let ended: Vec<Result<Trained>> = std::thread::scope(|scope| {
        let spawn = |rank: RankThread| {
            let abort = rank.abort_others();
            let thread = std::thread::Builder::new();
            let thread = thread.spawn_scoped(scope, || rank.train(settings, run, &inputs));
            thread.map_err(|error| abort(anyhow!(error).context("no thread for a rank")))
        };
        let threads: Vec<_> = threads.into_iter().map(spawn).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<Trained>>| {
            thread
                .join()
                .unwrap_or_else(|_| Err(AlreadyReported.into()))
        };
        threads.into_iter().map(|thread| join(thread?)).collect()
    });
    let first = failed.failure().map(|(rank, _)| rank);
    let mut done = Vec::new();
    for (rank, ended) in ended.into_iter().enumerate() {
        match ended {
            Ok(trained) => done.push(trained),
            // The errors of the others only report that this rank failed.
            Err(error) if first.is_none_or(|first| first == rank) => return Err(error),
            Err(_) => {}
        }
    }
    let most = done.iter().map(|(trainer, _)| trainer.rank_bytes()).max();
    let ring = TrainingRing {
        ranks,
        processes: false,
        rank_bytes: most.unwrap_or(0),
    };
    let (trainer, seconds) = done.swap_remove(0);
    run.finish(&trainer, seconds, &ring, record)
}

/// A rank's trainer after the last step, and the seconds of its steps.
type Trained = (Trainer, Vec<f64>);

/// A rank and its two channels: the attention's ring, and the all-reduce of gradients.
struct RankThread {
    rank: usize,
    ranks: usize,
    ring: Endpoint<Data>,
    reduce: Endpoint<Vec<u8>>,
}

impl RankThread {
    /// Reports this rank's failure to all others.
    fn abort_others(&self) -> impl Fn(anyhow::Error) -> anyhow::Error + use<> {
        let (rank, ring, reduce) = (self.rank, self.ring.group(), self.reduce.group());
        move |error| {
            let message = format!("{error:#}");
            // `reduce` first: a rank that sees the failure in `ring` must not be the first to
            // report one in `reduce`.
            reduce.fail(rank, message.clone());
            ring.fail(rank, message);
            error
        }
    }

    fn train(
        self,
        settings: &TrainingConfig,
        run: &TrainingRun<'_>,
        inputs: &RunInputs,
    ) -> Result<Trained> {
        let abort = self.abort_others();
        let ended = catch_unwind(AssertUnwindSafe(|| {
            // An equal share of the cores, so that ranks do not compete for them.
            let cores = (rayon::current_num_threads() / self.ranks).max(1);
            let pool = rayon::ThreadPoolBuilder::new().num_threads(cores).build();
            let pool = pool.context("no threads for a rank")?;
            pool.install(|| self.take_steps(settings, run, inputs))
        }));
        // The panic hook has printed the panic already.
        ended
            .unwrap_or_else(|_| Err(AlreadyReported.into()))
            .map_err(abort)
    }

    fn take_steps(
        self,
        settings: &TrainingConfig,
        run: &TrainingRun<'_>,
        inputs: &RunInputs,
    ) -> Result<Trained> {
        let rank = self.rank;
        let shard = rank::shard(settings, rank, self.ranks)?;
        let group = SumGroup {
            rank,
            ranks: (0..self.ranks).collect(),
            endpoint: self.reduce,
        };
        let ring = (self.ring, (|_| ()) as fn(&mut Endpoint<Data>));
        let mut trainer = rank::trainer(settings, inputs, shard, ring, Box::new(group))?;
        let seconds = run.take_steps(&mut trainer, rank == 0)?;
        Ok((trainer, seconds))
    }
}

/// All threads of the ring.
struct SumGroup {
    rank: usize,
    ranks: Vec<usize>,
    endpoint: Endpoint<Vec<u8>>,
}

impl ReplicaGroup for SumGroup {
    fn all_reduce_sum(&mut self, terms: &[f32], counts: &[usize]) -> Result<Vec<f32>> {
        let mut collectives = Collectives::new(&mut self.endpoint, self.rank, &self.ranks);
        Ok(collectives.sum_terms(terms, counts)?)
    }

    fn check_equal(&mut self, what: &str, checksum: u64) -> Result<()> {
        let mut collectives = Collectives::new(&mut self.endpoint, self.rank, &self.ranks);
        let expected = collectives.broadcast(checksum.to_le_bytes().to_vec())?;
        ensure!(
            expected == checksum.to_le_bytes(),
            "{what} here and on rank 0 are not the same: a bug in longnet"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_rank_aborts_the_others_with_its_message() {
        let (mut rings, mut reduces) = (endpoints(2, DEADLINE), endpoints(2, DEADLINE));
        let failed = RankThread {
            rank: 1,
            ranks: 2,
            ring: rings.remove(1),
            reduce: reduces.remove(1),
        };
        let mut other = SumGroup {
            rank: 0,
            ranks: vec![0, 1],
            endpoint: reduces.remove(0),
        };
        failed.abort_others()(anyhow!("disk full").context("cannot write"));
        let error = other
            .all_reduce_sum(&[1.0], &[1, 1])
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("rank 1 failed: cannot write: disk full"),
            "{error}"
        );
    }
}
