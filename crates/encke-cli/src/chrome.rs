//! A trace as Chrome's trace viewer and Perfetto read it: one process, one thread a rank, one
//! complete event (`"ph": "X"`) for each stretch of time.
//!
//! <https://ui.perfetto.dev> opens the file; nothing leaves the machine in doing so.

use std::collections::BTreeSet;
use std::io::Write;
use std::time::Duration;

use encke::Trace;
use serde::Serialize;

/// The passes of one run on one timeline.
#[derive(Debug, Default)]
pub struct Timeline {
    events: Vec<Entry>,
    ranks: BTreeSet<usize>,
}

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
                pid: 0,
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

    /// Writes the trace-event JSON.
    pub fn write(&self, to: &mut dyn Write) -> std::io::Result<()> {
        let mut lines = vec![Line::Label(label(
            "process_name",
            0,
            LabelArgs::Name {
                name: "encke".to_string(),
            },
        ))];
        for &rank in &self.ranks {
            let name = LabelArgs::Name {
                name: format!("rank {rank}"),
            };
            let order = LabelArgs::Order { sort_index: rank };
            lines.push(Line::Label(label("thread_name", rank, name)));
            lines.push(Line::Label(label("thread_sort_index", rank, order)));
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

fn label(name: &'static str, tid: usize, args: LabelArgs) -> Label {
    Label {
        name,
        ph: "M",
        pid: 0,
        tid,
        args,
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
