//! The attention mask as charts: the whole sequence and its beginning, side by side.

use encke::explain::grouped;

use super::picture::{Close, Picture, Whole};
use crate::charts::axis::{Anchor, Frame, Screen, canvas, label, text_width};
use crate::charts::markup::Markup;
use crate::charts::matrix::{Matrix, SHADES, background, class};

/// Ratio of the fractions that two successive shades of the whole sequence stand for.
const SHADE_RATIO: f64 = 8.0;

/// The shade of a fraction: the darkest for the largest one, one lighter for each factor of 8.
fn fraction_shade(fraction: f64, largest: f64) -> usize {
    if fraction <= 0.0 {
        return 0;
    }
    let steps = ((largest / fraction).ln() / SHADE_RATIO.ln())
        .max(0.0)
        .round() as usize;
    SHADES.saturating_sub(steps).max(1)
}

fn largest(whole: &Whole) -> f64 {
    whole.fractions.iter().copied().fold(0.0, f64::max)
}

/// Multiplicities from here on have the darkest shade: they are few, and lie on the diagonal.
const MANY: usize = 3;

/// The shade of a multiplicity; 1 is dark enough to be visible as a single cell.
fn multiplicity_shade(level: usize) -> usize {
    match level {
        0 => 0,
        level => (SHADES - MANY + level).min(SHADES),
    }
}

/// The shades of the first tokens, and what they stand for.
pub fn close_legend(picture: &Picture) -> Vec<(String, String)> {
    let text = |level: usize| match level {
        1 => "in 1 branch".to_string(),
        MANY => format!("in {MANY} or more"),
        level => format!("in {level}"),
    };
    let levels = 1..=picture.most().min(MANY);
    levels
        .map(|level| (class(multiplicity_shade(level)), text(level)))
        .collect()
}

/// The shades of the whole sequence, and what they stand for.
pub fn whole_legend(whole: &Whole) -> Vec<(String, String)> {
    let largest = largest(whole);
    let shades = || {
        whole
            .fractions
            .iter()
            .map(|fraction| fraction_shade(*fraction, largest))
    };
    let used = |shade: &usize| shades().any(|other| other == *shade);
    let entry = |shade: usize| {
        let one_in = SHADE_RATIO.powi((SHADES - shade) as i32) / largest;
        let text = match one_in {
            ..1.2 => "all pairs".to_string(),
            ..9.5 => format!("1 pair in {one_in:.1}"),
            _ => format!("1 in {}", grouped(one_in.round() as u128)),
        };
        let fewer = if shade == 1 { " or fewer" } else { "" };
        (class(shade), format!("{text}{fewer}"))
    };
    (1..=SHADES).rev().filter(used).map(entry).collect()
}

/// The panels.
pub fn draw(picture: &Picture, screen: Screen, description: &str) -> Markup {
    let count = picture.close.len() + usize::from(picture.whole.is_some());
    let columns = match screen {
        Screen::Wide => count.clamp(2, 4),
        Screen::Narrow => count.clamp(1, 2),
    };
    // Only the first column has long labels, because the whole sequence comes first.
    let (first, next) = match &picture.whole {
        Some(whole) => (text_width(&last_token(whole.tokens)).max(24.0) + 8.0, 46.0),
        None => (34.0, 46.0),
    };
    let free = screen.width() - 4.0 - first - (columns - 1) as f64 * next;
    let side = (free / columns as f64).min(300.0);
    let height = side + 72.0;
    let rows = count.div_ceil(columns);
    let mut chart = canvas(screen.width(), height * rows as f64, description);
    let whole = picture.whole.iter().map(Panel::Whole);
    let panels = whole.chain(picture.close.iter().map(Panel::Close));
    for (index, panel) in panels.enumerate() {
        let (row, column) = (index / columns, index % columns);
        let frame = Frame {
            left: first + column as f64 * (side + next),
            top: 34.0 + row as f64 * height,
            width: side,
            height: side,
        };
        chart = chart.with(panel.draw(frame));
    }
    chart
}

enum Panel<'a> {
    Whole(&'a Whole),
    Close(&'a Close),
}

impl Panel<'_> {
    fn draw(&self, frame: Frame) -> Markup {
        let (matrix, tokens, title) = match self {
            Panel::Whole(whole) => {
                let side = whole.side;
                let largest = largest(whole);
                let shade = |row: usize, column: usize| {
                    fraction_shade(whole.fractions[row * side + column], largest)
                };
                (
                    Matrix::new(side, shade),
                    whole.tokens,
                    "all tokens, all heads".to_string(),
                )
            }
            Panel::Close(close) => {
                let side = close.tokens;
                let shade = |query: usize, key: usize| {
                    multiplicity_shade(close.multiplicity[query * side + key])
                };
                (
                    Matrix::new(side, shade),
                    side,
                    heads_text(side, &close.heads),
                )
            }
        };
        let last = last_token(tokens);
        let (top, bottom) = (frame.top + 10.0, frame.bottom());
        Markup::new("g")
            .class("panel")
            .with(background(frame))
            .with(matrix.paths(frame))
            .with(label(frame.left, frame.top - 14.0, Anchor::Start, &title).class("name"))
            .with(label(frame.left - 6.0, top, Anchor::End, "0"))
            .with(label(frame.left - 6.0, bottom, Anchor::End, &last))
            .with(label(0.0, 0.0, Anchor::Middle, "query").class("title").set(
                "transform",
                format!(
                    "translate({:.1} {:.1}) rotate(-90)",
                    frame.left - 8.0,
                    frame.top + frame.height / 2.0
                ),
            ))
            .with(label(frame.left, bottom + 16.0, Anchor::Start, "0"))
            .with(label(frame.right(), bottom + 16.0, Anchor::End, &last))
            .with(
                label(
                    frame.left + frame.width / 2.0,
                    bottom + 16.0,
                    Anchor::Middle,
                    "key",
                )
                .class("title"),
            )
    }
}

/// The index of the last token.
fn last_token(tokens: usize) -> String {
    grouped(tokens as u128 - 1)
}

/// The tokens and heads of a panel, as text.
fn heads_text(tokens: usize, heads: &[usize]) -> String {
    match heads {
        [head] => format!("first {tokens}, head {head}"),
        [first, .., last] if last - first + 1 == heads.len() => {
            format!("first {tokens}, heads {first}–{last}")
        }
        [first, second, ..] => format!("first {tokens}, heads {first}, {second} …"),
        [] => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::{SHADES, fraction_shade, multiplicity_shade};

    #[test]
    fn shades_are_monotonic_and_no_attended_cell_is_empty() {
        let levels: Vec<usize> = (0..9).map(multiplicity_shade).collect();
        assert!(
            levels.is_sorted() && levels[0] == 0 && levels[1] > 0,
            "{levels:?}"
        );
        assert_eq!(levels[8], SHADES);
        let fractions =
            [0.0, 1e-9, 0.001, 0.01, 0.2, 1.0, 3.0].map(|fraction| fraction_shade(fraction, 1.0));
        assert!(fractions.is_sorted(), "{fractions:?}");
        assert_eq!(
            (fractions[0], fractions[1], fractions[5], fractions[6]),
            (0, 1, SHADES, SHADES)
        );
    }
}
