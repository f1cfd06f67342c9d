//! Traces in the trace-event format of Chrome and Perfetto: one process with a thread for each rank
//! and a complete event (`"ph": "X"`) for each activity. Hops, where a simulated run knows them,
//! are a second process with a thread for each receiving rank.
//!
//! <https://ui.perfetto.dev> opens the file in the browser, without uploading it.

use std::collections::BTreeSet;
use std::io::Write;
use std::time::Duration;

use encke::Trace;
use encke_cost::Transfer;
use serde::Serialize;

/// The passes of one call on one timeline.
#[derive(Debug, Default)]
pub struct ChromeTrace {
    events: Vec<CompleteEvent>,
    ranks: BTreeSet<usize>,
    receivers: BTreeSet<usize>,
}

/// Process ids.
const RANKS: usize = 0;
const HOPS: usize = 1;

#[derive(Debug, Serialize)]
struct CompleteEvent {
    name: &'static str,
    cat: &'static str,
    ph: &'static str,
    pid: usize,
    tid: usize,
    ts: f64,
    dur: f64,
    args: CompleteArgs,
}

#[derive(Debug, Serialize)]
struct CompleteArgs {
    round: usize,
    sent_bytes: usize,
    received_bytes: usize,
}

/// Names or orders a process or a thread.
#[derive(Debug, Serialize)]
struct MetadataEvent {
    name: &'static str,
    ph: &'static str,
    pid: usize,
    tid: usize,
    args: MetadataArgs,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum MetadataArgs {
    Name { name: String },
    Order { sort_index: usize },
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct TraceDocument<'a> {
    trace_events: Vec<TraceEvent<'a>>,
    display_time_unit: &'static str,
}

#[derive(Serialize)]
#[serde(untagged)]
enum TraceEvent<'a> {
    Metadata(MetadataEvent),
    Complete(&'a CompleteEvent),
}

impl ChromeTrace {
    /// Both passes of a call. The backward pass ends when the call returned, which leaves a gap
    /// where the forward pass was recomputed.
    pub fn new(
        forward: &Trace,
        backward: Option<&Trace>,
        forward_took: Duration,
        took: Duration,
    ) -> ChromeTrace {
        let mut timeline = ChromeTrace::default();
        timeline.add("forward", forward, Duration::ZERO);
        if let Some(backward) = backward {
            let origin = took.saturating_sub(end(backward));
            timeline.add("backward", backward, origin.max(forward_took));
        }
        timeline
    }

    /// Adds a pass that began at `origin` on the timeline.
    pub fn add(&mut self, pass: &'static str, trace: &Trace, origin: Duration) {
        let microseconds = |time: Duration| time.as_nanos() as f64 / 1e3;
        for event in &trace.events {
            self.ranks.insert(event.rank);
            self.events.push(CompleteEvent {
                name: event.activity.name(),
                cat: pass,
                ph: "X",
                pid: RANKS,
                tid: event.rank,
                ts: microseconds(origin + event.start),
                dur: microseconds(event.duration),
                args: CompleteArgs {
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
            self.events.push(CompleteEvent {
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
                args: CompleteArgs {
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
            let mut add = |name: &'static str, tid: usize, args: MetadataArgs| {
                lines.push(TraceEvent::Metadata(MetadataEvent {
                    name,
                    ph: "M",
                    pid,
                    tid,
                    args,
                }));
            };
            let named = |name: String| MetadataArgs::Name { name };
            if pid == RANKS || !ranks.is_empty() {
                add("process_name", 0, named(process.to_string()));
            }
            for &rank in ranks {
                add("thread_name", rank, named(format!("{thread} {rank}")));
                add(
                    "thread_sort_index",
                    rank,
                    MetadataArgs::Order { sort_index: rank },
                );
            }
        }
        lines.extend(self.events.iter().map(TraceEvent::Complete));
        let document = TraceDocument {
            trace_events: lines,
            display_time_unit: "ms",
        };
        serde_json::to_writer(&mut *to, &document)?;
        to.write_all(b"\n")
    }
}

/// When the last event of a trace ended, since its call began.
fn end(trace: &Trace) -> Duration {
    let ends = trace
        .events
        .iter()
        .map(|event| event.start + event.duration);
    ends.max().unwrap_or_default()
}
