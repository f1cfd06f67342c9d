//! Line charts with two logarithmic scales, on which a power of the ring size is a straight line.
//!
//! The decision here: lines are labelled at their ends, and labels that would overlap are moved
//! apart, so that lines that coincide still have a label each.

use super::axis::{Anchor, FONT_SIZE, Frame, label, line, polyline, text_width};
use super::markup::Markup;
use super::scale::{AxisScale, Unit};

/// The data of a line.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// Its name.
    pub name: String,
    /// The label at its end.
    pub end: String,
    /// Its colour, as a class of the style sheet.
    pub class: String,
    /// (x, measured, planned); values of 0 are not drawn.
    pub points: Vec<(f64, f64, f64)>,
}

/// Width of the labels to the right of the plot.
pub fn names_width(series: &[Series]) -> f64 {
    let widths = series.iter().map(|series| text_width(&series.end));
    widths.fold(0.0, f64::max) + 22.0
}

/// The lines, with their axes. `guide` is the first point of a dashed line proportional to 1/x.
pub fn draw(
    frame: Frame,
    series: &[Series],
    guide: Option<(f64, f64)>,
    unit: Unit,
    titles: (&str, &str),
) -> Markup {
    let points = || series.iter().flat_map(|series| &series.points);
    let shown = points().flat_map(|(_, measured, planned)| [*measured, *planned]);
    let shown: Vec<f64> = shown.filter(|value| *value > 0.0).collect();
    let (low, high) = range(&shown);
    let (first, last) = range(&points().map(|point| point.0).collect::<Vec<_>>());
    let x = AxisScale::logarithmic(
        Unit::Count,
        (first, last),
        (frame.left + 8.0, frame.right() - 8.0),
    );
    let y = AxisScale::logarithmic(unit, (low / 1.3, high * 1.3), (frame.bottom(), frame.top));
    let mut chart = Markup::new("g")
        .class("lines")
        .with(frame.left_axis(&y, 6, titles.1))
        .with(frame.bottom_axis(&x, 8, titles.0));
    let mut names = Vec::new();
    for series in series {
        let points = series
            .points
            .iter()
            .filter(|(_, measured, _)| *measured > 0.0);
        let points: Vec<(f64, f64)> = points
            .map(|(at, value, _)| (x.at(*at), y.at(*value)))
            .collect();
        chart = chart.with(polyline(&format!("line {}", series.class), &points));
        for (at, measured, planned) in &series.points {
            chart = chart.with_all(marks(&x, &y, series, (*at, *measured, *planned), unit));
        }
        names.extend(points.last().map(|point| (point.1, series)));
    }
    // Drawn last, so that it is visible where it coincides with a line.
    if let Some((from, value)) = guide {
        let end = value * from / last;
        let points = [(x.at(from), y.at(value)), (x.at(last), y.at(end))];
        chart = chart.with(polyline("guide", &points));
    }
    chart.with_all(ends_named(frame, names))
}

/// A filled dot for the measured value inside a circle for the planned one.
fn marks(
    x: &AxisScale,
    y: &AxisScale,
    series: &Series,
    (at, measured, planned): (f64, f64, f64),
    unit: Unit,
) -> Vec<Markup> {
    let tip = format!(
        "{} on {at:.0}: {} measured, {} planned",
        series.name,
        unit.format(measured),
        unit.format(planned)
    );
    let dot = |kind: &str, value: f64, radius: f64| {
        let class = format!("mark {kind} {}", series.class);
        Markup::new("circle")
            .class(class)
            .place([("cx", x.at(at)), ("cy", y.at(value)), ("r", radius)])
            .set("data-tip", &tip)
    };
    let rings = (planned > 0.0).then(|| dot("planned", planned, 5.0));
    let dots = (measured > 0.0).then(|| dot("measured", measured, 2.8));
    rings.into_iter().chain(dots).collect()
}

/// Labels at the right, each with a thin line to the end of its line.
pub fn ends_named(frame: Frame, mut names: Vec<(f64, &Series)>) -> Vec<Markup> {
    names.sort_by(|one, other| one.0.total_cmp(&other.0));
    let ends: Vec<f64> = names.iter().map(|(y, _)| *y).collect();
    let positions = apart(&ends, FONT_SIZE + 3.0, (frame.top, frame.bottom()));
    let named = names.iter().zip(positions).flat_map(|((end, series), y)| {
        let (from, to) = ((frame.right() - 2.0, *end), (frame.right() + 12.0, y));
        [
            line(&format!("leader {}", series.class), from, to),
            label(frame.right() + 16.0, y + 4.0, Anchor::Start, &series.end).class("name"),
        ]
    });
    named.collect()
}

/// Moves rising positions until they are `distance` apart, and within the bounds if there is room.
fn apart(positions: &[f64], distance: f64, (top, bottom): (f64, f64)) -> Vec<f64> {
    let mut moved = positions.to_vec();
    for i in 0..moved.len() {
        let above = if i == 0 { top } else { moved[i - 1] + distance };
        moved[i] = moved[i].max(above);
    }
    let mut below = bottom;
    for position in moved.iter_mut().rev() {
        *position = position.min(below);
        below = *position - distance;
    }
    moved
}

/// The smallest and the largest value.
fn range(values: &[f64]) -> (f64, f64) {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(0.0, f64::max);
    if low.is_finite() {
        (low, high)
    } else {
        (1.0, 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::apart;

    #[test]
    fn labels_are_moved_apart_and_stay_within_bounds() {
        let places = apart(&[10.0, 10.0, 10.0, 95.0, 99.0], 15.0, (0.0, 100.0));
        for pair in places.windows(2) {
            assert!(pair[1] - pair[0] >= 15.0 - 1e-9, "{places:?}");
        }
        assert!(places[0] >= 0.0 && places[4] <= 100.0, "{places:?}");
        assert_eq!(apart(&[10.0, 50.0], 15.0, (0.0, 100.0)), [10.0, 50.0]);
    }
}
