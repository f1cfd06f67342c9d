//! A trace of a call: events with times and bytes, which can be compared with the plan.

use encke_core::transport::Moved;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// What a rank did during an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Activity {
    /// Loaded its inputs.
    Load,
    /// Ran the tasks before the messages of a round: packing, merging, finishing.
    Prepare,
    /// Ran the jobs of a round.
    Compute,
    /// Waited for messages after its jobs were done: communication that was not overlapped.
    Wait,
}

impl Activity {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Activity::Load => "load",
            Activity::Prepare => "prepare",
            Activity::Compute => "compute",
            Activity::Wait => "wait",
        }
    }
}

/// One activity of one rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// The rank.
    pub rank: usize,
    /// The round.
    pub round: usize,
    /// What it did.
    pub activity: Activity,
    /// When it started, since the start of the call.
    pub start: Duration,
    /// How long it took.
    pub duration: Duration,
    /// Bytes sent in the round (on [`Activity::Wait`] only).
    pub sent_bytes: usize,
    /// Bytes received in the round (on [`Activity::Wait`] only).
    pub received_bytes: usize,
}

/// All events of a call.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Trace {
    /// By rank, each rank's in order of time.
    pub events: Vec<Event>,
}

impl Trace {
    /// Bytes sent by all ranks, counted at the transport.
    pub fn sent_bytes(&self) -> usize {
        self.events.iter().map(|event| event.sent_bytes).sum()
    }

    /// When the last rank finished.
    pub fn end(&self) -> Duration {
        let ends = self.events.iter().map(|event| event.start + event.duration);
        ends.max().unwrap_or_default()
    }

    /// Time that all ranks together spent on an activity.
    pub fn total(&self, activity: Activity) -> Duration {
        let of = |event: &&Event| event.activity == activity;
        self.events
            .iter()
            .filter(of)
            .map(|event| event.duration)
            .sum()
    }
}

/// Records the events of one rank.
#[derive(Debug)]
pub struct Recorder {
    rank: usize,
    origin: Instant,
    events: Vec<Event>,
}

impl Recorder {
    /// A recorder whose times are relative to `origin`.
    pub fn new(rank: usize, origin: Instant) -> Recorder {
        Recorder {
            rank,
            origin,
            events: Vec::new(),
        }
    }

    /// Records an event that started at `start` and ends now.
    pub fn record(&mut self, round: usize, activity: Activity, start: Instant, moved: Moved) {
        self.events.push(Event {
            rank: self.rank,
            round,
            activity,
            start: start.duration_since(self.origin),
            duration: start.elapsed(),
            sent_bytes: moved.sent_bytes,
            received_bytes: moved.received_bytes,
        });
    }

    /// The rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The recorded events.
    pub fn finish(self) -> Vec<Event> {
        self.events
    }
}
