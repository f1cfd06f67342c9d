//! Runs a configuration on every ring size and collects what the page shows.
//!
//! The decision here: each ring runs once before it is timed, because the first run allocates its
//! buffers, and a training or inference run uses a ring many times.

use std::time::{Duration, Instant};

use anyhow::Result;
use encke::plan::program::{Component, RankPlan};
use encke::{Attention, Backward, Forward, Pass, Plan, Queries, Report, Trace};
use encke_cost::median;
use encke_cpu::CpuKernel;
use encke_ring::{Rank, memory};

use super::environment;
use super::findings::{PassFindings, ReportFindings, RingFindings, Setup, ShownRing, Span};
use super::picture::Picture;
use super::{ReportSettings, prediction};
use crate::chrome_trace::ChromeTrace;
use crate::format;
use crate::ring_memory::check_ring_memory;
use crate::tensors::RandomTensors;
use crate::terminal::bar;

/// The results of one call, with the times at which its passes returned.
struct TimedCall {
    forward: Forward,
    backward: Option<Backward>,
    forward_took: Duration,
    took: Duration,
}

/// Runs every ring; returns the findings and the trace of the ring that is shown.
pub fn measure(settings: &ReportSettings) -> Result<(ReportFindings, ChromeTrace)> {
    let &ReportSettings {
        grad,
        repeats,
        seed,
        ..
    } = settings;
    let (shape, dtype) = (settings.shape, settings.dtype);
    for &ranks in &settings.rings {
        let attention = settings.builder.clone().ranks(ranks).build()?;
        let plan = attention.plan(shape, dtype, Pass::Forward)?;
        check_ring_memory(&plan)?;
    }
    let tensors = RandomTensors::new(&settings.shape, settings.dtype, seed)?;
    let progress = bar(settings.rings.len());
    let mut passes: Vec<(&'static str, Vec<RingFindings>)> = Vec::new();
    let (mut shown, mut requests) = (None, Vec::new());
    for &ranks in &settings.rings {
        progress.set_message(format!("ring of {ranks}"));
        let attention = settings.builder.clone().ranks(ranks).build()?;
        // The kernel's workspace never shrinks: after the first run it is what each pass needed.
        let first = run(&attention, &tensors, grad)?;
        let mut timed = Vec::new();
        for _ in 0..repeats {
            timed.push(run(&attention, &tensors, grad)?);
        }
        for (index, (name, held, _)) in first.reports().into_iter().enumerate() {
            if passes.len() == index {
                passes.push((name, Vec::new()));
            }
            let took = timed.iter().map(|run| run.reports()[index].2.as_secs_f64());
            let seconds = median(&took.collect::<Vec<_>>());
            let in_ring = timed.iter().map(|run| run.reports()[index].1.trace.end());
            let in_ring: Vec<f64> = in_ring.map(|end| end.as_secs_f64()).collect();
            requests.push((name, held.plan.request().clone(), median(&in_ring)));
            let ring = ring_findings(attention.kernel(), held, seconds)?;
            passes[index].1.push(ring);
        }
        if let Some(run) = timed.pop().filter(|_| ranks == settings.shown) {
            shown = Some((attention, run));
        }
        progress.inc(1);
    }
    progress.finish_and_clear();
    let (attention, run) = shown.expect("the ring that is shown is one of those that are run");
    let plan = &run.forward.report.plan;
    let mut pass_findings = Vec::new();
    for ((name, rings), (_, report, _)) in passes.into_iter().zip(run.reports()) {
        let shown = shown_ring(report)?;
        pass_findings.push(PassFindings { name, rings, shown });
    }
    let findings = ReportFindings {
        setup: setup(plan)?,
        passes: pass_findings,
        picture: Picture::new(plan),
        predictions: prediction::predict(&requests, repeats)?,
        environment: environment::facts(&attention.kernel().instruction_set().to_string(), seed),
    };
    let backward = run.backward.as_ref().map(|backward| &backward.report.trace);
    let forward = &run.forward.report.trace;
    let trace = ChromeTrace::new(forward, backward, run.forward_took, run.took);
    Ok((findings, trace))
}

fn run(attention: &Attention, tensors: &RandomTensors, grad: bool) -> Result<TimedCall> {
    let (q, k, v) = tensors.views();
    let begin = Instant::now();
    let forward = attention.forward(&q, &k, &v)?;
    let forward_took = begin.elapsed();
    let backward = match grad {
        true => {
            let (kept, dout) = (&forward.checkpoint, tensors.dout.view());
            Some(attention.backward(&q, &k, &v, kept, &dout, None)?)
        }
        false => None,
    };
    Ok(TimedCall {
        forward,
        backward,
        forward_took,
        took: begin.elapsed(),
    })
}

impl TimedCall {
    /// Name, report and duration of each pass.
    fn reports(&self) -> Vec<(&'static str, &Report, Duration)> {
        let backward = self.backward.as_ref();
        let backward_took = self.took.saturating_sub(self.forward_took);
        let backward = backward.map(|done| ("backward", &done.report, backward_took));
        let forward = ("forward", &self.forward.report, self.forward_took);
        [forward].into_iter().chain(backward).collect()
    }
}

/// The memory of the rank of a ring that holds most, with buffers of its own as on a device of its
/// own: the rank is allocated once more and its ledger read. Threads of one process hold less,
/// because they read the caller's tensors in place. The workspace is that of the run.
fn ring_findings(kernel: &CpuKernel, report: &Report, seconds: f64) -> Result<RingFindings> {
    let (plan, ranks) = (&report.plan, report.plan.ranks());
    let mut fullest = plan.rank(0)?;
    let bytes = |program: &RankPlan| program.memory().values().sum::<usize>();
    for number in 1..ranks {
        let program = plan.rank(number)?;
        if bytes(&program) > bytes(&fullest) {
            fullest = program;
        }
    }
    let number = fullest.rank;
    let planned = memory::planned(kernel, &fullest, ranks, plan.request());
    let mut measured = Rank::new(kernel, fullest)?.ledger().total().peak;
    let run = report.memory.iter().find(|rank| rank.rank == number);
    let workspace = run.and_then(|rank| {
        let peak = rank.ledger.total().peak;
        peak.get(&Component::Workspace).copied()
    });
    measured.insert(Component::Workspace, workspace.unwrap_or(0));
    Ok(RingFindings {
        ranks,
        fullest: number,
        planned,
        measured,
        seconds,
    })
}

fn shown_ring(report: &Report) -> Result<ShownRing> {
    let plan = &report.plan;
    let ranks = plan.ranks();
    let mut sent = vec![vec![0; ranks]; ranks];
    for (from, row) in sent.iter_mut().enumerate() {
        for (to, bytes) in plan.rank(from)?.sent_bytes() {
            row[to] = bytes;
        }
    }
    Ok(ShownRing {
        sent,
        sent_bytes: report.trace.sent_bytes(),
        dense_ring_bytes: plan.explain()?.dense_ring_bytes,
        spans: spans(&report.trace),
    })
}

fn spans(trace: &Trace) -> Vec<Span> {
    let span = |event: &encke::trace::Event| Span {
        rank: event.rank,
        round: event.round,
        activity: event.activity,
        start: event.start.as_secs_f64(),
        seconds: event.duration.as_secs_f64(),
        sent_bytes: event.sent_bytes,
        received_bytes: event.received_bytes,
    };
    trace.events.iter().map(span).collect()
}

fn setup(plan: &Plan) -> Result<Setup> {
    let request = plan.request();
    let (shape, explained) = (&request.shape, plan.explain()?);
    let queries = match request.queries {
        Queries::Sharded => "each rank holds its own queries",
        Queries::Replicated => "every rank holds all queries",
    };
    let batch = match shape.batch {
        1 => String::new(),
        batch => format!("{batch} sequences, "),
    };
    Ok(Setup {
        tokens: shape.tokens,
        sizes: format!(
            "{batch}{} heads over {} key heads, head dimension {}, {}",
            shape.heads, shape.kv_heads, shape.dim, request.dtype
        ),
        pattern: format::pattern(&request.pattern),
        ring: format!("{}, {queries}", format::cut(request.sharding.cut())),
        pairs: explained.pairs,
        dense_pairs: explained.dense_pairs,
    })
}
