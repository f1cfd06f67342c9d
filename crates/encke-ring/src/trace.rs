//! What happened: events with times and bytes, to be held against the plan.

use encke_core::transport::Moved;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// What a rank did in a stretch of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Activity {
    /// Copied its inputs in.
    Load,
    /// The tasks before the hops of a round: packing, combining, finishing.
    Prepare,
    /// The jobs of a round.
    Compute,
    /// Waited for hops after its jobs were done: communication that was not hidden.
    Wait,
}

impl Activity {
    /// The name reports use.
    pub fn name(self) -> &'static str {
        match self {
            Activity::Load => "load",
            Activity::Prepare => "prepare",
            Activity::Compute => "compute",
            Activity::Wait => "wait",
        }
    }
}

/// A stretch of time of one rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// The rank.
    pub rank: usize,
    /// The round.
    pub round: usize,
    /// What it did.
    pub activity: Activity,
    /// Since the call began.
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
    /// Bytes sent by all ranks: counted where they were handed to the transport.
    pub fn sent_bytes(&self) -> usize {
        self.events.iter().map(|event| event.sent_bytes).sum()
    }

    /// When the last rank was done.
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

/// Takes down the events of one rank.
#[derive(Debug)]
pub struct Recorder {
    rank: usize,
    origin: Instant,
    events: Vec<Event>,
}

impl Recorder {
    /// A recorder whose times count from `origin`.
    pub fn new(rank: usize, origin: Instant) -> Recorder {
        Recorder {
            rank,
            origin,
            events: Vec::new(),
        }
    }

    /// Something that began at `start` and ends now.
    pub fn note(&mut self, round: usize, activity: Activity, start: Instant, moved: Moved) {
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

    /// The rank whose events these are.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The events taken down.
    pub fn finish(self) -> Vec<Event> {
        self.events
    }
}
