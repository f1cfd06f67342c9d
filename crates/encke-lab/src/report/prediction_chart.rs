//! The chart of predicted and measured times, one pair of marks for each ring size.

use super::findings::{Prediction, Predictions};
use crate::charts::axis::{Anchor, Frame, Screen, canvas, label, line};
use crate::charts::markup::Markup;
use crate::charts::scale::{AxisScale, Unit};
use crate::format::percent;

/// Upper bounds of the width of a letter and of the height of a line of the error labels.
const LETTER: f64 = 9.0;
const LINE: f64 = 16.0;

/// The heading: the largest error.
pub fn finding(predictions: &Predictions) -> String {
    let errors = predictions.rings.iter().map(|ring| ring.error().abs());
    let worst = percent(errors.fold(0.0, f64::max));
    match predictions.rings.len() {
        1 => format!("The time of the ring is predicted within {worst}"),
        rings => format!("All {rings} times are predicted within {worst}"),
    }
}

/// The relative error of a prediction, with its sign.
pub fn signed_error(prediction: &Prediction) -> String {
    let sign = if prediction.error() < 0.0 { "−" } else { "+" };
    format!("{sign}{}", percent(prediction.error().abs()))
}

/// The marks and their meaning.
pub fn legend() -> Vec<(String, String)> {
    let entries = [
        ("dot all", "measured: median of the runs"),
        ("dot hollow all", "predicted, with its error"),
    ];
    entries
        .map(|(class, text)| (class.to_string(), text.to_string()))
        .to_vec()
}

/// The rings of one pass: a dot for the measured time, a circle for the predicted one.
pub fn draw(rings: &[&Prediction], screen: Screen, description: &str) -> Markup {
    let height = if screen == Screen::Wide { 220.0 } else { 200.0 };
    let frame = Frame {
        left: 66.0,
        top: 34.0,
        width: screen.width() - 66.0 - 16.0,
        height,
    };
    let longest = rings
        .iter()
        .flat_map(|ring| [ring.predicted_s, ring.measured_s]);
    let longest = longest.fold(0.0, f64::max).max(1e-9);
    // Room above the marks for the labels with the errors.
    let scale = AxisScale::linear(
        Unit::Seconds,
        (0.0, longest * 1.15),
        (frame.bottom(), frame.top),
    );
    let band = frame.width / rings.len().max(1) as f64;
    let middle = |index: usize| frame.left + band * (index as f64 + 0.5);
    let mut chart = canvas(screen.width(), frame.bottom() + 48.0, description)
        .with(frame.left_axis(&scale, 5, "time of the ring"));
    let natural = rings.iter().map(|ring| {
        let higher = scale.at(ring.predicted_s).min(scale.at(ring.measured_s));
        (
            higher - 12.0,
            signed_error(ring).chars().count() as f64 * LETTER,
        )
    });
    let heights = apart(natural, band);
    for (index, (ring, height)) in rings.iter().zip(heights).enumerate() {
        chart = chart.with(marks(&scale, middle(index), height, ring));
    }
    let names = rings.iter().enumerate();
    let names = names.map(|(index, ring)| (middle(index), ring.ranks.to_string()));
    chart.with(frame.bottom_labels(names, "ranks in the ring, p"))
}

/// Heights of labels side by side, each given with its height and width, and `band` apart: a label
/// that would overlap the one before is moved above it.
fn apart(labels: impl Iterator<Item = (f64, f64)>, band: f64) -> Vec<f64> {
    let mut before: Option<(f64, f64)> = None;
    let lift = |(own, width): (f64, f64)| {
        let overlaps = |(height, other): &(f64, f64)| {
            (width + other) / 2.0 > band && (own - height).abs() < LINE
        };
        let height = before
            .filter(overlaps)
            .map_or(own, |(height, _)| height - LINE);
        before = Some((height, width));
        height
    };
    labels.map(lift).collect()
}

fn marks(scale: &AxisScale, x: f64, above: f64, ring: &Prediction) -> Markup {
    let (predicted, measured) = (scale.at(ring.predicted_s), scale.at(ring.measured_s));
    let tip = format!(
        "{} ranks: {} measured, {} predicted ({})",
        ring.ranks,
        Unit::Seconds.format(ring.measured_s),
        Unit::Seconds.format(ring.predicted_s),
        signed_error(ring)
    );
    let dot = |class: &str, y: f64, radius: f64| {
        Markup::new("circle")
            .class(format!("mark {class} all"))
            .place([("cx", x), ("cy", y), ("r", radius)])
            .set("data-tip", &tip)
    };
    Markup::new("g")
        .class("pair")
        .with(line("leader all", (x, predicted), (x, measured)))
        .with(dot("planned", predicted, 7.0))
        .with(dot("measured", measured, 4.5))
        .with(label(x, above, Anchor::Middle, &signed_error(ring)).class("name"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_that_would_overlap_are_moved_up() {
        let heights = |labels: &[(f64, f64)], band: f64| apart(labels.iter().copied(), band);
        let wide = [(100.0, 54.0), (104.0, 54.0), (101.0, 54.0), (60.0, 54.0)];
        assert_eq!(heights(&wide, 50.0), [100.0, 84.0, 101.0, 60.0]);
        assert_eq!(heights(&wide, 60.0), [100.0, 104.0, 101.0, 60.0]);
        // Above one that was moved itself.
        let rising = [(100.0, 54.0), (90.0, 54.0), (80.0, 54.0)];
        assert_eq!(heights(&rising, 50.0), [100.0, 84.0, 68.0]);
    }
}
