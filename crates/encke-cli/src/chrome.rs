//! A trace as Chrome's trace viewer and Perfetto read it: one process, one thread a rank, one
//! complete event (`"ph": "X"`) for each stretch of time. Hops, where they are known one by one, are
//! a process of their own with a thread for each rank that receives them.
//!
//! <https://ui.perfetto.dev> opens the file; nothing leaves the machine in doing so.

use std::collections::BTreeSet;
use std::io::Write;
use std::time::Duration;

use encke::Trace;
use encke_cost::Transfer;
use serde::Serialize;

/// The passes of one run on one timeline.
#[derive(Debug, Default)]
pub struct Timeline {
    events: Vec<Entry>,
    ranks: BTreeSet<usize>,
    receivers: BTreeSet<usize>,
}

/// The process of ranks, and that of hops.
const RANKS: usize = 0;
const HOPS: usize = 1;

#[derive(Debug, Serialize)]
struct Entry {
    name: &'static str,
    cat: &'static str,
    ph: &'static str,
    pid: usize,
    tid: usize,
    ts: f64,
    dur: f64,
    args: Args,
}

#[derive(Debug, Serialize)]
struct Args {
    round: usize,
    sent_bytes: usize,
    received_bytes: usize,
}

/// What names a process or a thread.
#[derive(Debug, Serialize)]
struct Label {
    name: &'static str,
    ph: &'static str,
    pid: usize,
    tid: usize,
    args: LabelArgs,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum LabelArgs {
    Name { name: String },
    Order { sort_index: usize },
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Document<'a> {
    trace_events: Vec<Line<'a>>,
    display_time_unit: &'static str,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Line<'a> {
    Label(Label),
    Entry(&'a Entry),
}

impl Timeline {
    /// Both passes of a call. The backward pass is set so that it ends when the call returned,
    /// which leaves a gap where a forward pass was run again.
    pub fn of(
        forward: &Trace,
        backward: Option<&Trace>,
        forward_took: Duration,
        took: Duration,
    ) -> Timeline {
        let mut timeline = Timeline::default();
        timeline.add("forward", forward, Duration::ZERO);
        if let Some(backward) = backward {
            let origin = took.saturating_sub(end(backward));
            timeline.add("backward", backward, origin.max(forward_took));
        }
        timeline
    }

    /// Adds a pass that began at `origin` on the timeline.
    pub fn add(&mut self, pass: &'static str, trace: &Trace, origin: Duration) {
        let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
        for event in &trace.events {
            self.ranks.insert(event.rank);
            self.events.push(Entry {
                name: event.activity.name(),
                cat: pass,
                ph: "X",
                pid: RANKS,
                tid: event.rank,
                ts: micros(origin + event.start),
                dur: micros(event.duration),
                args: Args {
                    round: event.round,
                    sent_bytes: event.sent_bytes,
                    received_bytes: event.received_bytes,
                },
            });
        }
    }

    /// Adds the hops of a pass that began at `origin` on the timeline.
    pub fn add_hops(&mut self, pass: &'static str, hops: &[Transfer], origin: Duration) {
        let begin = origin.as_nanos() as f64 / 1e3;
        for hop in hops {
            self.receivers.insert(hop.to);
            self.events.push(Entry {
                name: if hop.between_nodes {
                    "hop between nodes"
                } else {
                    "hop"
                },
                cat: pass,
                ph: "X",
                pid: HOPS,
                tid: hop.to,
                ts: begin + hop.start_s * 1e6,
                dur: (hop.end_s - hop.start_s) * 1e6,
                args: Args {
                    round: hop.round,
                    sent_bytes: 0,
                    received_bytes: hop.bytes as usize,
                },
            });
        }
    }

    /// Writes the trace-event JSON.
    pub fn write(&self, to: &mut dyn Write) -> std::io::Result<()> {
        let mut lines = Vec::new();
        let processes = [
            (RANKS, "encke", "rank", &self.ranks),
            (HOPS, "hops", "to rank", &self.receivers),
        ];
        for (pid, process, thread, ranks) in processes {
            let mut add = |what: &'static str, tid: usize, args: LabelArgs| {
                lines.push(Line::Label(Label {
                    name: what,
                    ph: "M",
                    pid,
                    tid,
                    args,
                }));
            };
            let name = |name: String| LabelArgs::Name { name };
            if pid == RANKS || !ranks.is_empty() {
                add("process_name", 0, name(process.to_string()));
            }
            for &rank in ranks {
                add("thread_name", rank, name(format!("{thread} {rank}")));
                add(
                    "thread_sort_index",
                    rank,
                    LabelArgs::Order { sort_index: rank },
                );
            }
        }
        lines.extend(self.events.iter().map(Line::Entry));
        let document = Document {
            trace_events: lines,
            display_time_unit: "ms",
        };
        serde_json::to_writer(&mut *to, &document)?;
        to.write_all(b"\n")
    }
}

/// When the last event of a trace ended, since its call began.
pub fn end(trace: &Trace) -> Duration {
    let ends = trace
        .events
        .iter()
        .map(|event| event.start + event.duration);
    ends.max().unwrap_or_default()
}
