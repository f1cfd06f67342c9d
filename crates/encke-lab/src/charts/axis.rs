//! The frame of a chart: canvas, plot area, axes, labels.
//!
//! The decision here: every chart is drawn twice, for a wide screen and for a narrow one, and the
//! style sheet shows one of them, so that text has the same size on both. Scaling one drawing would
//! scale its text.

use super::markup::{Markup, ShortNumber};
use super::scale::AxisScale;

/// The font size, in units of the canvas; the style sheet has the same.
pub const FONT_SIZE: f64 = 12.0;

/// The screen width that a chart is drawn for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Screen {
    /// A desk or a projector.
    Wide,
    /// A telephone.
    Narrow,
}

impl Screen {
    /// Both widths.
    pub const ALL: [Screen; 2] = [Screen::Wide, Screen::Narrow];

    /// Width in units of the canvas.
    pub fn width(self) -> f64 {
        match self {
            Screen::Wide => 960.0,
            Screen::Narrow => 360.0,
        }
    }

    /// Its class in the style sheet.
    pub fn class(self) -> &'static str {
        match self {
            Screen::Wide => "wide",
            Screen::Narrow => "narrow",
        }
    }
}

/// An SVG drawing of this size, with a description for screen readers.
pub fn canvas(width: f64, height: f64, description: &str) -> Markup {
    Markup::new("svg")
        .set("viewBox", format!("0 0 {width:.0} {height:.0}"))
        .set("role", "img")
        .set("aria-label", description)
}

/// An upper bound of the width of a text in any sans-serif font.
pub fn text_width(text: &str) -> f64 {
    0.62 * FONT_SIZE * text.chars().count() as f64
}

/// Alignment of a text relative to its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Anchor {
    /// Begins there.
    Start,
    /// Centred there.
    Middle,
    /// Ends there.
    End,
}

/// A text whose baseline is at `y`.
pub fn label(x: f64, y: f64, anchor: Anchor, text: &str) -> Markup {
    let element = Markup::new("text").place([("x", x), ("y", y)]);
    let element = match anchor {
        Anchor::Start => element,
        Anchor::Middle => element.set("text-anchor", "middle"),
        Anchor::End => element.set("text-anchor", "end"),
    };
    element.text(text)
}

/// A straight line.
pub fn line(class: &str, from: (f64, f64), to: (f64, f64)) -> Markup {
    let ends = [("x1", from.0), ("y1", from.1), ("x2", to.0), ("y2", to.1)];
    Markup::new("line").class(class).place(ends)
}

/// A polygonal line through points.
pub fn polyline(class: &str, points: &[(f64, f64)]) -> Markup {
    let points = points
        .iter()
        .map(|(x, y)| format!("{},{}", ShortNumber(*x), ShortNumber(*y)));
    let points: Vec<String> = points.collect();
    Markup::new("polyline")
        .class(class)
        .set("points", points.join(" "))
}

/// The plot area of a canvas.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Frame {
    /// Left edge.
    pub left: f64,
    /// Upper edge.
    pub top: f64,
    /// Width.
    pub width: f64,
    /// Height.
    pub height: f64,
}

impl Frame {
    /// Right edge.
    pub fn right(&self) -> f64 {
        self.left + self.width
    }

    /// Lower edge.
    pub fn bottom(&self) -> f64 {
        self.top + self.height
    }

    /// A vertical axis: a grid line and a label for each tick, and the title above.
    pub fn left_axis(&self, scale: &AxisScale, most: usize, title: &str) -> Markup {
        let mut axis = Markup::new("g").class("axis");
        let mut widest: f64 = 0.0;
        for tick in scale.ticks(most) {
            let (y, text) = (scale.at(tick), scale.label(tick));
            widest = widest.max(text_width(&text));
            axis = axis
                .with(line("grid", (self.left, y), (self.right(), y)))
                .with(label(self.left - 8.0, y + 4.0, Anchor::End, &text));
        }
        // Above the labels and not rotated, so that it is read like any other text.
        let x = (self.left - 8.0 - widest).max(0.0);
        axis.with(label(x, self.top - 14.0, Anchor::Start, title).class("title"))
    }

    /// A horizontal axis below the plot, with at most `most` ticks whose labels do not overlap.
    pub fn bottom_axis(&self, scale: &AxisScale, most: usize, title: &str) -> Markup {
        let labels = |most: usize| {
            let label = |tick: f64| (scale.at(tick), scale.label(tick));
            let labels = scale.ticks(most).into_iter().map(label);
            labels.collect::<Vec<(f64, String)>>()
        };
        let apart = |labels: &Vec<(f64, String)>| {
            labels.windows(2).all(|pair| {
                let room = (text_width(&pair[0].1) + text_width(&pair[1].1)) / 2.0;
                pair[1].0 - pair[0].0 > room + 4.0
            })
        };
        let labels = (1..=most).rev().map(labels).find(apart);
        self.bottom_labels(labels.unwrap_or_default(), title)
    }

    /// Labels below the plot at these positions, and a title below them.
    pub fn bottom_labels(
        &self,
        labels: impl IntoIterator<Item = (f64, String)>,
        title: &str,
    ) -> Markup {
        let base = self.bottom();
        let mut axis = Markup::new("g").class("axis").with(line(
            "base",
            (self.left, base),
            (self.right(), base),
        ));
        for (x, text) in labels {
            axis = axis
                .with(line("tick", (x, base), (x, base + 4.0)))
                .with(label(x, base + 18.0, Anchor::Middle, &text));
        }
        let middle = self.left + self.width / 2.0;
        axis.with(label(middle, base + 38.0, Anchor::Middle, title).class("title"))
    }
}
