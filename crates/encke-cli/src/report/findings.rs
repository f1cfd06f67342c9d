//! Everything the page shows, as one value: what was measured, beside what was planned.
//!
//! The decision here: drawing knows nothing of rings, and measuring nothing of drawing. The value
//! also travels in the page, as JSON, so that whoever is sent the picture has the numbers too.

use std::collections::BTreeMap;

use encke::plan::program::Component;
use encke::trace::Activity;
use encke_sim::power_law::exponent;
use serde::Serialize;

use super::picture::Picture;

/// What was found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Findings {
    /// What was computed, in words.
    pub setup: Setup,
    /// The forward pass and, if it was asked for, the backward pass.
    pub passes: Vec<PassFindings>,
    /// Which query sees which key; made from the setup, so not written out.
    #[serde(skip)]
    pub picture: Picture,
    /// What the clock says beside what the wall says, where it can say anything.
    pub predictions: Option<Predictions>,
    /// Where and how it was measured: (what, value).
    pub environment: Vec<(String, String)>,
}

/// What was computed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Setup {
    /// Tokens of the sequence.
    pub tokens: usize,
    /// Sizes and types, in words.
    pub sizes: String,
    /// The pattern, in words.
    pub pattern: String,
    /// The cut and who holds the queries, in words.
    pub ring: String,
    /// (query, key) pairs computed, of those plain attention would compute.
    pub pairs: u128,
    /// Pairs that plain attention would compute.
    pub dense_pairs: u128,
}

/// What one pass did, over all ring sizes and in the ring that is shown.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PassFindings {
    /// Forward or backward.
    pub name: &'static str,
    /// Each ring size, rising.
    pub rings: Vec<RingFindings>,
    /// The ring that is shown.
    pub shown: ShownRing,
}

/// What one ring size took.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RingFindings {
    /// Ranks of the ring.
    pub ranks: usize,
    /// The rank that holds most.
    pub fullest: usize,
    /// What the plan lists for it.
    pub planned: BTreeMap<Component, usize>,
    /// What it really held.
    pub measured: BTreeMap<Component, usize>,
    /// From the call to its return.
    pub seconds: f64,
}

/// A ring seen from close up.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ShownRing {
    /// Bytes sent, `[from][to]`, as planned.
    pub sent: Vec<Vec<usize>>,
    /// Bytes sent by all ranks, as counted.
    pub sent_bytes: usize,
    /// Bytes a dense ring would have sent.
    pub dense_ring_bytes: usize,
    /// What each rank did when.
    pub spans: Vec<Span>,
}

impl ShownRing {
    /// How many ranks it has.
    pub fn ranks(&self) -> usize {
        self.sent.len()
    }
}

/// Times as the virtual clock says them, beside times by the wall.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Predictions {
    /// How many runs of each ring were measured.
    pub runs: usize,
    /// Each pass on each ring.
    pub rings: Vec<Prediction>,
}

/// One pass on one ring, predicted and measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Prediction {
    /// Forward or backward.
    pub pass: &'static str,
    /// Ranks of the ring.
    pub ranks: usize,
    /// By the clock.
    pub predicted_s: f64,
    /// By the wall, until the last rank was done: the median of the runs.
    pub measured_s: f64,
}

impl Prediction {
    /// How far the prediction was off, as a part of what was measured; positive if it was longer.
    pub fn error(&self) -> f64 {
        self.predicted_s / self.measured_s - 1.0
    }
}

/// A stretch of time of one rank.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Span {
    /// The rank.
    pub rank: usize,
    /// The round.
    pub round: usize,
    /// What it did.
    pub activity: Activity,
    /// Seconds since the call began.
    pub start: f64,
    /// How long it took, in seconds.
    pub seconds: f64,
    /// Bytes sent in the round.
    pub sent_bytes: usize,
    /// Bytes received in the round.
    pub received_bytes: usize,
}

impl RingFindings {
    /// Bytes of the rank's own buffers: all but the kernel's scratch memory.
    pub fn buffer_bytes(&self, held: fn(&RingFindings) -> &BTreeMap<Component, usize>) -> usize {
        let buffers = held(self)
            .iter()
            .filter(|(component, _)| **component != Component::Workspace);
        buffers.map(|(_, bytes)| bytes).sum()
    }
}

impl PassFindings {
    /// Every component that any ring has bytes of.
    pub fn components(&self) -> Vec<Component> {
        let held = self
            .rings
            .iter()
            .flat_map(|ring| ring.planned.iter().chain(&ring.measured));
        let held = held
            .filter(|(_, bytes)| **bytes > 0)
            .map(|(component, _)| *component);
        held.collect::<std::collections::BTreeSet<_>>()
            .into_iter()
            .collect()
    }

    /// The rings that exponents of what travels are fitted to: those of 4 ranks and more, if there
    /// are two of them. On one rank nothing travels, and two need fewer buffers than any other
    /// ring: they hold less than 1/p of what larger rings would lead one to expect.
    pub fn fitted_rings(&self) -> &[RingFindings] {
        let from = |least: usize| {
            let at = self.rings.iter().position(|ring| ring.ranks >= least);
            &self.rings[at.unwrap_or(self.rings.len())..]
        };
        match from(4) {
            rings if rings.len() > 1 => rings,
            _ => from(2),
        }
    }

    /// The exponent of measured bytes of a component against the ring size; nothing where fewer
    /// than two rings have any.
    pub fn exponent(&self, component: Component) -> Option<f64> {
        let of = |ring: &RingFindings| ring.measured.get(&component).copied().unwrap_or(0);
        let rings = match component {
            Component::TravellingKv
            | Component::TravellingQueries
            | Component::TravellingCarry
            | Component::TravellingGradients
            | Component::Sharing => self.fitted_rings(),
            _ => &self.rings,
        };
        fitted(rings.iter().map(|ring| (ring.ranks, of(ring))))
    }

    /// The exponent of all measured buffers.
    pub fn buffers_exponent(&self) -> Option<f64> {
        let rings = self.fitted_rings().iter();
        fitted(rings.map(|ring| (ring.ranks, ring.buffer_bytes(|ring| &ring.measured))))
    }

    /// How far measured buffers were from planned ones at most, as a share of the planned.
    pub fn largest_deviation(&self) -> f64 {
        let off = self.rings.iter().map(|ring| {
            let planned = ring.buffer_bytes(|ring| &ring.planned) as f64;
            let measured = ring.buffer_bytes(|ring| &ring.measured) as f64;
            (measured - planned).abs() / planned.max(1.0)
        });
        off.fold(0.0, f64::max)
    }

    /// Share of all ranks' time that went into an activity.
    pub fn share(&self, activity: Activity) -> f64 {
        let time = |span: &&Span| span.seconds;
        let spans = || self.shown.spans.iter();
        let all: f64 = spans().map(|span| span.seconds).sum();
        let of: f64 = spans()
            .filter(|span| span.activity == activity)
            .map(|span| time(&span))
            .sum();
        if all > 0.0 { of / all } else { 0.0 }
    }
}

/// The exponent of bytes against ranks.
fn fitted(points: impl Iterator<Item = (usize, usize)>) -> Option<f64> {
    let points = points.map(|(ranks, bytes)| (ranks as f64, bytes as f64));
    exponent(&points.collect::<Vec<_>>())
}
