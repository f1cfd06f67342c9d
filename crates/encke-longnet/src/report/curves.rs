//! Curves over steps, drawn on even scales and named where they end.

use encke_lab::charts::axis::{Frame, Screen, canvas, polyline};
use encke_lab::charts::lines::{Series, ends_named, names_width};
use encke_lab::charts::markup::Markup;
use encke_lab::charts::scale::{AxisScale, Unit};

/// The colours of curves, as classes of the style sheet, in the order in which they are used. Two
/// curves that may coincide are told apart by their width, too.
const CLASSES: [&str; 6] = [
    "c-own-kv",
    "c-carry",
    "c-gradients",
    "c-queries",
    "c-output",
    "c-workspace",
];

/// A curve: its name, and (step, value) along it.
pub struct Curve {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

/// The curves, with their axes: values from `low` up.
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
        let place = |(at, value): &(f64, f64)| (x.at(*at), y.at(*value));
        let places: Vec<(f64, f64)> = curve.points.iter().map(place).collect();
        let width = 2.0 + 1.5 * (curves.len() - names.len() - 1) as f64;
        let line = polyline(&format!("line {}", series.class), &places);
        chart = chart.with(line.set("style", format!("stroke-width: {width}")));
        names.extend(places.last().map(|place| (place.1, series)));
    }
    chart.with_all(ends_named(frame, names))
}
