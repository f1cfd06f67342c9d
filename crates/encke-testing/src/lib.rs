//! What the tests of Encke's programs share. Only tests depend on this crate.
#![forbid(unsafe_code)]

pub mod console;
pub mod mpirun;
