//! What it costs to keep nothing: memory and time of each policy for the backward pass, measured.

use std::time::Instant;

use anyhow::Result;
use encke::explain::bytes;
use encke::{Attention, Builder, CheckpointPolicy, Kernel, Request};
use encke_cost::{BenchmarkInputs, median};

use crate::simulate::report::seconds;
use crate::table::Table;
use crate::terminal::{Paint, bar};

/// Runs of each policy; medians are shown.
const RUNS: usize = 3;

/// Runs both passes with each policy, in turn, and shows what was kept, sent and taken. `build` gives
/// each its device.
pub fn words<K: Kernel>(
    paint: Paint,
    request: &Request,
    build: impl Fn(Builder) -> Result<Attention<K>>,
) -> Result<String> {
    let policies = [
        ("output kept", CheckpointPolicy::KeepOutput),
        ("output in a file", CheckpointPolicy::Offload),
        ("recomputed", CheckpointPolicy::Recompute),
    ];
    let rehearsal = BenchmarkInputs::new(request)?;
    let ([q, k, v], dout) = (rehearsal.inputs(), rehearsal.dout());
    let attention = |policy: CheckpointPolicy| {
        let builder = Attention::builder()
            .pattern(request.pattern.clone())
            .ranks(request.sharding.ranks())
            .sharding(request.sharding.cut().clone())
            .queries(request.queries);
        build(builder.checkpoint(policy))
    };
    let mut taken = vec![(Vec::new(), Vec::new()); policies.len()];
    let mut kept = vec![((0, 0), 0); policies.len()];
    let progress = bar(RUNS * policies.len());
    for _ in 0..RUNS {
        for (at, (name, policy)) in policies.iter().enumerate() {
            progress.set_message(*name);
            let attention = attention(*policy)?;
            let begin = Instant::now();
            let forward = attention.forward(&q, &k, &v)?;
            taken[at].0.push(begin.elapsed().as_secs_f64());
            let begin = Instant::now();
            let checkpoint = &forward.checkpoint;
            let backward = attention.backward(&q, &k, &v, checkpoint, &dout, None)?;
            taken[at].1.push(begin.elapsed().as_secs_f64());
            let once = forward.report.trace.sent_bytes();
            let again = usize::from(*policy == CheckpointPolicy::Recompute) * once;
            let sent = once + again + backward.report.trace.sent_bytes();
            kept[at] = (checkpoint.kept_bytes(), sent);
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    let title = "between the passes, all ranks together";
    let headings = [
        "",
        "in memory",
        "in a file",
        "sent",
        "forward",
        "backward",
        "together",
    ];
    let mut table = Table::new(2, headings);
    for (((name, _), (forward_s, backward_s)), ((memory, file), sent)) in
        policies.iter().zip(taken).zip(kept)
    {
        let (forward_s, backward_s) = (median(&forward_s), median(&backward_s));
        table.row([
            (*name).to_string(),
            bytes(memory),
            bytes(file),
            bytes(sent),
            seconds(forward_s),
            seconds(backward_s),
            seconds(forward_s + backward_s),
        ]);
    }
    Ok(format!("\n{}\n{table}", paint.bold(title)))
}
