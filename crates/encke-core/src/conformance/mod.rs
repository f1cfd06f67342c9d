//! The conformance suites: an implementation of a port runs its suite with one line.
//!
//! A suite returns the first [`Failure`] instead of panicking, so that tests can run deliberately
//! wrong implementations (mutants) and require that each of them fails.
//!
//! The decision here: every case is generated from a seed by a portable generator, so a failure
//! names a seed that reproduces the case on any machine.

mod bench;
mod case;
mod cells;
mod configuration;
mod documents;
mod dropout;
mod extent;
mod failure;
mod hidden;
mod kernel;
mod layout;
mod masks;
mod merge;
mod moving;
mod mutate;
mod random;
mod range;
mod range_bounds;
mod results;
mod softmax_ends;
mod suite;
mod tiled;
mod tolerances;
mod transport;
mod value_dims;

pub use self::configuration::{CallTensors, Configuration, random_mask, random_pattern};
pub use self::extent::extent;
pub use self::failure::Failure;
pub use self::kernel::kernel;
pub use self::merge::merge;
pub use self::mutate::mutate;
pub use self::random::Random;
pub use self::range::scores;
pub use self::suite::KernelSuite;
pub use self::tiled::TiledSizes;
pub use self::transport::transport;
