//! Text tables: the first column aligned left, the others right, each as wide as its widest cell.

use std::fmt;

/// A table with a row of headings.
#[derive(Debug, Clone)]
pub struct TextTable {
    rows: Vec<Vec<String>>,
    indent: usize,
}

impl TextTable {
    /// A table with these headings, indented by `indent` spaces.
    pub fn new<S: Into<String>>(indent: usize, headings: impl IntoIterator<Item = S>) -> TextTable {
        TextTable {
            rows: vec![headings.into_iter().map(Into::into).collect()],
            indent,
        }
    }

    /// Adds a row.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }
}

impl fmt::Display for TextTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |cell: &String| cell.chars().count();
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns)
            .map(|column| {
                let cells = self.rows.iter().filter_map(|row| row.get(column));
                cells.map(width).max().unwrap_or(0)
            })
            .collect();
        for row in &self.rows {
            let mut line = " ".repeat(self.indent);
            for (column, cell) in row.iter().enumerate() {
                let space = " ".repeat(widths[column] - width(cell));
                match column {
                    0 => line += &format!("{cell}{space}"),
                    _ => line += &format!("  {space}{cell}"),
                }
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}
