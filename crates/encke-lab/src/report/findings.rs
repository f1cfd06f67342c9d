//! Everything the page shows, as one value: measured and planned bytes, times, traffic.
//!
//! The decision here: the measurement does not draw, and the charts do not measure. The value is
//! also embedded in the page as JSON, so that a reader of the page has the data.

use std::collections::BTreeMap;

use encke::plan::program::Component;
use encke::trace::Activity;
use encke_sim::power_law::exponent;
use serde::Serialize;

use super::picture::Picture;

/// The results of a report.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReportFindings {
    /// What was computed.
    pub setup: Setup,
    /// The forward pass and, if it ran, the backward pass.
    pub passes: Vec<PassFindings>,
    /// The attention mask; not serialised, because it follows from the setup.
    #[serde(skip)]
    pub picture: Picture,
    /// Predicted and measured times; `None` for patterns that the cost model does not cover.
    pub predictions: Option<Predictions>,
    /// Where and how it was measured: (name, value).
    pub environment: Vec<(String, String)>,
}

/// What was computed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Setup {
    /// Tokens of the sequence.
    pub tokens: usize,
    /// Sizes and type, as text.
    pub sizes: String,
    /// The pattern, as text.
    pub pattern: String,
    /// The sharding, as text.
    pub ring: String,
    /// (query, key) pairs of the pattern.
    pub pairs: u128,
    /// Pairs of dense attention.
    pub dense_pairs: u128,
}

/// One pass on all ring sizes, and in detail on the ring that is shown.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PassFindings {
    /// Forward or backward.
    pub name: &'static str,
    /// Each ring size, rising.
    pub rings: Vec<RingFindings>,
    /// The ring that is shown.
    pub shown: ShownRing,
}

/// Memory and time of one ring size.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RingFindings {
    /// Ranks of the ring.
    pub ranks: usize,
    /// The rank that holds most.
    pub fullest: usize,
    /// Its planned bytes.
    pub planned: BTreeMap<Component, usize>,
    /// Its measured bytes.
    pub measured: BTreeMap<Component, usize>,
    /// Time of the call.
    pub seconds: f64,
}

/// Traffic and timeline of one ring.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ShownRing {
    /// Planned bytes sent, `[from][to]`.
    pub sent: Vec<Vec<usize>>,
    /// Measured bytes sent by all ranks.
    pub sent_bytes: usize,
    /// Bytes that a dense ring sends.
    pub dense_ring_bytes: usize,
    /// The activities of all ranks.
    pub spans: Vec<Span>,
}

impl ShownRing {
    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.sent.len()
    }
}

/// Predicted and measured times.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Predictions {
    /// Number of measured runs of each ring.
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
    /// Predicted by the cost model.
    pub predicted_s: f64,
    /// Measured until the last rank was done: the median of the runs.
    pub measured_s: f64,
}

impl Prediction {
    /// The relative error of the prediction; positive if it is too long.
    pub fn error(&self) -> f64 {
        self.predicted_s / self.measured_s - 1.0
    }
}

/// One activity of one rank.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Span {
    /// The rank.
    pub rank: usize,
    /// The round.
    pub round: usize,
    /// The activity.
    pub activity: Activity,
    /// Seconds since the call began.
    pub start: f64,
    /// Duration in seconds.
    pub seconds: f64,
    /// Bytes sent in the round.
    pub sent_bytes: usize,
    /// Bytes received in the round.
    pub received_bytes: usize,
}

impl RingFindings {
    /// Bytes of all buffers, without the kernel's workspace.
    pub fn buffer_bytes(&self, held: fn(&RingFindings) -> &BTreeMap<Component, usize>) -> usize {
        let buffers = held(self)
            .iter()
            .filter(|(component, _)| **component != Component::Workspace);
        buffers.map(|(_, bytes)| bytes).sum()
    }
}

impl PassFindings {
    /// Every component that any ring has.
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

    /// The rings to which exponents of travelling buffers are fitted: those of 4 ranks and more, if
    /// there are two of them. One rank sends nothing, and two ranks need fewer buffers than larger
    /// rings.
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

    /// The exponent of measured bytes of a component against the ring size; `None` if fewer than
    /// two rings have the component.
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
        fit_exponent(rings.iter().map(|ring| (ring.ranks, of(ring))))
    }

    /// The exponent of all measured buffers.
    pub fn buffers_exponent(&self) -> Option<f64> {
        let rings = self.fitted_rings().iter();
        fit_exponent(rings.map(|ring| (ring.ranks, ring.buffer_bytes(|ring| &ring.measured))))
    }

    /// The largest relative difference of measured and planned buffers.
    pub fn largest_deviation(&self) -> f64 {
        let off = self.rings.iter().map(|ring| {
            let planned = ring.buffer_bytes(|ring| &ring.planned) as f64;
            let measured = ring.buffer_bytes(|ring| &ring.measured) as f64;
            (measured - planned).abs() / planned.max(1.0)
        });
        off.fold(0.0, f64::max)
    }

    /// The fraction of all ranks' time spent in an activity.
    pub fn fraction(&self, activity: Activity) -> f64 {
        let spans = || self.shown.spans.iter();
        let all: f64 = spans().map(|span| span.seconds).sum();
        let of_activity = spans().filter(|span| span.activity == activity);
        let of: f64 = of_activity.map(|span| span.seconds).sum();
        if all > 0.0 { of / all } else { 0.0 }
    }
}

/// The exponent of bytes against ranks.
fn fit_exponent(points: impl Iterator<Item = (usize, usize)>) -> Option<f64> {
    let points = points.map(|(ranks, bytes)| (ranks as f64, bytes as f64));
    exponent(&points.collect::<Vec<_>>())
}
