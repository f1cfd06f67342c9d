//! The text of `encke attend`: the memory of ranks on standard output, a summary on standard error.

use std::time::Duration;

use anyhow::Result;
use encke::explain::bytes;
use encke::{Attention, Kernel, Plan, RankMemory, Report};
use encke_lab::terminal::{Paint, note, say};
use encke_lab::{format, memory_table};

use super::inputs::AttendInputs;
use super::options::Options;
use super::results::{AttendResult, StreamedPass};

/// The reports of the passes, with their names.
fn reports(result: &AttendResult) -> impl Iterator<Item = (&'static str, &Report)> {
    let backward = result.backward.as_ref().map(|b| ("backward", &b.report));
    [("forward", &result.forward.report)]
        .into_iter()
        .chain(backward)
}

/// Prints the memory of each rank.
pub fn print_memory(result: &AttendResult) -> Result<()> {
    for (pass, report) in reports(result) {
        print_memory_of(pass, report.memory.iter())?;
    }
    Ok(())
}

/// Prints the memory of each rank in one pass.
fn print_memory_of<'a>(pass: &str, ranks: impl Iterator<Item = &'a RankMemory>) -> Result<()> {
    let ranks: Vec<_> = ranks.map(|m| (m.rank.to_string(), m)).collect();
    let title = Paint::stdout().bold(&format!("memory, {pass}"));
    let table = memory_table::by_rank(2, "rank", &ranks);
    Ok(say(&format!("{title}\n{table}"))?)
}

/// Prints the summary of a call with threads as ranks.
pub fn print<K: Kernel>(
    options: &Options,
    attention: &Attention<K>,
    inputs: &AttendInputs,
    result: &AttendResult,
) {
    let plan = &result.forward.report.plan;
    print_request(attention, inputs, plan, "");
    let mut before = Duration::ZERO;
    for (pass, report) in reports(result) {
        let after = match pass {
            "forward" => result.forward_took,
            _ => result.took,
        };
        let seconds = (after - before).as_secs_f64();
        let sent = bytes(report.trace.sent_bytes());
        line(pass, format!("{seconds:.3} s, {sent} sent between ranks"));
        for (rank, reason) in &report.deaths {
            line("survived", format!("the death of rank {rank}: {reason}"));
        }
        before = after;
    }
    let outputs = result.outputs(&inputs.shape);
    print_written(options, outputs.iter().map(|(name, ..)| *name));
    if let Some(trace) = &options.trace {
        line("wrote", format!("a timeline to {}", trace.display()));
    }
}

/// Prints the summary of a call whose ranks ran one after another.
pub fn print_streamed<K: Kernel>(
    options: &Options,
    attention: &Attention<K>,
    inputs: &AttendInputs,
    plan: &Plan,
    passes: &[StreamedPass],
    memory: &str,
) {
    print_request(attention, inputs, plan, ", one after another");
    line("memory", memory.to_string());
    for done in passes {
        let (seconds, moved) = (done.seconds, bytes(done.moved_bytes));
        line(
            done.name,
            format!("{seconds:.3} s, {moved} read of rows of other ranks"),
        );
    }
    print_written(options, output_names(passes.len(), options.sinks));
}

/// Prints the summary of a call whose ranks are processes.
#[cfg(feature = "mpi")]
pub fn print_processes<K: Kernel>(
    options: &Options,
    (attention, inputs): (&Attention<K>, &AttendInputs),
    library: &str,
    all: &[super::results::AttendProcess],
    passes: &[(&encke::Trace, f64)],
) -> Result<()> {
    let plan = attention.plan(inputs.shape, inputs.q.dtype(), encke::Pass::Forward)?;
    let names = ["forward", "backward"];
    if options.memory {
        for (pass, name) in names.iter().enumerate().take(passes.len()) {
            print_memory_of(name, all.iter().map(|done| &done.passes[pass].memory))?;
        }
    }
    print_request(
        attention,
        inputs,
        &plan,
        &format!(" as processes ({library})"),
    );
    for ((trace, seconds), name) in passes.iter().zip(names) {
        let sent = bytes(trace.sent_bytes());
        let waited = trace.total(encke::trace::Activity::Wait).as_secs_f64() / all.len() as f64;
        line(
            name,
            format!("{seconds:.3} s, {sent} sent between ranks, {waited:.3} s waited per rank"),
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
            format!("; resident at most {most}, {grown} more than before the call")
        });
        line(
            "memory",
            format!("rank {rank} held {held} at most{resident}"),
        );
    }
    let alive: Vec<usize> = all.iter().map(|done| done.passes[0].memory.rank).collect();
    let died = (0..plan.ranks()).filter(|rank| !alive.contains(rank));
    let died: Vec<String> = died.map(|rank| rank.to_string()).collect();
    if !died.is_empty() {
        let text = format!("rank {} died; others adopted the tokens", died.join(", "));
        line("survived", text);
    }
    print_written(options, output_names(passes.len(), options.sinks));
    Ok(())
}

/// Prints one line of the summary.
fn line(topic: &str, text: String) {
    let paint = Paint::stderr();
    note(&format!("{} {text}", paint.bold(&format!("{topic:<8}"))));
}

/// Prints tensors, pattern and ring.
fn print_request<K: Kernel>(
    attention: &Attention<K>,
    inputs: &AttendInputs,
    plan: &Plan,
    how: &str,
) {
    let shape = &inputs.shape;
    let compute = plan.request().dtype;
    let sizes = format!("batch {}, {}", shape.batch, format::shape(shape));
    let types = match inputs.q.dtype() {
        stored if stored == compute => compute.to_string(),
        stored if stored.bytes() > compute.bytes() => format!(
            "{stored}, computed in {compute} with sums in {}: expect errors of about {:.0e} of the \
             largest value",
            compute.sum(),
            compute.epsilon(),
        ),
        stored => format!("{stored}, computed in {compute}"),
    };
    line("input", format!("{sizes}; {types}"));
    line("pattern", format::pattern(attention.pattern()));
    let ranks = match plan.ranks() {
        1 => "1 rank".to_string(),
        p => format!(
            "{p} ranks{how}, {}",
            format::cut(plan.request().sharding.cut())
        ),
    };
    line("ring", format!("{ranks}, on {}", attention.kernel().name()));
}

/// The names of the outputs of so many passes.
fn output_names(passes: usize, sinks: bool) -> impl Iterator<Item = &'static str> {
    let names = ["out", "lse", "dq", "dk", "dv", "dsinks"];
    let count = match (passes > 1, sinks) {
        (true, true) => 6,
        (true, false) => 5,
        (false, _) => 2,
    };
    names.into_iter().take(count)
}

fn print_written<'a>(options: &Options, names: impl Iterator<Item = &'a str>) {
    let names: Vec<&str> = names.collect();
    line(
        "wrote",
        format!("{} to {}", names.join(", "), options.output.display()),
    );
}
