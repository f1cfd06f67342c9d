//! A square of shaded cells: who sends to whom, and which query sees which key.
//!
//! The decision here: shades are few and counted, never a continuous ramp. A reader can match six
//! shades with a legend by eye, and cells of one shade are one path however many there are.

use super::axis::Frame;
use super::markup::{Markup, ShortNumber};

/// Shades beside none.
pub const SHADES: usize = 6;

/// Cells by row and column, each with a shade from 0 (nothing) to [`SHADES`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Matrix {
    side: usize,
    shades: Vec<u8>,
}

impl Matrix {
    /// The matrix whose cell in `row` and `column` has the shade `of(row, column)`.
    pub fn new(side: usize, mut of: impl FnMut(usize, usize) -> usize) -> Matrix {
        let cells = (0..side * side).map(|cell| of(cell / side, cell % side));
        Matrix {
            side,
            shades: cells.map(|shade| shade.min(SHADES) as u8).collect(),
        }
    }

    /// The shade of a cell.
    pub fn shade(&self, row: usize, column: usize) -> usize {
        self.shades[row * self.side + column] as usize
    }

    /// A path for each shade; cells of a row that lie side by side are drawn as one.
    pub fn paths(&self, frame: Frame) -> Markup {
        let cell = frame.width / self.side.max(1) as f64;
        let mut drawn = vec![String::new(); SHADES + 1];
        for row in 0..self.side {
            let mut column = 0;
            while column < self.side {
                let shade = self.shade(row, column);
                let same = (column..self.side).take_while(|at| self.shade(row, *at) == shade);
                let length = same.count();
                drawn[shade] += &format!("M{column} {row}h{length}v1h-{length}z");
                column += length;
            }
        }
        let place = format!(
            "translate({} {}) scale({cell:.5})",
            ShortNumber(frame.left),
            ShortNumber(frame.top)
        );
        let paths = drawn
            .into_iter()
            .enumerate()
            .skip(1)
            .filter(|(_, path)| !path.is_empty());
        Markup::new("g")
            .class("cells")
            .set("transform", place)
            .with_all(
                paths.map(|(shade, path)| Markup::new("path").class(class(shade)).set("d", path)),
            )
    }

    /// A mark for each cell that has a shade, with the words that explain it.
    pub fn marks(&self, frame: Frame, words: impl Fn(usize, usize) -> String) -> Markup {
        let cell = frame.width / self.side.max(1) as f64;
        let gap = if cell > 12.0 { 1.5 } else { 0.5 };
        let cells = (0..self.side).flat_map(|row| (0..self.side).map(move |column| (row, column)));
        let marks = cells.filter(|(row, column)| self.shade(*row, *column) > 0);
        let marks = marks.map(|(row, column)| {
            let (left, top) = (
                frame.left + cell * column as f64,
                frame.top + cell * row as f64,
            );
            Markup::new("rect")
                .class(format!("mark {}", class(self.shade(row, column))))
                .place([
                    ("x", left),
                    ("y", top),
                    ("width", cell - gap),
                    ("height", cell - gap),
                ])
                .set("data-tip", words(row, column))
        });
        Markup::new("g").class("cells").with_all(marks)
    }
}

/// The ground that cells are drawn on, so that emptiness has an edge.
pub fn ground(frame: Frame) -> Markup {
    let Frame {
        left,
        top,
        width,
        height,
    } = frame;
    let place = [
        ("x", left),
        ("y", top),
        ("width", width),
        ("height", height),
    ];
    Markup::new("rect").class("ground").place(place)
}

/// The class of a shade in the style sheet.
pub fn class(shade: usize) -> String {
    format!("s{shade}")
}

#[cfg(test)]
mod tests {
    use super::super::axis::Frame;
    use super::{Matrix, SHADES};

    const FRAME: Frame = Frame {
        left: 0.0,
        top: 0.0,
        width: 40.0,
        height: 40.0,
    };

    #[test]
    fn cells_side_by_side_are_drawn_as_one() {
        let triangle = Matrix::new(4, |row, column| usize::from(column <= row));
        let drawn = triangle.paths(FRAME).to_string();
        assert_eq!(drawn.matches("<path").count(), 1);
        assert_eq!(drawn.matches('M').count(), 4);
        assert!(drawn.contains("M0 3h4v1h-4z"), "{drawn}");
    }

    #[test]
    fn every_shaded_cell_has_a_mark() {
        let matrix = Matrix::new(5, |row, column| (row * 5 + column) % 3);
        let drawn = matrix.marks(FRAME, |row, column| format!("{row} to {column}"));
        assert_eq!(drawn.to_string().matches("<rect").count(), 16);
        assert_eq!(Matrix::new(1, |_, _| 99).shade(0, 0), SHADES);
    }
}
