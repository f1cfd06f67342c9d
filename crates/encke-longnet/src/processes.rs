//! `longnet train` as several processes: each is a rank and has its rows of every sequence.
//!
//! Processes communicate in the attention and in the all-reduce of the gradients. The root writes
//! and prints. The decision here: files are compared before the first step, as arguments are,
//! because processes with different texts or initial weights would train nonsense unnoticed.

use std::sync::{Arc, Mutex};

use anyhow::{Result, anyhow, bail};
use encke::explain::bytes;
use encke::{HostWireBuffer, Incoming, Moved, Outgoing, Transport, TransportError};
use encke_core::host::checksum;
use encke_lab::Verdict;
use encke_lab::cluster::{self, Cluster, locked};
use encke_lab::process::peak_resident_bytes;
use encke_lab::terminal::note;
use encke_mpi::launcher::LaunchedProcess;
use serde::{Deserialize, Serialize};

use crate::cli::{LongnetCli, LongnetCommand};
use crate::rank;
use crate::train::Options;
use crate::trainer::ReplicaGroup;
use crate::training_run::{RunInputs, TrainingRing};

/// Runs a command as one of several processes.
pub fn run(cli: Result<LongnetCli>, place: &LaunchedProcess) -> Result<Verdict> {
    cluster::run(("longnet", place), cli, None, |cli, shared| {
        match cli.command {
        LongnetCommand::Train(options) => train(shared, &options),
        command if locked(shared).ranks() == 1 => crate::run(LongnetCli { command }),
        _ => locked(shared).agree(Err(anyhow!(
            "this command runs alone; start it without a launcher (train runs as several processes)"
        ))),
    }
    })
}

fn train(shared: &Arc<Mutex<Cluster>>, options: &Options) -> Result<Verdict> {
    let (rank, ranks, is_root) = {
        let cluster = locked(shared);
        (cluster.rank(), cluster.ranks(), cluster.is_root())
    };
    let run = options.training_run();
    let prepared = (|| {
        let settings = options.settings()?;
        check_ranks(options, ranks)?;
        let shard = rank::shard(&settings, rank, ranks)?;
        let inputs = run.prepare(&settings, is_root)?;
        Ok((settings, shard, inputs))
    })();
    let (settings, shard, mut inputs) = locked(shared).agree(prepared)?;
    let record = inputs.record.take();
    let mut group = MpiGroup(Arc::clone(shared));
    compare(&mut group, &inputs)?;

    let begin: fn(&mut ClusterTransport) = |transport| locked(&transport.0).wire.begin();
    let transport = (ClusterTransport(Arc::clone(shared)), begin);
    let trainer = rank::trainer(&settings, &inputs, shard, transport, Box::new(group));
    let mut trainer = locked(shared).agree(trainer)?;
    let seconds = run.take_steps(&mut trainer, is_root)?;

    let memory = PeakMemory {
        attention_bytes: trainer.rank_bytes(),
        resident_bytes: peak_resident_bytes(),
    };
    let all = locked(shared).gather(&memory)?;
    let finished = all.map_or(Ok(()), |all| {
        let most = all.iter().map(|memory| memory.attention_bytes).max();
        let ring = TrainingRing {
            ranks,
            processes: true,
            rank_bytes: most.unwrap_or(0),
        };
        run.finish(&trainer, seconds, &ring, record)?;
        all.iter().enumerate().for_each(PeakMemory::print);
        Ok(())
    });
    locked(shared).agree(finished)?;
    Ok(Verdict::Fine)
}

/// Refuses a --ranks that differs from the number of processes, which are the ranks.
fn check_ranks(options: &Options, processes: usize) -> Result<()> {
    if let Some(ranks) = options.ranks().filter(|ranks| *ranks != processes) {
        bail!(
            "--ranks {ranks}, but {processes} processes were started, and each is one rank; leave \
             --ranks out or start as many processes"
        );
    }
    Ok(())
}

/// Refuses processes whose texts or checkpoints differ.
fn compare(group: &mut MpiGroup, inputs: &RunInputs) -> Result<()> {
    group.check_equal("the text", checksum(inputs.text.bytes()))?;
    let from = inputs.resumed.as_ref();
    group.check_equal(
        "the checkpoint",
        from.map_or(0, |file| checksum(file.bytes())),
    )
}

/// Peak memory of a process.
#[derive(Debug, Serialize, Deserialize)]
struct PeakMemory {
    attention_bytes: usize,
    resident_bytes: Option<usize>,
}

impl PeakMemory {
    fn print((rank, memory): (usize, &PeakMemory)) {
        let resident = match memory.resident_bytes {
            Some(most) => format!(", its process {} resident", bytes(most)),
            None => String::new(),
        };
        note(&format!(
            "memory   rank {rank} held {} in attention{resident}",
            bytes(memory.attention_bytes)
        ));
    }
}

/// The cluster's wire as a transport that the attention can own.
struct ClusterTransport(Arc<Mutex<Cluster>>);

impl<B: HostWireBuffer> Transport<B> for ClusterTransport {
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

/// All processes of the launch.
struct MpiGroup(Arc<Mutex<Cluster>>);

impl ReplicaGroup for MpiGroup {
    fn all_reduce_sum(&mut self, terms: &[f32], counts: &[usize]) -> Result<Vec<f32>> {
        locked(&self.0).sum_terms(terms, counts)
    }

    fn check_equal(&mut self, what: &str, checksum: u64) -> Result<()> {
        locked(&self.0).check_equal(what, checksum)
    }
}
