//! Charts as SVG and pages as HTML, written as text: no library, no network, no script that draws.
//!
//! A chart is drawn from numbers alone; it knows nothing of rings or models. `encke report` and
//! `longnet report` share these parts.

pub mod axis;
pub mod html;
pub mod lines;
pub mod markup;
pub mod matrix;
pub mod scale;
pub mod stack;
pub mod theme;
