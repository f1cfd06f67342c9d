//! The timeline of a ring: a row for each rank, time from left to right.
//!
//! Waiting has the most conspicuous colour, because it is what a reader looks for.

use encke::trace::Activity;

use super::findings::{ShownRing, Span};
use crate::charts::axis::{Anchor, Frame, Screen, canvas, label};
use crate::charts::markup::Markup;
use crate::charts::scale::{AxisScale, Unit};

/// Every activity, in the order of the legend.
pub const ACTIVITIES: [Activity; 4] = [
    Activity::Compute,
    Activity::Prepare,
    Activity::Load,
    Activity::Wait,
];

/// The class of an activity in the style sheet.
pub fn class(activity: Activity) -> &'static str {
    match activity {
        Activity::Load => "a-load",
        Activity::Prepare => "a-prepare",
        Activity::Compute => "a-compute",
        Activity::Wait => "a-wait",
    }
}

/// The text of an activity in the legend.
pub fn text(activity: Activity) -> &'static str {
    match activity {
        Activity::Load => "load inputs",
        Activity::Prepare => "pack, combine, finish",
        Activity::Compute => "compute, while rows are sent",
        Activity::Wait => "wait for rows",
    }
}

/// The timeline of a ring.
pub fn draw(ring: &ShownRing, screen: Screen, description: &str) -> Markup {
    let ranks = ring.ranks();
    let row: f64 = match ranks {
        0..=8 => 22.0,
        9..=16 => 16.0,
        _ => 12.0,
    };
    let frame = Frame {
        left: 56.0,
        top: 26.0,
        width: screen.width() - 56.0 - 26.0,
        height: row * ranks as f64,
    };
    let end = ring.spans.iter().map(|span| span.start + span.seconds);
    let end = end.fold(0.0, f64::max).max(1e-9);
    let scale = AxisScale::linear(Unit::Seconds, (0.0, end), (frame.left, frame.right()));
    let most = if screen == Screen::Wide { 9 } else { 4 };
    let mut chart = canvas(screen.width(), frame.bottom() + 48.0, description)
        .with(label(0.0, frame.top - 12.0, Anchor::Start, "rank").class("title"));
    // Every row is drawn, but only labels that do not overlap.
    let every = (15.0 / row).ceil() as usize;
    for rank in (0..ranks).step_by(every) {
        let y = frame.top + row * (rank as f64 + 0.5) + 4.0;
        chart = chart.with(label(frame.left - 10.0, y, Anchor::End, &rank.to_string()));
    }
    for rank in 0..ranks {
        let spans = ring.spans.iter().filter(|span| span.rank == rank);
        let top = frame.top + row * rank as f64 + 1.5;
        let marks = spans.map(|span| mark(&scale, span, top, row - 3.0));
        chart = chart.with(Markup::new("g").class("row").with_all(marks));
    }
    chart.with(frame.bottom_axis(&scale, most, "time since the call began"))
}

fn mark(scale: &AxisScale, span: &Span, top: f64, height: f64) -> Markup {
    let (left, right) = (scale.at(span.start), scale.at(span.start + span.seconds));
    let mut tip = format!(
        "rank {}, round {}: {}, {}",
        span.rank,
        span.round,
        span.activity.name(),
        Unit::Seconds.format(span.seconds),
    );
    if span.sent_bytes + span.received_bytes > 0 {
        let (sent, received) = (span.sent_bytes as f64, span.received_bytes as f64);
        let (sent, received) = (Unit::Bytes.format(sent), Unit::Bytes.format(received));
        tip += &format!("; the round sent {sent} and received {received}");
    }
    Markup::new("rect")
        .class(format!("mark {}", class(span.activity)))
        .place([
            ("x", left),
            ("y", top),
            ("width", right - left),
            ("height", height),
        ])
        .set("data-tip", tip)
}
