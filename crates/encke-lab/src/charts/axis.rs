//! What surrounds the marks of a chart: the canvas, the plot within it, its axes.
//!
//! The decision here: every chart is drawn twice, for a wide screen and for a narrow one, and the
//! style sheet shows one of them. Letters then have the same size on both, which a picture that is
//! merely scaled cannot have.

use super::markup::{Markup, ShortNumber};
use super::scale::AxisScale;

/// The size of letters, in the units of the canvas; the style sheet says the same.
pub const LETTER: f64 = 12.0;

/// The screen a chart is drawn for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Screen {
    /// A desk or a projector.
    Wide,
    /// A telephone.
    Narrow,
}

impl Screen {
    /// Both.
    pub const ALL: [Screen; 2] = [Screen::Wide, Screen::Narrow];

    /// Units from left to right.
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

/// A drawing of this size, described for those who cannot see it.
pub fn canvas(width: f64, height: f64, words: &str) -> Markup {
    Markup::new("svg")
        .set("viewBox", format!("0 0 {width:.0} {height:.0}"))
        .set("role", "img")
        .set("aria-label", words)
}

/// About how much room a text takes, from above: layouts must hold in any sans-serif type.
pub fn text_width(text: &str) -> f64 {
    0.62 * LETTER * text.chars().count() as f64
}

/// Where a text stands relative to its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Anchor {
    /// It begins there.
    Start,
    /// It is centred there.
    Middle,
    /// It ends there.
    End,
}

/// A text in a chart, standing on `y`.
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

/// A line through points.
pub fn polyline(class: &str, points: &[(f64, f64)]) -> Markup {
    let points = points
        .iter()
        .map(|(x, y)| format!("{},{}", ShortNumber(*x), ShortNumber(*y)));
    let points: Vec<String> = points.collect();
    Markup::new("polyline")
        .class(class)
        .set("points", points.join(" "))
}

/// The part of a canvas that the marks are in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Frame {
    /// Its left edge.
    pub left: f64,
    /// Its upper edge.
    pub top: f64,
    /// From left to right.
    pub width: f64,
    /// From top to bottom.
    pub height: f64,
}

impl Frame {
    /// Its right edge.
    pub fn right(&self) -> f64 {
        self.left + self.width
    }

    /// Its lower edge.
    pub fn bottom(&self) -> f64 {
        self.top + self.height
    }

    /// A vertical axis: a line across the plot and a number for each tick, the title above.
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
        // Above the numbers, so that it is read from left to right like everything else.
        let x = (self.left - 8.0 - widest).max(0.0);
        axis.with(label(x, self.top - 14.0, Anchor::Start, title).class("title"))
    }

    /// A horizontal axis below the plot, its title below the numbers.
    pub fn bottom_axis(&self, scale: &AxisScale, most: usize, title: &str) -> Markup {
        let places = |most: usize| {
            let place = |tick: f64| (scale.at(tick), scale.label(tick));
            let places = scale.ticks(most).into_iter().map(place);
            places.collect::<Vec<(f64, String)>>()
        };
        // Fewer ticks, where their numbers would touch.
        let apart = |places: &Vec<(f64, String)>| {
            places.windows(2).all(|pair| {
                let room = (text_width(&pair[0].1) + text_width(&pair[1].1)) / 2.0;
                pair[1].0 - pair[0].0 > room + 4.0
            })
        };
        let places = (1..=most).rev().map(places).find(apart);
        self.bottom_labels(places.unwrap_or_default(), title)
    }

    /// Names below the plot, each at its place, and a title below them.
    pub fn bottom_labels(
        &self,
        places: impl IntoIterator<Item = (f64, String)>,
        title: &str,
    ) -> Markup {
        let base = self.bottom();
        let mut axis = Markup::new("g").class("axis").with(line(
            "base",
            (self.left, base),
            (self.right(), base),
        ));
        for (x, text) in places {
            axis = axis
                .with(line("tick", (x, base), (x, base + 4.0)))
                .with(label(x, base + 18.0, Anchor::Middle, &text));
        }
        let middle = self.left + self.width / 2.0;
        axis.with(label(middle, base + 38.0, Anchor::Middle, title).class("title"))
    }
}
