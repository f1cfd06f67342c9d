//! Stacked bars, two for each ring size: measured (solid) and planned (pale).
//!
//! Not a general bar chart: heights are bytes, and a dashed line is proportional to 1/p.

use super::axis::{Frame, polyline};
use super::markup::Markup;
use super::scale::{AxisScale, Unit};

/// A part of a bar.
#[derive(Debug, Clone, PartialEq)]
pub struct BarPart {
    /// Its name.
    pub name: &'static str,
    /// Its colour, as a class of the style sheet.
    pub class: String,
    /// Its height.
    pub bytes: usize,
}

/// The two bars of a ring size.
#[derive(Debug, Clone, PartialEq)]
pub struct BarPair {
    /// The ring size.
    pub ranks: usize,
    /// Measured parts, from the bottom up.
    pub measured: Vec<BarPart>,
    /// Planned parts, in the same order.
    pub planned: Vec<BarPart>,
}

/// The height of a bar.
fn total(parts: &[BarPart]) -> usize {
    parts.iter().map(|part| part.bytes).sum()
}

/// The bars, with their axes. The dashed line is `guide` bytes divided by the ring size, from the
/// first ring of `guide_from` ranks on.
pub fn draw(frame: Frame, pairs: &[BarPair], guide: f64, guide_from: usize) -> Markup {
    let most = pairs
        .iter()
        .flat_map(|pair| [total(&pair.measured), total(&pair.planned)]);
    let most = most.max().unwrap_or(0) as f64;
    let scale = AxisScale::linear(Unit::Bytes, (0.0, most * 1.02), (frame.bottom(), frame.top));
    let band = frame.width / pairs.len().max(1) as f64;
    let middle = |index: usize| frame.left + band * (index as f64 + 0.5);
    let width = (band * 0.36).min(34.0);
    let mut chart = Markup::new("g").class("stack").with(frame.left_axis(
        &scale,
        6,
        "bytes of the fullest rank",
    ));
    for (index, pair) in pairs.iter().enumerate() {
        let gap = 1.0;
        let left = middle(index) - width - gap;
        chart = chart
            .with(bar(
                &scale,
                left,
                width,
                pair.ranks,
                "measured",
                &pair.measured,
            ))
            .with(bar(
                &scale,
                left + width + 2.0 * gap,
                width,
                pair.ranks,
                "planned",
                &pair.planned,
            ));
    }
    let on_guide = |(index, pair): (usize, &BarPair)| {
        (pair.ranks >= guide_from).then(|| (middle(index), scale.at(guide / pair.ranks as f64)))
    };
    let points: Vec<(f64, f64)> = pairs.iter().enumerate().filter_map(on_guide).collect();
    if points.len() > 1 {
        chart = chart.with(polyline("guide", &points));
    }
    let names = pairs.iter().enumerate();
    let names = names.map(|(index, pair)| (middle(index), pair.ranks.to_string()));
    chart.with(frame.bottom_labels(names, "ranks in the ring, p"))
}

/// One bar. Thin gaps separate its parts, for readers who do not see the colours.
fn bar(
    scale: &AxisScale,
    left: f64,
    width: f64,
    ranks: usize,
    kind: &str,
    parts: &[BarPart],
) -> Markup {
    let mut bar = Markup::new("g").class(format!("bar {kind}"));
    let mut below = 0;
    let all = total(parts);
    for part in parts.iter().filter(|part| part.bytes > 0) {
        let (low, high) = (
            scale.at(below as f64),
            scale.at((below + part.bytes) as f64),
        );
        let gap = if low - high > 2.5 { 0.75 } else { 0.0 };
        let tip = format!(
            "{} on each of {ranks}: {} {kind}, of {} in all",
            part.name,
            Unit::Bytes.format(part.bytes as f64),
            Unit::Bytes.format(all as f64),
        );
        bar = bar.with(
            Markup::new("rect")
                .class(format!("mark {}", part.class))
                .place([
                    ("x", left),
                    ("y", high),
                    ("width", width),
                    ("height", low - high - gap),
                ])
                .set("data-tip", tip),
        );
        below += part.bytes;
    }
    bar
}
