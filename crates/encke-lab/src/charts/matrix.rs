//! A square matrix of shaded cells: traffic between ranks, and attention masks.
//!
//! The decision here: there are six shades and no continuous ramp. A reader can match six shades
//! with a legend, and all cells of one shade are one SVG path.

use super::axis::Frame;
use super::markup::{Markup, ShortNumber};

/// Number of shades, not counting empty cells.
pub const SHADES: usize = 6;

/// Cells by row and column, each with a shade from 0 (empty) to [`SHADES`].
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

    /// A path for each shade; adjacent cells of a row are drawn as one rectangle.
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
        let transform = format!(
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
            .set("transform", transform)
            .with_all(
                paths.map(|(shade, path)| Markup::new("path").class(class(shade)).set("d", path)),
            )
    }

    /// A mark with a tooltip for each cell that is not empty.
    pub fn marks(&self, frame: Frame, tip: impl Fn(usize, usize) -> String) -> Markup {
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
                .set("data-tip", tip(row, column))
        });
        Markup::new("g").class("cells").with_all(marks)
    }
}

/// The background of the cells, which shows the edge of the matrix.
pub fn background(frame: Frame) -> Markup {
    let Frame {
        left,
        top,
        width,
        height,
    } = frame;
    let lengths = [
        ("x", left),
        ("y", top),
        ("width", width),
        ("height", height),
    ];
    Markup::new("rect").class("ground").place(lengths)
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
    fn adjacent_cells_of_a_row_are_one_rectangle() {
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
