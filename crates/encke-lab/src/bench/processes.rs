//! A benchmark as an MPI job: the ring of all processes, timed by its slowest rank.

use std::time::Instant;

use anyhow::{Result, bail};
use encke::{Kernel, Pass, Queries, ShardAttention};

use super::case::GeneratedTensors;
use super::{BenchRecord, BenchSettings, PassTimes, RingTimes, TimedPasses};
use crate::cluster::Cluster;
use crate::rank_kernel::RankKernel;
use crate::row_check::RowCheck;
use crate::terminal::bar;

/// The shard of this rank, and the record to be filled.
pub struct BenchShard<K: Kernel> {
    attention: ShardAttention<K>,
    tensors: GeneratedTensors,
    record: BenchRecord,
}

/// Builds this rank's shard from the only ring of the settings, which has as many ranks as the job.
pub fn prepare<K: Kernel>(
    cluster: &Cluster,
    settings: &BenchSettings,
    kernel: K,
) -> Result<BenchShard<K>> {
    let &BenchSettings { shape, dtype, .. } = settings;
    let [builder] = &settings.rings[..] else {
        bail!("an MPI job is one ring, not {}", settings.rings.len());
    };
    let attention = builder.clone().build_shard_on(kernel, cluster.rank())?;
    let plan = attention.plan(shape, dtype, Pass::Forward)?;
    let request = plan.request();
    if request.queries == Queries::Replicated {
        bail!("--queries replicated is not timed by processes; use sharded, or threads");
    }
    let runs = attention.sharding().runs(shape.tokens, cluster.rank());
    let tensors = GeneratedTensors::new(request, settings.seed, &runs)?;
    let mut record = BenchRecord::new(request.clone(), settings);
    record.library = Some(cluster.library.clone());
    Ok(BenchShard {
        attention,
        tensors,
        record,
    })
}

/// Checks and times the ring; the record on the root, and on all ranks whether the output is right.
pub fn run<K: RankKernel>(
    cluster: &mut Cluster,
    settings: &BenchSettings,
    shard: BenchShard<K>,
) -> Result<(Option<BenchRecord>, bool)> {
    let BenchShard {
        attention,
        tensors,
        mut record,
    } = shard;
    let grad = settings.grad;
    let passes = time_passes(cluster, &attention, &tensors, grad)?;
    let mut checked = RowCheck::default();
    let result = tensors.check(&passes.forward, &mut checked);
    cluster.agree(result)?;
    let mut own = RingTimes {
        ranks: cluster.ranks(),
        checked,
        gradients_apart: None,
        passes: cluster.agree(passes.untimed())?,
    };
    let all = cluster.gather(&checked)?;
    let all = all.map(|all| all.into_iter().fold(RowCheck::default(), RowCheck::with));
    let all: RowCheck = cluster.broadcast(all)?;
    if all.wrong == 0 {
        let progress = cluster.is_root().then(|| bar(settings.repeats));
        for _ in 0..settings.repeats {
            own.add(&time_passes(cluster, &attention, &tensors, grad)?);
            progress.iter().for_each(|bar| bar.inc(1));
        }
        progress.iter().for_each(|bar| bar.finish_and_clear());
    }
    let ranks: Option<Vec<Vec<PassTimes>>> = cluster.gather(&own.passes)?;
    let record = ranks.map(|ranks| {
        let pass = |at: usize| {
            let of: Vec<PassTimes> = ranks.iter().map(|rank| rank[at].clone()).collect();
            PassTimes::of_ranks(&of)
        };
        own.checked = all;
        own.passes = (0..own.passes.len()).filter_map(pass).collect();
        record.rings.push(own);
        record
    });
    Ok((record, all.wrong == 0))
}

/// One forward pass, and one backward pass after it, each started by all processes together.
fn time_passes<K: RankKernel>(
    cluster: &mut Cluster,
    attention: &ShardAttention<K>,
    tensors: &GeneratedTensors,
    grad: bool,
) -> Result<TimedPasses> {
    let (q, k, v) = tensors.tensors.views();
    let (qkv, tokens) = ([&q, &k, &v], tensors.tokens());
    cluster.agree(Ok(()))?;
    cluster.wire.begin();
    let begin = Instant::now();
    let forward = attention.forward(tokens, qkv, &mut *K::wire(cluster))?;
    let mut seconds = vec![begin.elapsed().as_secs_f64()];
    let mut backward = None;
    if grad {
        cluster.agree(Ok(()))?;
        cluster.wire.begin();
        let begin = Instant::now();
        let given = (&tensors.tensors.dout.view(), None);
        let kept = &forward.checkpoint;
        let wire = &mut *K::wire(cluster);
        backward = Some(attention.backward(tokens, qkv, kept, given, wire)?);
        seconds.push(begin.elapsed().as_secs_f64());
    }
    Ok(TimedPasses {
        forward,
        backward,
        seconds,
    })
}
