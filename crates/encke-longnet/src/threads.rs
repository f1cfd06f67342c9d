//! `longnet train` on a ring of threads: each is a rank and has its rows of every sequence.
//!
//! What processes do, without any: the same steps, summed in the same order, with the same bits. The
//! decision here: a rank that fails says so to all others at once, and its error is the one that counts.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use encke::Data;
use encke::threads::{Endpoint, endpoints};
use encke_lab::AlreadyReported;
use encke_ring::collectives::Collectives;

use crate::course::{Course, Ready, Ring};
use crate::rank;
use crate::settings::Settings;
use crate::training::{Company, Training};

/// How long a rank may wait for another one.
const DEADLINE: Duration = Duration::from_secs(600);

/// Trains on a ring of `ranks` threads.
pub fn train(settings: &Settings, course: &Course<'_>, ranks: usize) -> Result<()> {
    let mut ready = course.prepare(settings, true)?;
    let record = ready.record.take();
    let members = (0..ranks)
        .zip(endpoints(ranks, DEADLINE))
        .zip(endpoints(ranks, DEADLINE));
    let members: Vec<Member> = members
        .map(|((rank, line), table)| Member {
            rank,
            ranks,
            line,
            table,
        })
        .collect();
    let Some(failed) = members.first().map(|member| member.table.group()) else {
        bail!("--ranks is 0; it must be at least 1");
    };
    let ended: Vec<Result<Trained>> = std::thread::scope(|scope| {
        let work = |member: Member| {
            let alarm = member.alarm();
            let thread = std::thread::Builder::new();
            let thread = thread.spawn_scoped(scope, || member.train(settings, course, &ready));
            thread.map_err(|error| alarm(anyhow!(error).context("no thread for a rank")))
        };
        let threads: Vec<_> = members.into_iter().map(work).collect();
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
            // The others only say that this one has failed.
            Err(error) if first.is_none_or(|first| first == rank) => return Err(error),
            Err(_) => {}
        }
    }
    let most = done.iter().map(|(training, _)| training.rank_bytes()).max();
    let ring = Ring {
        ranks,
        processes: false,
        rank_bytes: most.unwrap_or(0),
    };
    let (training, seconds) = done.swap_remove(0);
    course.conclude(&training, seconds, &ring, record)
}

/// A rank's training at its end, and the seconds of its steps.
type Trained = (Training, Vec<f64>);

/// A thread that is a rank.
struct Member {
    rank: usize,
    ranks: usize,
    line: Endpoint<Data>,
    table: Endpoint<Vec<u8>>,
}

impl Member {
    /// Tells all others that this one has failed, and why.
    fn alarm(&self) -> impl Fn(anyhow::Error) -> anyhow::Error + use<> {
        let (rank, line, table) = (self.rank, self.line.group(), self.table.group());
        move |error| {
            let words = format!("{error:#}");
            // Whoever hears of it at the line must not be the first one at the table.
            table.fail(rank, words.clone());
            line.fail(rank, words);
            error
        }
    }

    fn train(self, settings: &Settings, course: &Course<'_>, ready: &Ready) -> Result<Trained> {
        let alarm = self.alarm();
        let ended = catch_unwind(AssertUnwindSafe(|| {
            // Its share of the cores: ranks that take them from one another only wait.
            let cores = (rayon::current_num_threads() / self.ranks).max(1);
            let pool = rayon::ThreadPoolBuilder::new().num_threads(cores).build();
            let pool = pool.context("no threads for a rank")?;
            pool.install(|| self.take_steps(settings, course, ready))
        }));
        // A panic has been reported already.
        ended
            .unwrap_or_else(|_| Err(AlreadyReported.into()))
            .map_err(alarm)
    }

    fn take_steps(
        self,
        settings: &Settings,
        course: &Course<'_>,
        ready: &Ready,
    ) -> Result<Trained> {
        let rank = self.rank;
        let shard = rank::shard(settings, rank, self.ranks)?;
        let company = Table {
            rank,
            members: (0..self.ranks).collect(),
            end: self.table,
        };
        let line = (self.line, (|_| ()) as fn(&mut Endpoint<Data>));
        let mut training = rank::training(settings, ready, shard, line, Box::new(company))?;
        let seconds = course.take(&mut training, rank == 0)?;
        Ok((training, seconds))
    }
}

/// The other threads, as the training knows them.
struct Table {
    rank: usize,
    members: Vec<usize>,
    end: Endpoint<Vec<u8>>,
}

impl Company for Table {
    fn sum(&mut self, numbers: &[f32]) -> Result<Vec<f32>> {
        Ok(Collectives::new(&mut self.end, self.rank, &self.members).sum(numbers)?)
    }

    fn same(&mut self, what: &str, own: u64) -> Result<()> {
        let mut meeting = Collectives::new(&mut self.end, self.rank, &self.members);
        let first = meeting.broadcast(own.to_le_bytes().to_vec())?;
        ensure!(
            first == own.to_le_bytes(),
            "{what} here and on rank 0 are not the same: a bug in longnet"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_fails_ends_the_others_at_once_with_its_words() {
        let (mut lines, mut tables) = (endpoints(2, DEADLINE), endpoints(2, DEADLINE));
        let member = Member {
            rank: 1,
            ranks: 2,
            line: lines.remove(1),
            table: tables.remove(1),
        };
        let mut other = Table {
            rank: 0,
            members: vec![0, 1],
            end: tables.remove(0),
        };
        member.alarm()(anyhow!("no paper").context("cannot write"));
        let error = other.sum(&[1.0]).unwrap_err().to_string();
        assert!(
            error.contains("rank 1 failed: cannot write: no paper"),
            "{error}"
        );
    }
}
