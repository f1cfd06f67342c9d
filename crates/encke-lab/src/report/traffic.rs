//! Bytes between ranks as a matrix, with the total of each rank beside it.

use super::findings::ShownRing;
use crate::charts::axis::{Anchor, Frame, Screen, canvas, label};
use crate::charts::markup::Markup;
use crate::charts::matrix::{Matrix, SHADES, background, class};
use crate::charts::scale::{AxisScale, Unit};

/// The most any rank sends to any other.
fn most(ring: &ShownRing) -> usize {
    ring.sent.iter().flatten().copied().max().unwrap_or(0)
}

/// The shade of a number of bytes, in equal steps up to the largest.
fn shade(bytes: usize, most: usize) -> usize {
    (bytes * SHADES).div_ceil(most.max(1))
}

/// The shades and what they stand for.
pub fn legend(ring: &ShownRing) -> Vec<(String, String)> {
    let most = most(ring);
    let used = |shade_used: &usize| {
        let mut sent = ring.sent.iter().flatten();
        sent.any(|bytes| *bytes > 0 && shade(*bytes, most) == *shade_used)
    };
    let entry = |shade: usize| {
        let bytes = (most * shade / SHADES) as f64;
        let up_to = if shade == SHADES { "" } else { "up to " };
        (
            class(shade),
            format!("{up_to}{}", Unit::Bytes.format(bytes)),
        )
    };
    (1..=SHADES).filter(used).map(entry).collect()
}

/// The matrix of a ring.
pub fn draw(ring: &ShownRing, screen: Screen, description: &str) -> Markup {
    let ranks = ring.ranks();
    let side = match screen {
        Screen::Wide => 380.0,
        Screen::Narrow => 240.0,
    };
    let left = match screen {
        Screen::Wide => 60.0,
        Screen::Narrow => 50.0,
    };
    let frame = Frame {
        left,
        top: 44.0,
        width: side,
        height: side,
    };
    let most = most(ring);
    let matrix = Matrix::new(ranks, |from, to| shade(ring.sent[from][to], most));
    let tip = |from: usize, to: usize| {
        let sent = Unit::Bytes.format(ring.sent[from][to] as f64);
        format!("rank {from} sends {sent} to rank {to}")
    };
    let mut chart = canvas(screen.width(), frame.bottom() + 52.0, description)
        .with(background(frame))
        .with(matrix.marks(frame, tip))
        .with(
            label(
                frame.left - 30.0,
                frame.top - 12.0,
                Anchor::Start,
                "from rank",
            )
            .class("title"),
        );
    let cell = side / ranks.max(1) as f64;
    let every = (24.0 / cell).ceil() as usize;
    let shown = || (0..ranks).step_by(every);
    for rank in shown() {
        let y = frame.top + cell * (rank as f64 + 0.5) + 4.0;
        chart = chart.with(label(frame.left - 8.0, y, Anchor::End, &rank.to_string()));
    }
    let labels = shown().map(|rank| (frame.left + cell * (rank as f64 + 0.5), rank.to_string()));
    chart = chart.with(frame.bottom_labels(labels, "to rank"));
    if screen == Screen::Wide {
        chart = chart.with(totals(ring, frame));
    }
    chart
}

/// The total of each rank, as bars beside the rows of the matrix.
fn totals(ring: &ShownRing, rows: Frame) -> Markup {
    let frame = Frame {
        left: rows.right() + 60.0,
        width: 400.0,
        ..rows
    };
    let sent: Vec<usize> = ring.sent.iter().map(|to| to.iter().sum()).collect();
    let most = sent.iter().copied().max().unwrap_or(0).max(1);
    let scale = AxisScale::linear(Unit::Bytes, (0.0, most as f64), (frame.left, frame.right()));
    let row = frame.height / sent.len().max(1) as f64;
    let bars = sent
        .iter()
        .enumerate()
        .filter(|(_, bytes)| **bytes > 0)
        .map(|(rank, bytes)| {
            let top = frame.top + row * rank as f64 + row * 0.2;
            let width = scale.at(*bytes as f64) - frame.left;
            Markup::new("rect")
                .class("mark sum")
                .place([
                    ("x", frame.left),
                    ("y", top),
                    ("width", width),
                    ("height", row * 0.6),
                ])
                .set(
                    "data-tip",
                    format!("rank {rank} sends {}", Unit::Bytes.format(*bytes as f64)),
                )
        });
    Markup::new("g")
        .class("totals")
        .with_all(bars)
        .with(frame.bottom_axis(&scale, 4, "sent by each rank"))
}
