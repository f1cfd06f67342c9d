//! The report: one configuration on rings of several sizes, and a page that shows memory, timeline,
//! bytes sent, pattern and predicted times.
//!
//! The decision here: the page is complete when it is written. Charts are drawn here, as SVG, from
//! one value ([`ReportFindings`]), so a browser needs no network and no library to show the page,
//! and equal findings give equal bytes.

mod environment;
mod findings;
mod measure;
mod memory_chart;
mod page;
mod panels;
mod picture;
mod prediction;
mod prediction_chart;
mod tables;
#[cfg(test)]
mod tests;
mod timeline;
mod traffic;

use encke::{Builder, DType, Shape};

pub use findings::ReportFindings;
pub use measure::measure;
pub use page::document;

/// What a report runs.
#[derive(Debug)]
pub struct ReportSettings {
    /// Sizes of the tensors.
    pub shape: Shape,
    /// Type of the tensors.
    pub dtype: DType,
    /// All settings of the attention but the number of ranks.
    pub builder: Builder,
    /// Ring sizes, rising.
    pub rings: Vec<usize>,
    /// The ring size whose timeline and traffic are shown; one of `rings`.
    pub shown: usize,
    /// Whether the backward pass runs too.
    pub grad: bool,
    /// Timed runs of each ring, and readings of the kernel for their prediction: at least one.
    pub repeats: usize,
    /// Seed of the tensors.
    pub seed: u64,
}
