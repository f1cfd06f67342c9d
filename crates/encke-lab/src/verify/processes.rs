//! Verification as an MPI job: whether the transport delivers messages as it must, and whether
//! ranks that are processes return the bits of ranks that are threads, and of the simulator.
//!
//! Every process computes the whole call, with threads and on the CPU in the simulator, in addition
//! to its own rank, and compares its own rows. The root also compares the results of threads with
//! the f64 reference.

use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use encke::conformance::{self, Configuration};
use encke::plan::program::Role;
use encke::{DType, Data, Kernel, KernelError, Pass, Tensor, TransportError, View};
use encke_core::sharding::Run;
use encke_core::transport::{Incoming, Moved, Outgoing, Survivors, Transport};
use encke_ring::{CallInputs, Rank, ShardCall};
use encke_sim::random_call::RandomCall;

use super::compare::attention;
use super::configuration::RandomConfiguration;
use super::{VerifyCounts, VerifySettings, VerifySuite};
use crate::cluster::Cluster;
use crate::rank_kernel::RankKernel;
use crate::terminal::bar;

/// The deadline of an exchange of these small calls.
const DEADLINE: Duration = Duration::from_secs(120);
/// Bytes of a piece when messages are split: the messages of the suite then have several.
const PIECE: usize = 1000;

/// Runs the conformance suite for transports, with whole messages and with messages in pieces; the
/// inner error is that of the first rank on which it failed.
pub fn check_transport<K: RankKernel>(
    cluster: &mut Cluster,
    kernel: &K,
) -> Result<Result<(), String>> {
    cluster.wire.set_deadline(DEADLINE);
    for piece in [usize::MAX, PIECE] {
        cluster.wire.set_longest_piece(piece);
        cluster.wire.begin();
        let (rank, ranks) = (cluster.rank(), cluster.ranks());
        let inner = K::wire(cluster);
        let suite = conformance::transport(
            rank,
            ranks,
            &mut WireOfBytes {
                kernel,
                rank,
                inner,
            },
        );
        let passed = cluster.all_passed(suite.map_err(anyhow::Error::from))?;
        if passed.is_err() {
            return Ok(passed);
        }
    }
    Ok(Ok(()))
}

/// A transport of a kernel's buffers as one of bytes, each of which becomes an f32.
struct WireOfBytes<'a, K: RankKernel> {
    kernel: &'a K,
    rank: usize,
    inner: Box<dyn Survivors<K::Buffer> + 'a>,
}

impl<K: RankKernel> WireOfBytes<'_, K> {
    fn buffer(&self, bytes: &[u8]) -> Result<K::Buffer, KernelError> {
        let values: Vec<f32> = bytes.iter().map(|&byte| byte.into()).collect();
        let mut buffer = self.kernel.allocate(DType::F32, bytes.len())?;
        if let Ok(view) = View::contiguous(&values, [1, values.len(), 1, 1]) {
            let runs = [Run::leading(values.len())];
            self.kernel.upload(&view, &runs, &mut buffer)?;
        }
        Ok(buffer)
    }

    fn bytes(&self, buffer: K::Buffer) -> Result<Vec<u8>, KernelError> {
        let values = self.kernel.move_to_host(buffer)?.to_f64();
        Ok(values.into_iter().map(|value| value as u8).collect())
    }
}

impl<K: RankKernel> Transport<Vec<u8>> for WireOfBytes<'_, K> {
    fn exchange(
        &mut self,
        round: usize,
        outgoing: &[Outgoing<'_, Vec<u8>>],
        incoming: &mut [Incoming<'_, Vec<u8>>],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Moved, TransportError> {
        let rank = self.rank;
        let failed = |error: KernelError| TransportError::Local {
            rank,
            round,
            reason: error.to_string(),
        };
        let sent: Result<Vec<K::Buffer>, KernelError> =
            outgoing.iter().map(|x| self.buffer(x.parcel)).collect();
        let received: Result<Vec<K::Buffer>, KernelError> =
            incoming.iter().map(|x| self.buffer(x.parcel)).collect();
        let (sent, mut received) = (sent.map_err(failed)?, received.map_err(failed)?);
        let messages = outgoing.iter().zip(&sent);
        let sends: Vec<Outgoing<'_, K::Buffer>> = messages
            .map(|(message, parcel)| Outgoing {
                to: message.to,
                parcel,
            })
            .collect();
        let messages = incoming.iter().zip(&mut received);
        let mut receives: Vec<Incoming<'_, K::Buffer>> = messages
            .map(|(message, parcel)| Incoming {
                from: message.from,
                parcel,
            })
            .collect();
        let moved = self
            .inner
            .exchange(round, &sends, &mut receives, meanwhile)?;
        for (message, buffer) in incoming.iter_mut().zip(received) {
            *message.parcel = self.bytes(buffer).map_err(failed)?;
        }
        let width = size_of::<f32>();
        Ok(Moved {
            sent_bytes: moved.sent_bytes / width,
            received_bytes: moved.received_bytes / width,
        })
    }
}

/// Runs configurations on a ring of all processes, up to the count or the time limit, at least one.
/// All ranks call it with the same settings; `on_failure` gets the description and the error of
/// each configuration that fails on any rank.
pub fn run<K: RankKernel>(
    cluster: &mut Cluster,
    kernel: &K,
    suite: &mut VerifySuite,
    settings: &VerifySettings,
    mut on_failure: impl FnMut(u64, &str) -> Result<()>,
) -> Result<VerifyCounts> {
    let begin = Instant::now();
    let is_root = cluster.is_root();
    let progress = is_root.then(|| bar(settings.count));
    let (mut ran, mut failed) = (0, 0);
    let mut in_time = true;
    while in_time && ran < settings.count {
        let seed = settings.seed.wrapping_add(ran as u64);
        let case = RandomConfiguration::with_ranks(seed, cluster.ranks());
        let own = compare(cluster, kernel, &case)?;
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
fn compare<K: RankKernel>(
    cluster: &mut Cluster,
    kernel: &K,
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
        shard.run(&mut *K::wire(cluster))?;
        for (what, outcome) in kernel.other_ways(plan, &inputs, DEADLINE)? {
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
fn same_rows<K: Kernel>(kernel: &K, rank: &Rank<K>, role: Role, whole: &Tensor) -> Result<()> {
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
