//! Charts of predicted scale: a line for each length, over the number of devices.

use super::markdown::tokens;
use super::{ScaleFindings, ScalePattern, ScalePoint, TOKENS};
use crate::charts::axis::{Frame, Screen, canvas, polyline};
use crate::charts::lines::{Series, ends_named, names_width};
use crate::charts::markup::Markup;
use crate::charts::scale::{AxisScale, Unit};
use crate::schedules::RING;

/// The colours of the lengths, as classes of the style sheet.
const CLASSES: [&str; 5] = [
    "c-queries",
    "c-own-kv",
    "c-carry",
    "c-gradients",
    "c-output",
];

/// What a chart shows of a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// The time of both passes.
    Time,
    /// The efficiency, in per cent.
    Efficiency,
    /// Bytes of a rank.
    Memory,
    /// Bytes that a node sends to others.
    Between,
}

impl Shown {
    fn unit(self) -> Unit {
        match self {
            Shown::Time => Unit::Seconds,
            Shown::Efficiency => Unit::Count,
            Shown::Memory | Shown::Between => Unit::Bytes,
        }
    }

    fn title(self) -> &'static str {
        match self {
            Shown::Time => "predicted time, forward and backward",
            Shown::Efficiency => "predicted efficiency, %",
            Shown::Memory => "planned buffers of a rank",
            Shown::Between => "planned bytes that a node sends to others",
        }
    }

    fn value(self, findings: &ScaleFindings, of: &ScalePoint) -> f64 {
        let best = of.fastest();
        match self {
            Shown::Time => best.seconds(),
            Shown::Efficiency => 100.0 * best.efficiency,
            Shown::Memory => best.memory_bytes as f64,
            Shown::Between => {
                let nodes = of.ranks.div_ceil(findings.machine.ranks_per_node);
                best.between_bytes as f64 / nodes as f64
            }
        }
    }
}

/// One chart of a pattern. A filled dot is a point whose fastest schedule is the ring, a circle one
/// with another.
pub fn draw(
    findings: &ScaleFindings,
    pattern: ScalePattern,
    shown: Shown,
    screen: Screen,
) -> Markup {
    let points: Vec<&ScalePoint> = findings.of(pattern).collect();
    let value = |of: &&ScalePoint| shown.value(findings, of);
    let mut all = Vec::new();
    for (length, class) in TOKENS.into_iter().zip(CLASSES) {
        let of_length = points.iter().filter(|of| of.tokens == length);
        let name = tokens(length);
        let at = of_length.map(|of| (of.ranks as f64, value(of), 0.0));
        all.push(Series {
            end: name.clone(),
            name,
            class: class.to_string(),
            points: at.filter(|point| point.1 > 0.0).collect(),
        });
    }
    all.retain(|series| !series.points.is_empty());
    let height = if screen == Screen::Wide { 280.0 } else { 220.0 };
    let left = 66.0;
    let frame = Frame {
        left,
        top: 34.0,
        width: screen.width() - left - names_width(&all),
        height,
    };
    let values = || {
        all.iter()
            .flat_map(|series| &series.points)
            .map(|point| point.1)
    };
    let (low, high) = values().fold((f64::INFINITY, 0.0f64), |(low, high), value| {
        (low.min(value), high.max(value))
    });
    let ranks = || points.iter().map(|of| of.ranks as f64);
    let (first, last) = (
        ranks().fold(f64::INFINITY, f64::min),
        ranks().fold(0.0, f64::max),
    );
    let description = format!("{}: {}, over devices", pattern.name(), shown.title());
    let mut chart = canvas(screen.width(), frame.bottom() + 48.0, &description);
    if all.is_empty() {
        return chart;
    }
    let x = AxisScale::logarithmic(
        Unit::Count,
        (first, last),
        (frame.left + 8.0, frame.right() - 8.0),
    );
    let (bottom, top) = (frame.bottom(), frame.top);
    let y = match shown {
        Shown::Efficiency => AxisScale::linear(Unit::Count, (0.0, 100.0), (bottom, top)),
        _ => AxisScale::logarithmic(shown.unit(), (low / 1.3, high * 1.3), (bottom, top)),
    };
    chart = chart
        .with(frame.left_axis(&y, 6, shown.title()))
        .with(frame.bottom_axis(&x, 8, "devices"));
    let mut names = Vec::new();
    for series in &all {
        let at = series
            .points
            .iter()
            .map(|(ranks, value, _)| (x.at(*ranks), y.at(*value)));
        let at: Vec<(f64, f64)> = at.collect();
        chart = chart.with(polyline(&format!("line {}", series.class), &at));
        for ((ranks, value, _), (cx, cy)) in series.points.iter().zip(&at) {
            let point = points
                .iter()
                .find(|of| tokens(of.tokens) == series.name && of.ranks as f64 == *ranks);
            let schedule = point.map_or(RING, |of| of.fastest().name);
            let kind = if schedule == RING {
                "measured"
            } else {
                "planned"
            };
            let text = match shown {
                Shown::Efficiency => format!("{value:.1} %"),
                _ => shown.unit().format(*value),
            };
            let tip = format!("{} tokens on {ranks:.0}: {text}, {schedule}", series.name);
            let dot = Markup::new("circle")
                .class(format!("mark {kind} {}", series.class))
                .place([("cx", *cx), ("cy", *cy), ("r", 4.0)])
                .set("data-tip", tip);
            chart = chart.with(dot);
        }
        names.extend(at.last().map(|end| (end.1, series)));
    }
    chart.with_all(ends_named(frame, names))
}
