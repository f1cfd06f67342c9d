//! What the virtual clock says beside what the wall says, for every ring of the page.
//!
//! Nothing is fitted to these rings: the clock knows the plan, readings of the kernel alone, and two
//! small rings of its own.

use anyhow::Result;
use encke::{Plan, Request};
use encke_cost::{HostProfile, ProbeSizes, RING_DEADLINE, Statistic, simulate};
use encke_cpu::CpuKernel;
use encke_ring::ThreadRing;

use super::axis::{Anchor, Frame, Screen, canvas, label, line};
use super::findings::{Prediction, Predictions};
use super::markup::Element;
use super::page::percent;
use super::scale::{Scale, Unit};
use crate::terminal::spinner;

/// Runs of each ring that count, and readings of the kernel.
pub const RUNS: usize = 3;
/// Room that a letter of an error takes at most, and a line of them.
const LETTER: f64 = 9.0;
const LINE: f64 = 16.0;
/// Rows of the largest job that is read: enough to know a kernel's pace.
const ROWS: usize = 1024;

/// Predicts requests whose time in the ring was measured (until the last rank was done; outputs are
/// not collected yet), named by their pass. Nothing where branches keep slots of
/// their own until the end: their time is not all spent in the ring.
pub fn predict(measured: &[(&'static str, Request, f64)]) -> Result<Option<Predictions>> {
    let Some((_, first, _)) = measured.first() else {
        return Ok(None);
    };
    if first.pattern.splits_slots() {
        return Ok(None);
    }
    let progress = spinner("the clock");
    let kernel = CpuKernel::new()?;
    let mut profile = HostProfile::new(
        &kernel,
        ProbeSizes {
            rows: first.shape.tokens.clamp(8, ROWS),
            heads: first.shape.heads,
            dim: first.shape.dim,
            dtype: first.dtype,
        },
    )?;
    let ring = ThreadRing::new(kernel, RING_DEADLINE);
    for _ in 0..RUNS {
        profile.measure(&ring)?;
    }
    let machine = profile.machine(Statistic::Median)?;
    let mut rings = Vec::new();
    for (pass, request, measured_s) in measured {
        let plan = Plan::new(request.clone())?;
        rings.push(Prediction {
            pass,
            ranks: plan.ranks(),
            predicted_s: simulate(&plan, &machine, 0..0)?.seconds,
            measured_s: *measured_s,
        });
    }
    progress.finish_and_clear();
    Ok(Some(Predictions { runs: RUNS, rings }))
}

/// The finding, with its number.
pub fn finding(predictions: &Predictions) -> String {
    let errors = predictions.rings.iter().map(|ring| ring.error().abs());
    let worst = percent(errors.fold(0.0, f64::max));
    match predictions.rings.len() {
        1 => format!("The clock predicts the ring’s time within {worst}"),
        rings => format!("The clock predicts all {rings} times within {worst}"),
    }
}

/// How far off, with its sign.
pub fn off(prediction: &Prediction) -> String {
    let sign = if prediction.error() < 0.0 { "−" } else { "+" };
    format!("{sign}{}", percent(prediction.error().abs()))
}

/// What the marks are.
pub fn legend() -> Vec<(String, String)> {
    let entries = [
        ("dot all", "measured: median of the runs"),
        ("dot hollow all", "predicted, with its error"),
    ];
    entries
        .map(|(class, words)| (class.to_string(), words.to_string()))
        .to_vec()
}

/// The rings of one pass: a dot for what was measured, a circle for what was predicted.
pub fn draw(rings: &[&Prediction], screen: Screen, words: &str) -> Element {
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
    // Room above for the errors, which are written over the marks.
    let scale = Scale::even(
        Unit::Seconds,
        (0.0, longest * 1.15),
        (frame.bottom(), frame.top),
    );
    let band = frame.width / rings.len().max(1) as f64;
    let middle = |index: usize| frame.left + band * (index as f64 + 0.5);
    let mut chart = canvas(screen.width(), frame.bottom() + 48.0, words).with(frame.left_axis(
        &scale,
        5,
        "time of the ring",
    ));
    let natural = rings.iter().map(|ring| {
        let higher = scale.at(ring.predicted_s).min(scale.at(ring.measured_s));
        (higher - 12.0, off(ring).chars().count() as f64 * LETTER)
    });
    let heights = apart(natural, band);
    for (index, (ring, height)) in rings.iter().zip(heights).enumerate() {
        chart = chart.with(marks(&scale, middle(index), height, ring));
    }
    let names = rings.iter().enumerate();
    let names = names.map(|(index, ring)| (middle(index), ring.ranks.to_string()));
    chart.with(frame.bottom_labels(names, "ranks in the ring, p"))
}

/// Heights of words side by side, each given with its own height and width and `band` from the next:
/// those that would meet the words before them are lifted over them.
fn apart(words: impl Iterator<Item = (f64, f64)>, band: f64) -> Vec<f64> {
    let mut before: Option<(f64, f64)> = None;
    let lift = |(own, width): (f64, f64)| {
        let meets = |(height, other): &(f64, f64)| {
            (width + other) / 2.0 > band && (own - height).abs() < LINE
        };
        let height = before
            .filter(meets)
            .map_or(own, |(height, _)| height - LINE);
        before = Some((height, width));
        height
    };
    words.map(lift).collect()
}

fn marks(scale: &Scale, x: f64, above: f64, ring: &Prediction) -> Element {
    let (predicted, measured) = (scale.at(ring.predicted_s), scale.at(ring.measured_s));
    let words = format!(
        "{} ranks: {} measured, {} predicted ({})",
        ring.ranks,
        Unit::Seconds.words(ring.measured_s),
        Unit::Seconds.words(ring.predicted_s),
        off(ring)
    );
    let dot = |class: &str, y: f64, radius: f64| {
        Element::new("circle")
            .class(format!("mark {class} all"))
            .place([("cx", x), ("cy", y), ("r", radius)])
            .set("data-tip", &words)
    };
    Element::new("g")
        .class("pair")
        .with(line("leader all", (x, predicted), (x, measured)))
        .with(dot("planned", predicted, 7.0))
        .with(dot("measured", measured, 4.5))
        .with(label(x, above, Anchor::Middle, &off(ring)).class("name"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_that_would_meet_are_lifted() {
        let heights = |words: &[(f64, f64)], band: f64| apart(words.iter().copied(), band);
        let wide = [(100.0, 54.0), (104.0, 54.0), (101.0, 54.0), (60.0, 54.0)];
        assert_eq!(heights(&wide, 50.0), [100.0, 84.0, 101.0, 60.0]);
        assert_eq!(heights(&wide, 60.0), [100.0, 104.0, 101.0, 60.0]);
        // Over one that was lifted itself.
        let rising = [(100.0, 54.0), (90.0, 54.0), (80.0, 54.0)];
        assert_eq!(heights(&rising, 50.0), [100.0, 84.0, 68.0]);
    }
}
