//! `longnet train` as several processes: each is a rank and has its rows of every sequence.
//!
//! Only the attention knows of the others, and the sum of the gradients. One process writes and speaks.
//! The decision here: whatever is read is compared before the first step, because processes that read
//! different texts, or begin with different weights, would learn nonsense and not notice.

use std::sync::{Arc, Mutex};

use anyhow::{Result, anyhow, bail, ensure};
use encke::explain::bytes;
use encke::{HostParcel, Incoming, Moved, Outgoing, ShardAttention, Transport, TransportError};
use encke_candle::{Attention, Shard};
use encke_cli::Verdict;
use encke_cli::cluster::{self, Cluster, locked};
use encke_cli::process::peak_resident_bytes;
use encke_cli::terminal::note;
use encke_core::host::checksum;
use encke_mpi::launcher::Place;
use serde::{Deserialize, Serialize};

use crate::cli::{Cli, Command};
use crate::course::{Course, Ready, Ring};
use crate::settings::Settings;
use crate::train::Options;
use crate::training::{Company, Training};

/// Runs a command as one of several processes.
pub fn run(cli: Cli, place: &Place) -> Result<Verdict> {
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
        (cluster.rank(), cluster.ranks(), cluster.speaks())
    };
    let course = options.course();
    let prepared = (|| {
        let settings = options.settings()?;
        let shard = shard(options, &settings, rank, ranks)?;
        let ready = course.prepare(&settings, speaks)?;
        Ok((settings, shard, ready))
    })();
    let (settings, shard, ready) = locked(shared).agree(prepared)?;
    let mut company = Others(Arc::clone(shared));
    compare(&mut company, &course, &settings, &ready)?;

    let Ready {
        text,
        resumed,
        record,
    } = ready;
    let runs = shard.sharding().runs(settings.tokens, rank);
    let rows = runs.into_iter().flat_map(|run| run.tokens()).collect();
    let line = Line(Arc::clone(shared));
    let ring = Shard::new(shard, settings.tokens, line, |line| {
        locked(&line.0).wire.begin();
    });
    let attention = Attention::on(Arc::new(ring));
    let training = (|| {
        let mut training = Training::new(settings, text, attention, rows, Some(&mut company))?;
        if let Some(from) = &resumed {
            training.resume(from)?;
        }
        Ok(training)
    })();
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

/// This process's rank of the ring.
fn shard(
    options: &Options,
    settings: &Settings,
    rank: usize,
    ranks: usize,
) -> Result<ShardAttention> {
    if let Some(asked) = options.ranks().filter(|asked| *asked != ranks) {
        bail!(
            "--ranks {asked}, but {ranks} processes were started, and each is one rank; leave \
             --ranks out or start as many processes"
        );
    }
    let ring = encke::Attention::builder().pattern(settings.pattern()?);
    let ring = ring.ranks(ranks).sharding(Options::cut());
    let shard = ring.build_shard(rank)?;
    let tokens = settings.tokens;
    let idle = |rank: &usize| shard.sharding().rows(tokens, *rank) == 0;
    if let Some(idle) = (0..ranks).find(idle) {
        bail!(
            "--tokens {tokens} leave rank {idle} of {ranks} without a row; start fewer processes"
        );
    }
    Ok(shard)
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

impl<B: HostParcel> Transport<B> for Line {
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
        let speaker = cluster.speaker();
        let word = cluster.speaks().then_some(own);
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
