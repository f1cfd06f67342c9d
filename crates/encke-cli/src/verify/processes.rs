//! `encke verify` as several processes: whether this MPI moves messages as it should, and whether
//! ranks that are processes return the bits of ranks that are threads, and of the simulator.
//!
//! Every process computes the whole call beside its own part of it, by threads and in the simulator,
//! and compares its own rows. The results of threads are held against the f64 reference by one of
//! them.

use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use encke::conformance::{self, Configuration};
use encke::plan::program::Role;
use encke::{Attention, Data, Pass, Tensor};
use encke_cpu::CpuKernel;
use encke_ring::{CallInputs, Rank, ShardCall, ThreadRing};
use encke_sim::lockstep;
use encke_sim::random_call::RandomCall;

use super::case::Case;
use super::{Options, Suite, clock_seed, judge, limit, summary};
use crate::Verdict;
use crate::cluster::Cluster;
use crate::device_option::Device;
use crate::terminal::{Paint, bar, say};

/// How long an exchange of these small calls may wait.
const DEADLINE: Duration = Duration::from_secs(120);
/// Bytes of a piece when messages are cut up: the suite's messages then have several.
const PIECE: usize = 1000;

/// Runs the command.
pub fn run(cluster: &mut Cluster, options: &Options) -> Result<Verdict> {
    let ready = (|| {
        if options.faults {
            bail!("--faults is the simulator's, in one process; start it without a launcher");
        }
        options.device.refuse_in_processes()?;
        let limit = limit(options)?;
        Ok((limit, Attention::builder().build()?))
    })();
    let (limit, attention) = cluster.agree(ready)?;
    cluster.wire.set_deadline(DEADLINE);
    let own = cluster
        .speaks()
        .then(|| options.seed.unwrap_or_else(clock_seed));
    let seed: u64 = cluster.broadcast(own)?;
    let paint = Paint::stdout();
    let speaks = cluster.speaks();
    let tell = |text: &str| match speaks {
        true => say(text),
        false => Ok(()),
    };
    tell(&format!(
        "seed {seed}, {} processes, {}\n",
        cluster.ranks(),
        cluster.library
    ))?;
    for piece in [usize::MAX, PIECE] {
        cluster.wire.set_longest_piece(piece);
        cluster.wire.begin();
        let (rank, ranks) = (cluster.rank(), cluster.ranks());
        let suite = conformance::transport(rank, ranks, &mut cluster.wire);
        if let Err(wrong) = cluster.all_right(suite.map_err(anyhow::Error::from))? {
            tell(&format!(
                "{} the transport: {wrong}\n",
                paint.red("failed:")
            ))?;
            return Ok(Verdict::CheckFailed);
        }
    }
    tell("messages: the suite for transports is passed, whole and in pieces\n")?;

    let begin = Instant::now();
    let progress = speaks.then(|| bar(options.count));
    let mut suite = Suite::reference(Device::Cpu)?;
    let (mut ran, mut failed) = (0, 0);
    let mut go_on = true;
    while go_on && ran < options.count {
        let seed = seed.wrapping_add(ran as u64);
        let case = Case::on(seed, cluster.ranks());
        let own = compare(cluster, &attention, &case)?;
        let own = own.and_then(|()| match &mut suite {
            Suite::Reference(works, worst) if speaks => judge::judge(&case, works, worst),
            _ => Ok(()),
        });
        if let Err(wrong) = cluster.all_right(own)? {
            failed += 1;
            let again = format!("encke verify --seed {seed} --count 1, as many processes");
            tell(&format!(
                "{} {case}\n  {wrong}\n  reproduce: {again}\n",
                paint.red("failed:")
            ))?;
        }
        ran += 1;
        progress.iter().for_each(|bar| bar.inc(1));
        go_on = cluster.broadcast(speaks.then(|| begin.elapsed() < limit))?;
    }
    progress.iter().for_each(|bar| bar.finish_and_clear());
    tell(&summary(
        options,
        paint,
        ran,
        failed,
        begin.elapsed(),
        &suite,
    ))?;
    if failed == 0 {
        tell("every rank has the bits of threads and of the simulator, forward and backward\n")?;
    }
    Ok(match failed {
        0 => Verdict::Fine,
        _ => Verdict::CheckFailed,
    })
}

/// Both passes of a case: this process's rows against those of threads and of the simulator. The
/// outer error is the wire's, the inner one what is wrong.
fn compare(cluster: &mut Cluster, attention: &Attention, case: &Case) -> Result<Result<()>> {
    let kernel = attention.kernel();
    let ring = judge::attention(case)?;
    for (pass, backward) in [("forward", false), ("backward", true)] {
        let plan = ring.plan(case.shape, case.dtype, Pass::Forward)?;
        let configuration = Configuration {
            request: plan.request().clone(),
            seed: case.seed,
        };
        let sample = RandomCall::new(&configuration, backward)?;
        let (plan, inputs) = (&sample.plan, sample.inputs());
        let mut shard = ShardCall::new(kernel, plan, cluster.rank())?;
        shard.load(&mut CallInputs::Whole(&inputs))?;
        cluster.wire.begin();
        shard.run(&mut cluster.wire)?;
        let threads = ThreadRing::new(CpuKernel::new()?, DEADLINE).run(plan.request(), &inputs)?;
        let simulated = lockstep::run(kernel, plan, &inputs)?;
        for (what, outcome) in [("threads", threads), ("the simulator", simulated)] {
            for (role, tensor) in outcome.tensors() {
                let same = same_rows(kernel, shard.rank(), *role, tensor);
                let same = same.map_err(|e| anyhow!("{pass}, {role:?}, against {what}: {e}"));
                if same.is_err() {
                    return Ok(same);
                }
            }
        }
    }
    Ok(Ok(()))
}

/// Whether a rank's rows of an output have the bits that a whole tensor has there.
fn same_rows(kernel: &CpuKernel, rank: &Rank<CpuKernel>, role: Role, whole: &Tensor) -> Result<()> {
    let mut own = Tensor::zeros(whole.dtype(), whole.dims());
    rank.store(kernel, role, &mut own)?;
    let [b, _, h, d] = whole.dims();
    for port in rank.plan().outputs.iter().filter(|port| port.role == role) {
        let count: usize = port.runs.iter().map(|run| run.count).sum();
        let rows = |of: &Tensor| {
            let mut rows = Data::zeros(of.dtype(), b * count * h * d);
            encke_core::host::upload(&of.view(), &port.runs, &mut rows);
            rows
        };
        let (ours, theirs) = (rows(&own), rows(whole));
        let pairs = ours.bytes().iter().zip(theirs.bytes());
        if let Some(at) = pairs.into_iter().position(|(x, y)| x != y) {
            let number = at / whole.dtype().bytes();
            bail!(
                "number {number} of its rows is {:e}, not {:e}",
                ours.to_f64()[number],
                theirs.to_f64()[number]
            );
        }
    }
    Ok(())
}
