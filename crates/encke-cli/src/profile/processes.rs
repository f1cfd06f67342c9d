//! `encke profile` as several processes: what one ring of this size really holds, process by process,
//! and how much of its messages is hidden behind the computation.
//!
//! The decision here is what hidden means. Messages are first timed alone: the very messages of the
//! plan, round by round, with nothing to compute and everyone ready. What a rank waits in the run
//! itself, after its jobs of a round are done, is what was not hidden, up to what the messages of that
//! round take alone: a longer wait is for a rank that computes longer.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use encke::explain::bytes;
use encke::plan::program::{Component, RankPlan, Role};
use encke::{Activity, Attention, DType, Data, Kernel, Pass, Plan, RankMemory, Request};
use encke_core::transport::{Address, Incoming, Outgoing, Transport};
use encke_ring::ShardCall;
use encke_ring::out_of_core::{FromSource, Generator, RowRange, Source, StreamError};
use serde::{Deserialize, Serialize};

use super::{Options, output, report};
use crate::Verdict;
use crate::cluster::Cluster;
use crate::process::resident_bytes;
use crate::table::Table;
use crate::terminal::{Paint, say, spinner};

/// How often messages are timed alone; the median counts.
const TIMES: usize = 5;
/// Rows of each rank in the call that warms everything up: enough for messages of every kind.
const WARM_ROWS: usize = 64;

/// Generated rows of every tensor.
struct Rows {
    wide: Generator,
    narrow: Generator,
}

impl Source for Rows {
    fn dtype(&self, role: Role) -> DType {
        self.wide.dtype(role)
    }

    fn read(&self, stretch: &RowRange<'_>, to: &mut Data) -> Result<(), StreamError> {
        match stretch.role {
            Role::Lse | Role::Dlse => self.narrow.read(stretch, to),
            _ => self.wide.read(stretch, to),
        }
    }
}

/// What one rank did and held in one pass.
#[derive(Debug, Serialize, Deserialize)]
struct RankPass {
    memory: RankMemory,
    /// Resident with all buffers in use, less what was resident before the first of them.
    resident_growth_bytes: Option<usize>,
    seconds: f64,
    compute_seconds: f64,
    /// Its messages alone, with nothing to hide them.
    hop_seconds: f64,
    /// What it waited in the run, for messages or for whoever sends them.
    wait_seconds: f64,
    /// What of that can be the messages': in no round more than they take alone.
    exposed_seconds: f64,
    sent_bytes: usize,
}

/// One pass of all ranks, as a record has it.
#[derive(Debug, Serialize)]
struct PassRecord<'a> {
    pass: &'static str,
    hop_seconds: f64,
    wait_seconds: f64,
    exposed_seconds: f64,
    hidden: Option<f64>,
    ranks: &'a [RankPass],
}

#[derive(Debug, Serialize)]
struct Record<'a> {
    library: &'a str,
    processes: usize,
    request: &'a Request,
    passes: Vec<PassRecord<'a>>,
}

/// Runs the command.
pub fn run(cluster: &mut Cluster, options: &Options) -> Result<Verdict> {
    let ready = (|| {
        if options.work.csv.is_some() {
            bail!("--csv is not written by several processes; use --json");
        }
        options.device.refuse_in_processes()?;
        let json = match cluster.speaks() {
            true => output(options.work.json.as_deref(), None)?,
            false => None,
        };
        let ring = options.ring(cluster.ranks())?;
        Ok((json, ring.request, Attention::builder().build()?))
    })();
    let (json, request, attention) = cluster.agree(ready)?;
    warm_up(cluster, &request, options)?;
    let mut measured = Vec::new();
    for (name, pass) in passes(options) {
        let progress = cluster.speaks().then(|| spinner(name));
        let request = Request {
            pass,
            ..request.clone()
        };
        let own = measure(cluster, &attention, request, options.work.seed)?;
        drop(progress);
        if let Some(all) = cluster.gather(&own)? {
            measured.push((name, all));
        }
    }
    let told = match cluster.speaks() {
        true => conclude(cluster, &request, &measured, json),
        false => Ok(true),
    };
    let kept = cluster.agree(told)?;
    let kept = cluster.broadcast(cluster.speaks().then_some(kept))?;
    Ok(if kept {
        Verdict::Fine
    } else {
        Verdict::CheckFailed
    })
}

