//! What Encke computes, and which rank computes it when.
//!
//! Pattern + Shape + Sharding → [`Plan`](plan::Plan) → a rank executes its program with a
//! [`Kernel`](kernel::Kernel) and a [`Transport`](transport::Transport). This crate decides and
//! specifies: it does no I/O, starts no thread, takes no lock, reads no clock and contains no
//! unsafe code.
#![forbid(unsafe_code)]

pub mod agreement;
mod apart;
pub mod bits;
pub mod conformance;
mod congruence;
pub mod denominator;
mod documents;
pub mod dropout;
pub mod dtype;
pub mod error;
pub mod host;
pub mod job;
mod join;
pub mod kernel;
mod kernel_error;
mod key_lengths;
pub mod mask;
pub mod memory;
pub mod mixing;
pub mod naive;
mod padding;
pub mod partial;
pub mod pattern;
mod phantoms;
pub mod plan;
pub mod reference;
pub mod rows;
pub mod scores;
pub mod shape;
pub mod sharding;
pub mod sinks;
pub mod tensor;
mod tiles;
pub mod transport;
mod visible;

pub use bits::Bits;
pub use documents::Documents;
pub use dropout::Dropout;
pub use dtype::{DType, Data, Element, Slice};
pub use error::{Error, Result};
pub use key_lengths::KeyLengths;
pub use mask::Window;
pub use padding::Padding;
pub use pattern::{Branch, GroupScale, MixingGradient, Mode, OffsetRule, Pattern};
pub use scores::{Scores, alibi_slopes};
pub use shape::Shape;
pub use tensor::{Tensor, View};
