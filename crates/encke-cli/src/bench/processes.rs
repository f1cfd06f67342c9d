//! `encke bench` as several processes: the ring that they are, by its slowest rank.

use std::time::Instant;

use anyhow::{Result, bail};
use encke::{Pass, Queries, ShardAttention};

use super::case::Case;
use super::report::{PassTimes, RingTimes};
use super::{Options, Ran, passes};
use crate::Verdict;
use crate::check::Checked;
use crate::cluster::Cluster;
use crate::terminal::bar;

/// Runs the command.
pub fn run(cluster: &mut Cluster, options: &Options) -> Result<Verdict> {
    let ready = prepare(cluster, options);
    let (attention, case, mut record, json) = cluster.agree(ready)?;
    let grad = options.work.grad;
    let ran = turn(cluster, &attention, &case, grad)?;
    let mut checked = Checked::default();
    let found = case.check(&ran.forward, &mut checked);
    cluster.agree(found)?;
    let mut own = RingTimes {
        ranks: cluster.ranks(),
        checked,
        gradients_apart: None,
        passes: cluster.agree(passes(&ran))?,
    };
    let all = cluster.gather(&checked)?;
    let all = all.map(|all| all.into_iter().fold(Checked::default(), Checked::with));
    let all: Checked = cluster.broadcast(all)?;
    if all.wrong == 0 {
        let progress = cluster.speaks().then(|| bar(options.work.repeats));
        for _ in 0..options.work.repeats {
            let ran = turn(cluster, &attention, &case, grad)?;
            own.add(&ran);
            progress.iter().for_each(|bar| bar.inc(1));
        }
        progress.iter().for_each(|bar| bar.finish_and_clear());
    }
    let ranks: Option<Vec<Vec<PassTimes>>> = cluster.gather(&own.passes)?;
    let told = match ranks {
        Some(ranks) => {
            let pass = |at: usize| {
                let of: Vec<PassTimes> = ranks.iter().map(|rank| rank[at].clone()).collect();
                PassTimes::together(&of)
            };
            own.checked = all;
            own.passes = (0..own.passes.len()).filter_map(pass).collect();
            record.rings.push(own);
            record.conclude(json).map(|_| ())
        }
        None => Ok(()),
    };
    cluster.agree(told)?;
    Ok(match all.wrong {
        0 => Verdict::Fine,
        _ => Verdict::CheckFailed,
    })
}

type Ready = (
    ShardAttention,
    Case,
    super::report::Record,
    Option<crate::output::OutputFile>,
);

fn prepare(cluster: &Cluster, options: &Options) -> Result<Ready> {
    options.check()?;
    options.device.refuse_in_processes()?;
    let (shape, dtype) = (options.sizes.shape()?, options.sizes.dtype());
    let builder = options.rings.builder(&options.pattern, cluster.ranks())?;
    let attention = builder.build_shard(cluster.rank())?;
    let plan = attention.plan(shape, dtype, Pass::Forward)?;
    let request = plan.request();
    if request.queries == Queries::Replicated {
        bail!("--queries replicated is not timed by processes; use sharded, or threads");
    }
    let runs = attention.sharding().runs(shape.tokens, cluster.rank());
    let case = Case::new(request, options.work.seed, &runs)?;
    let record = options.record(request).by(&cluster.library);
    let json = match cluster.speaks() {
        true => options.json()?,
        false => None,
    };
    Ok((attention, case, record, json))
}

/// One forward pass, and one backward pass from it, each begun by all processes together.
fn turn(cluster: &mut Cluster, attention: &ShardAttention, case: &Case, grad: bool) -> Result<Ran> {
    let (q, k, v) = case.tensors.views();
    let (qkv, tokens) = ([&q, &k, &v], case.tokens());
    cluster.agree(Ok(()))?;
    cluster.wire.begin();
    let begin = Instant::now();
    let forward = attention.forward(tokens, qkv, &mut cluster.wire)?;
    let mut seconds = vec![begin.elapsed().as_secs_f64()];
    let mut backward = None;
    if grad {
        cluster.agree(Ok(()))?;
        cluster.wire.begin();
        let begin = Instant::now();
        let given = (&case.tensors.dout.view(), None);
        let kept = &forward.checkpoint;
        backward = Some(attention.backward(tokens, qkv, kept, given, &mut cluster.wire)?);
        seconds.push(begin.elapsed().as_secs_f64());
    }
    Ok(Ran {
        forward,
        backward,
        seconds,
    })
}