/// Runs the passes once on a few tokens, so that what MPI, threads and the kernel take for
/// themselves, whatever the size of a call, is not counted as memory of this one.
fn warm_up(cluster: &mut Cluster, request: &Request, options: &Options) -> Result<()> {
    // With a kernel of its own: scratch memory stays with the kernel that took it.
    let attention = cluster.agree(Attention::builder().build().map_err(anyhow::Error::from))?;
    let mut few = request.clone();
    few.shape.tokens = few.shape.tokens.min(WARM_ROWS * cluster.ranks());
    // Where no few tokens fit the pattern, which all ranks find alike, there is no warming up.
    if Plan::new(few.clone()).is_err() {
        return Ok(());
    }
    for pass in passes(options) {
        let request = Request {
            pass: pass.1,
            ..few.clone()
        };
        measure(cluster, &attention, request, options.work.seed)?;
    }
    Ok(())
}

/// The passes that are measured, with their names.
fn passes(options: &Options) -> Vec<(&'static str, Pass)> {
    let mut passes = vec![("forward", Pass::Forward)];
    if options.work.grad {
        passes.push(("backward", Pass::Backward { dlse: false }));
    }
    passes
}

/// This process's rank in one pass.
fn measure(
    cluster: &mut Cluster,
    attention: &Attention,
    request: Request,
    seed: u64,
) -> Result<RankPass> {
    let rows = Rows {
        wide: Generator::new(seed, request.shape.dim),
        narrow: Generator::new(seed, 1),
    };
    let made = Plan::new(request).map_err(anyhow::Error::from);
    let plan = cluster.agree(made)?;
    attention.kernel().release_scratch();
    let before = resident_bytes();
    let loaded = (|| {
        let mut shard = ShardCall::new(attention.kernel(), &plan, cluster.rank())?;
        shard.load(&mut FromSource(&rows))?;
        Ok(shard)
    })();
    let mut shard = cluster.agree(loaded)?;
    cluster.wire.begin();
    let begin = Instant::now();
    shard.restart_clock();
    shard.run(&mut cluster.wire)?;
    let seconds = begin.elapsed().as_secs_f64();
    let after = resident_bytes();
    let program = shard.rank().plan().clone();
    let done = shard.finish();
    let total = |of: Activity| -> f64 {
        let events = done.events.iter().filter(|event| event.activity == of);
        events.map(|event| event.duration.as_secs_f64()).sum()
    };
    let alone = hops(cluster, &program)?;
    let waited = |round: usize| -> Duration {
        let events = done.events.iter();
        let waits = events.filter(|e| e.activity == Activity::Wait && e.round == round);
        waits.map(|event| event.duration).sum()
    };
    let exposed = alone.iter().enumerate();
    let exposed = exposed.map(|(round, alone)| waited(round).min(*alone));
    Ok(RankPass {
        resident_growth_bytes: before.zip(after).map(|(b, a)| a.saturating_sub(b)),
        seconds,
        compute_seconds: total(Activity::Compute),
        hop_seconds: alone.iter().sum::<Duration>().as_secs_f64(),
        wait_seconds: total(Activity::Wait),
        exposed_seconds: exposed.sum::<Duration>().as_secs_f64(),
        sent_bytes: done.events.iter().map(|event| event.sent_bytes).sum(),
        memory: done.memory,
    })
}

/// How long the messages of each round take with nothing to compute and everyone ready.
fn hops(cluster: &mut Cluster, program: &RankPlan) -> Result<Vec<Duration>> {
    let bytes = |message: &encke::plan::program::Message| {
        let elements = message.address.elements;
        let bytes = elements * program.buffers[message.buffer.0].dtype.bytes();
        let address = Address {
            elements: bytes,
            ..message.address
        };
        (address, vec![1u8; bytes])
    };
    let mut took = vec![Vec::new(); program.rounds.len()];
    for _ in 0..TIMES {
        for (round, steps) in program.rounds.iter().enumerate() {
            let sends: Vec<(Address, Vec<u8>)> = steps.sends.iter().map(bytes).collect();
            let mut receives: Vec<(Address, Vec<u8>)> = steps.receives.iter().map(bytes).collect();
            cluster.agree(Ok(()))?;
            cluster.wire.begin();
            let outgoing = sends
                .iter()
                .map(|(to, parcel)| Outgoing { to: *to, parcel });
            let outgoing: Vec<Outgoing<'_, Vec<u8>>> = outgoing.collect();
            let incoming = receives.iter_mut().map(|(from, parcel)| Incoming {
                from: *from,
                parcel,
            });
            let mut incoming: Vec<Incoming<'_, Vec<u8>>> = incoming.collect();
            let begin = Instant::now();
            let wire = &mut cluster.wire;
            wire.exchange(round, &outgoing, &mut incoming, &mut || {})?;
            took[round].push(begin.elapsed());
        }
    }
    let median = |mut times: Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    Ok(took.into_iter().map(median).collect())
}

