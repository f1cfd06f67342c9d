//! `longnet train` as several processes: each is a rank and has its rows of every sequence.
//!
//! Only the attention knows of the others, and the sum of the gradients. One process writes and speaks.
//! The decision here: whatever is read is compared before the first step, because processes that read
//! different texts, or begin with different weights, would learn nonsense and not notice.

use std::sync::{Arc, Mutex};

use anyhow::{Result, anyhow, bail, ensure};
use encke::explain::bytes;
use encke::{HostWireBuffer, Incoming, Moved, Outgoing, Transport, TransportError};
use encke_core::host::checksum;
use encke_lab::Verdict;
use encke_lab::cluster::{self, Cluster, locked};
use encke_lab::process::peak_resident_bytes;
use encke_lab::terminal::note;
use encke_mpi::launcher::LaunchedProcess;
use serde::{Deserialize, Serialize};

use crate::cli::{Cli, Command};
use crate::course::{Course, Ready, Ring};
use crate::rank;
use crate::settings::Settings;
use crate::train::Options;
use crate::training::Company;

/// Runs a command as one of several processes.
pub fn run(cli: Cli, place: &LaunchedProcess) -> Result<Verdict> {
    cluster::run("longnet", place, |shared| match cli.command {
        Command::Train(options) => train(shared, &options),
        command if locked(shared).ranks() == 1 => crate::run(Cli { command }),
        _ => locked(shared).agree(Err(anyhow!(
            "this command runs alone; start it without a launcher (train runs as several processes)"
        ))),
    })
}

fn train(shared: &Arc<Mutex<Cluster>>, options: &Options) -> Result<Verdict> {
    let (rank, ranks, speaks) = {
        let cluster = locked(shared);
        (cluster.rank(), cluster.ranks(), cluster.is_root())
    };
    let course = options.course();
    let prepared = (|| {
        let settings = options.settings()?;
        check_ranks(options, ranks)?;
        let shard = rank::shard(&settings, rank, ranks)?;
        let ready = course.prepare(&settings, speaks)?;
        Ok((settings, shard, ready))
    })();
    let (settings, shard, mut ready) = locked(shared).agree(prepared)?;
    let record = ready.record.take();
    let mut company = Others(Arc::clone(shared));
    compare(&mut company, &course, &settings, &ready)?;

    let begin: fn(&mut Line) = |line| locked(&line.0).wire.begin();
    let line = (Line(Arc::clone(shared)), begin);
    let training = rank::training(&settings, &ready, shard, line, Box::new(company));
    let mut training = locked(shared).agree(training)?;
    let seconds = course.take(&mut training, speaks)?;

    let held = Held {
        attention_bytes: training.rank_bytes(),
        resident_bytes: peak_resident_bytes(),
    };
    let all = locked(shared).gather(&held)?;
    let concluded = all.map_or(Ok(()), |all| {
        let most = all.iter().map(|held| held.attention_bytes).max();
        let ring = Ring {
            ranks,
            processes: true,
            rank_bytes: most.unwrap_or(0),
        };
        course.conclude(&training, seconds, &ring, record)?;
        all.iter().enumerate().for_each(Held::tell);
        Ok(())
    });
    locked(shared).agree(concluded)?;
    Ok(Verdict::Fine)
}

/// Processes are the ranks, so there is nothing to choose.
fn check_ranks(options: &Options, processes: usize) -> Result<()> {
    if let Some(ranks) = options.ranks().filter(|ranks| *ranks != processes) {
        bail!(
            "--ranks {ranks}, but {processes} processes were started, and each is one rank; leave \
             --ranks out or start as many processes"
        );
    }
    Ok(())
}

/// Whether everybody is about to do the same.
fn compare(
    company: &mut Others,
    course: &Course<'_>,
    settings: &Settings,
    ready: &Ready,
) -> Result<()> {
    let options = serde_json::to_vec(&(settings, course.last, course.every))?;
    company.same("the options", checksum(&options))?;
    company.same("the text", checksum(ready.text.bytes()))?;
    let from = ready.resumed.as_ref();
    company.same(
        "the checkpoint",
        from.map_or(0, |read| checksum(read.bytes())),
    )
}

/// What a process had in memory, at most.
#[derive(Debug, Serialize, Deserialize)]
struct Held {
    attention_bytes: usize,
    resident_bytes: Option<usize>,
}

impl Held {
    fn tell((rank, held): (usize, &Held)) {
        let resident = match held.resident_bytes {
            Some(most) => format!(", its process {} resident", bytes(most)),
            None => String::new(),
        };
        note(&format!(
            "memory   rank {rank} held {} in attention{resident}",
            bytes(held.attention_bytes)
        ));
    }
}

/// The wire, as the attention of a model holds it.
struct Line(Arc<Mutex<Cluster>>);

impl<B: HostWireBuffer> Transport<B> for Line {
    fn exchange(
        &mut self,
        round: usize,
        outgoing: &[Outgoing<'_, B>],
        incoming: &mut [Incoming<'_, B>],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Moved, TransportError> {
        let wire = &mut locked(&self.0).wire;
        wire.exchange(round, outgoing, incoming, meanwhile)
    }
}

/// The other processes, as the training knows them.
struct Others(Arc<Mutex<Cluster>>);

impl Company for Others {
    fn sum(&mut self, numbers: &[f32]) -> Result<Vec<f32>> {
        locked(&self.0).sum(numbers)
    }

    fn same(&mut self, what: &str, own: u64) -> Result<()> {
        let mut cluster = locked(&self.0);
        let speaker = cluster.root();
        let word = cluster.is_root().then_some(own);
        let first: u64 = cluster.broadcast(word)?;
        let equal = (|| {
            ensure!(
                own == first,
                "{what} here and on rank {speaker} are not the same; every process must have the \
                 same options, files and kind of processor"
            );
            Ok(())
        })();
        cluster.agree(equal)
    }
}
