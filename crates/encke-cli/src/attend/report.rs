//! What `encke attend` tells beside its results: memory, a timeline, a summary.

use std::time::Duration;

use anyhow::Result;
use encke::explain::{bytes, grouped};
use encke::{Attention, Kernel, Plan, Report};

use super::inputs::Inputs;
use super::streamed::PassDone;
use super::{Done, Options, results};
use crate::chrome::Timeline;
use crate::memory;
use crate::pattern_options;
use crate::ring_options;
use crate::terminal::{Paint, note, say};

/// Both passes on one timeline.
pub fn timeline(done: &Done) -> Timeline {
    let backward = done.backward.as_ref().map(|done| &done.report.trace);
    Timeline::of(
        &done.forward.report.trace,
        backward,
        done.forward_took,
        done.took,
    )
}

/// The reports of the passes, by name.
fn reports(done: &Done) -> impl Iterator<Item = (&'static str, &Report)> {
    let backward = done.backward.as_ref().map(|b| ("backward", &b.report));
    [("forward", &done.forward.report)]
        .into_iter()
        .chain(backward)
}

/// Prints the memory of each rank.
pub fn print_memory(done: &Done) -> Result<()> {
    let paint = Paint::stdout();
    for (pass, report) in reports(done) {
        let ranks = report.memory.iter().map(|m| (m.rank.to_string(), m));
        let table = memory::by_rank(2, "rank", &ranks.collect::<Vec<_>>());
        say(&format!(
            "{}\n{table}",
            paint.bold(&format!("memory, {pass}"))
        ))?;
    }
    Ok(())
}

/// Says what was done, on standard error.
pub fn summarise<K: Kernel>(
    options: &Options,
    attention: &Attention<K>,
    inputs: &Inputs,
    done: &Done,
) {
    let plan = &done.forward.report.plan;
    asked(attention, inputs, plan, "");
    let mut before = Duration::ZERO;
    for (pass, report) in reports(done) {
        let after = if pass == "forward" {
            done.forward_took
        } else {
            done.took
        };
        let seconds = (after - before).as_secs_f64();
        let sent = bytes(report.trace.sent_bytes());
        line(pass, format!("{seconds:.3} s, {sent} sent between ranks"));
        for (rank, reason) in &report.deaths {
            line("survived", format!("the death of rank {rank}: {reason}"));
        }
        before = after;
    }
    let results = results(done, &inputs.shape);
    wrote(options, results.iter().map(|(name, ..)| *name));
    if let Some(trace) = &options.work.trace {
        line("wrote", format!("a timeline to {}", trace.display()));
    }
}

/// The same where ranks came one after another.
pub fn summarise_streamed<K: Kernel>(
    options: &Options,
    attention: &Attention<K>,
    inputs: &Inputs,
    plan: &Plan,
    passes: &[PassDone],
    memory: &str,
) {
    asked(attention, inputs, plan, ", one after another");
    line("memory", memory.to_string());
    for done in passes {
        let (seconds, moved) = (done.seconds, bytes(done.moved_bytes));
        line(
            done.name,
            format!("{seconds:.3} s, {moved} of rows of other ranks"),
        );
    }
    let gradients = passes.len() > 1;
    let names = ["out", "lse", "dq", "dk", "dv"];
    wrote(
        options,
        names.into_iter().take(if gradients { 5 } else { 2 }),
    );
}

/// The same where each rank is a process.
#[cfg(feature = "mpi")]
pub fn summarise_processes(
    options: &Options,
    (attention, inputs): (&Attention, &Inputs),
    library: &str,
    all: &[super::processes::ProcessDone],
    passes: &[(&encke::Trace, f64)],
) -> Result<()> {
    let plan = attention.plan(inputs.shape, inputs.q.dtype(), encke::Pass::Forward)?;
    let paint = Paint::stdout();
    for (pass, name) in ["forward", "backward"]
        .iter()
        .enumerate()
        .take(passes.len())
    {
        if options.work.memory {
            let ranks = all.iter().map(|done| &done.passes[pass].memory);
            let ranks: Vec<_> = ranks.map(|m| (m.rank.to_string(), m)).collect();
            let title = paint.bold(&format!("memory, {name}"));
            say(&format!("{title}\n{}", memory::by_rank(2, "rank", &ranks)))?;
        }
    }
    asked(
        attention,
        inputs,
        &plan,
        &format!(" as processes ({library})"),
    );
    for ((trace, seconds), name) in passes.iter().zip(["forward", "backward"]) {
        let sent = bytes(trace.sent_bytes());
        let waited = trace.total(encke::trace::Activity::Wait).as_secs_f64() / all.len() as f64;
        line(
            name,
            format!("{seconds:.3} s, {sent} sent between ranks, {waited:.3} s waited for, a rank"),
        );
    }
    for done in all {
        let rank = done.passes[0].memory.rank;
        let held = done
            .passes
            .iter()
            .map(|pass| pass.memory.ledger.total().peak_bytes);
        let held = bytes(held.max().unwrap_or(0));
        let resident = done.resident_bytes.map_or(String::new(), |(before, most)| {
            let (grown, most) = (bytes(most.saturating_sub(before)), bytes(most));
            format!("; resident at most {most}, {grown} more than before")
        });
        line(
            "memory",
            format!("rank {rank} held {held} at most{resident}"),
        );
    }
    let there: Vec<usize> = all.iter().map(|done| done.passes[0].memory.rank).collect();
    let died = (0..plan.ranks()).filter(|rank| !there.contains(rank));
    let died: Vec<String> = died.map(|rank| rank.to_string()).collect();
    if !died.is_empty() {
        let text = format!(
            "rank {} died; others went on with the tokens",
            died.join(", ")
        );
        line("survived", text);
    }
    let names = ["out", "lse", "dq", "dk", "dv"];
    let count = if passes.len() > 1 { 5 } else { 2 };
    wrote(options, names.into_iter().take(count));
    Ok(())
}

fn line(what: &str, text: String) {
    let paint = Paint::stderr();
    note(&format!("{} {text}", paint.bold(&format!("{what:<8}"))));
}

/// What was asked for: tensors, pattern, ring.
fn asked<K: Kernel>(attention: &Attention<K>, inputs: &Inputs, plan: &Plan, how: &str) {
    let shape = &inputs.shape;
    let compute = plan.request().dtype;
    let sizes = format!(
        "batch {}, {} tokens, {} heads ({} key heads), {} numbers a head",
        shape.batch,
        grouped(shape.tokens as u128),
        shape.heads,
        shape.kv_heads,
        shape.dim,
    );
    let types = match inputs.q.dtype() {
        stored if stored == compute => compute.to_string(),
        stored if stored.bytes() > compute.bytes() => format!(
            "{stored}, computed in {compute} with sums in {}: expect errors of about {:.0e} of the \
             largest number",
            compute.sum(),
            compute.epsilon(),
        ),
        stored => format!("{stored}, computed in {compute}"),
    };
    line("input", format!("{sizes}; {types}"));
    line("pattern", pattern_options::words(attention.pattern()));
    let ranks = match plan.ranks() {
        1 => "1 rank".to_string(),
        p => format!(
            "{p} ranks{how}, {}",
            ring_options::words(plan.request().sharding.cut())
        ),
    };
    line("ring", format!("{ranks}, on {}", attention.kernel().name()));
}

fn wrote<'a>(options: &Options, names: impl Iterator<Item = &'a str>) {
    let names: Vec<&str> = names.collect();
    line(
        "wrote",
        format!("{} to {}", names.join(", "), options.output.display()),
    );
}
