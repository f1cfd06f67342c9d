//! Verification as an MPI job: whether the transport delivers messages as it must, and whether
//! ranks that are processes return the bits of ranks that are threads, and of the simulator.
//!
//! Every process computes the whole call, with threads and in the simulator, in addition to its own
//! rank, and compares its own rows. The root also compares the results of threads with the f64
//! reference.

use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use encke::conformance::{self, Configuration};
use encke::plan::program::Role;
use encke::{Data, Pass, Tensor};
use encke_cpu::CpuKernel;
use encke_ring::{CallInputs, Rank, ShardCall, ThreadRing};
use encke_sim::lockstep;
use encke_sim::random_call::RandomCall;

use super::compare::attention;
use super::configuration::RandomConfiguration;
use super::{VerifyCounts, VerifySettings, VerifySuite};
use crate::cluster::Cluster;
use crate::terminal::bar;

/// The deadline of an exchange of these small calls.
const DEADLINE: Duration = Duration::from_secs(120);
/// Bytes of a piece when messages are split: the messages of the suite then have several.
const PIECE: usize = 1000;

/// Runs the conformance suite for transports, with whole messages and with messages in pieces; the
/// inner error is that of the first rank on which it failed.
pub fn check_transport(cluster: &mut Cluster) -> Result<Result<(), String>> {
    cluster.wire.set_deadline(DEADLINE);
    for piece in [usize::MAX, PIECE] {
        cluster.wire.set_longest_piece(piece);
        cluster.wire.begin();
        let (rank, ranks) = (cluster.rank(), cluster.ranks());
        let suite = conformance::transport(rank, ranks, &mut cluster.wire);
        let passed = cluster.all_passed(suite.map_err(anyhow::Error::from))?;
        if passed.is_err() {
            return Ok(passed);
        }
    }
    Ok(Ok(()))
}

/// Runs configurations on a ring of all processes, up to the count or the time limit, at least one.
/// All ranks call it with the same settings; `on_failure` gets the description and the error of
/// each configuration that fails on any rank.
pub fn run(
    cluster: &mut Cluster,
    suite: &mut VerifySuite,
    settings: &VerifySettings,
    mut on_failure: impl FnMut(u64, &str) -> Result<()>,
) -> Result<VerifyCounts> {
    let kernel = cluster.agree(CpuKernel::new().map_err(anyhow::Error::from))?;
    let begin = Instant::now();
    let is_root = cluster.is_root();
    let progress = is_root.then(|| bar(settings.count));
    let (mut ran, mut failed) = (0, 0);
    let mut in_time = true;
    while in_time && ran < settings.count {
        let seed = settings.seed.wrapping_add(ran as u64);
        let case = RandomConfiguration::with_ranks(seed, cluster.ranks());
        let own = compare(cluster, &kernel, &case)?;
        let own = own.and_then(|()| match suite {
            VerifySuite::Reference(suite) if is_root => suite.run(&case),
            _ => Ok(()),
        });
        if let Err(error) = cluster.all_passed(own)? {
            failed += 1;
            on_failure(seed, &format!("{case}\n  {error}"))?;
        }
        ran += 1;
        progress.iter().for_each(|bar| bar.inc(1));
        in_time = cluster.broadcast(is_root.then(|| begin.elapsed() < settings.limit))?;
    }
    progress.iter().for_each(|bar| bar.finish_and_clear());
    Ok(VerifyCounts {
        ran,
        failed,
        elapsed: begin.elapsed(),
    })
}

/// Both passes of a configuration: this process's rows against those of threads and of the
/// simulator. The outer error is the wire's, the inner one says what differs.
fn compare(
    cluster: &mut Cluster,
    kernel: &CpuKernel,
    case: &RandomConfiguration,
) -> Result<Result<()>> {
    let ring = attention(case)?;
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

/// Whether a rank's rows of an output have the bits of these rows in a whole tensor.
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
            let element = at / whole.dtype().bytes();
            bail!(
                "element {element} of its rows is {:e}, not {:e}",
                ours.to_f64()[element],
                theirs.to_f64()[element]
            );
        }
    }
    Ok(())
}