/// Prints and writes what was found; whether no rank held more than was planned.
fn conclude(
    cluster: &Cluster,
    request: &Request,
    passes: &[(&'static str, Vec<RankPass>)],
    json: Option<crate::output::OutputFile>,
) -> Result<bool> {
    let records = passes.iter().map(|(pass, ranks)| {
        let sum = |of: fn(&RankPass) -> f64| ranks.iter().map(of).sum::<f64>();
        let (hops, exposed) = (sum(|r| r.hop_seconds), sum(|r| r.exposed_seconds));
        PassRecord {
            pass,
            hop_seconds: hops,
            wait_seconds: sum(|r| r.wait_seconds),
            exposed_seconds: exposed,
            hidden: (hops > 0.0).then(|| 1.0 - exposed / hops),
            ranks,
        }
    });
    let record = Record {
        library: &cluster.library,
        processes: cluster.ranks(),
        request,
        passes: records.collect(),
    };
    say(&report::heading(request))?;
    say(&format!(
        "{} processes, {}\n",
        record.processes, record.library
    ))?;
    let mut kept = true;
    for pass in &record.passes {
        say(&words(pass))?;
        let over = |rank: &RankPass| held(&rank.memory) > rank.memory.planned_bytes();
        kept &= !pass.ranks.iter().any(over);
    }
    if let Some(mut json) = json {
        json.write(|to| {
            serde_json::to_writer_pretty(&mut *to, &record)?;
            to.write_all(b"\n")
        })?;
        json.keep()?;
    }
    Ok(kept)
}

fn held(memory: &RankMemory) -> usize {
    memory.ledger.total().peak_bytes
}

/// One pass: a line for each rank, and what was hidden.
fn words(pass: &PassRecord<'_>) -> String {
    let components: BTreeMap<Component, ()> = pass
        .ranks
        .iter()
        .flat_map(|rank| &rank.memory.planned)
        .filter(|(_, count)| **count > 0)
        .map(|(component, _)| (*component, ()))
        .collect();
    let mut headings = vec!["rank".to_string()];
    headings.extend(
        components
            .keys()
            .map(|component| component.name().to_string()),
    );
    headings.extend(["held", "planned", "resident", "compute", "waited"].map(str::to_string));
    let mut table = Table::new(2, headings);
    for rank in pass.ranks {
        let total = rank.memory.ledger.total();
        let of = |component: &Component| total.peak.get(component).copied().unwrap_or(0);
        let mut cells = vec![rank.memory.rank.to_string()];
        cells.extend(components.keys().map(|component| bytes(of(component))));
        cells.push(bytes(total.peak_bytes));
        cells.push(bytes(rank.memory.planned_bytes()));
        let grown = rank.resident_growth_bytes;
        cells.push(grown.map_or("-".to_string(), |grown| format!("+{}", bytes(grown))));
        cells.push(format!("{:.3} s", rank.compute_seconds));
        cells.push(format!("{:.1} ms", 1e3 * rank.wait_seconds));
        table.row(cells);
    }
    let title = Paint::stdout().bold(&format!("{}, measured", pass.pass));
    let hidden = match pass.hidden {
        Some(hidden) => format!(
            "messages alone take {:.1} ms, all ranks together; of what was waited in the run, {:.1} ms \
             can be theirs: {:.1} % hidden\n",
            1e3 * pass.hop_seconds,
            1e3 * pass.exposed_seconds,
            100.0 * hidden.max(0.0),
        ),
        None => "no messages\n".to_string(),
    };
    format!("\n{title}\n{table}  {hidden}")
}
