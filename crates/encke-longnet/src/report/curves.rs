//! Line charts over steps, on linear scales, with each line labelled at its end.

use encke_lab::charts::axis::{Frame, Screen, canvas, polyline};
use encke_lab::charts::lines::{Series, ends_named, names_width};
use encke_lab::charts::markup::Markup;
use encke_lab::charts::scale::{AxisScale, Unit};

/// CSS classes of the curves' colours, in order of use. Line widths differ too, because curves may
/// coincide.
const CLASSES: [&str; 6] = [
    "c-own-kv",
    "c-carry",
    "c-gradients",
    "c-queries",
    "c-output",
    "c-workspace",
];

/// A curve: its name, and its points (step, value).
pub struct Curve {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

/// The chart of the curves, with axes; values start at `low`, and `words` describes it for readers.
pub fn draw(
    curves: &[Curve],
    screen: Screen,
    low: f64,
    titles: (&str, &str),
    words: &str,
) -> Markup {
    let series: Vec<Series> = curves
        .iter()
        .enumerate()
        .map(|(at, curve)| Series {
            name: curve.name.clone(),
            end: curve.name.clone(),
            class: CLASSES[at % CLASSES.len()].to_string(),
            points: Vec::new(),
        })
        .collect();
    let height = match screen {
        Screen::Wide => 380.0,
        Screen::Narrow => 300.0,
    };
    let frame = Frame {
        left: 46.0,
        top: 34.0,
        width: screen.width() - 46.0 - names_width(&series),
        height: height - 34.0 - 52.0,
    };
    let all = || curves.iter().flat_map(|curve| &curve.points);
    let most = |values: &mut dyn Iterator<Item = f64>| values.fold(low, f64::max);
    let last = most(&mut all().map(|point| point.0));
    let high = most(&mut all().map(|point| point.1));
    let x = AxisScale::linear(Unit::Count, (0.0, last), (frame.left, frame.right()));
    let y = AxisScale::linear(Unit::Number, (low, high), (frame.bottom(), frame.top));
    let mut chart = canvas(screen.width(), height, words)
        .with(frame.left_axis(&y, 6, titles.1))
        .with(frame.bottom_axis(&x, 8, titles.0));
    let mut names = Vec::new();
    for (curve, series) in curves.iter().zip(&series) {
        let position = |(at, value): &(f64, f64)| (x.at(*at), y.at(*value));
        let positions: Vec<(f64, f64)> = curve.points.iter().map(position).collect();
        let width = 2.0 + 1.5 * (curves.len() - names.len() - 1) as f64;
        let line = polyline(&format!("line {}", series.class), &positions);
        chart = chart.with(line.set("style", format!("stroke-width: {width}")));
        names.extend(positions.last().map(|position| (position.1, series)));
    }
    chart.with_all(ends_named(frame, names))
}
