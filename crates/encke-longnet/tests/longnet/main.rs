//! The command, from the outside: training on rings, resuming, sampling, pages, refusals.

mod command;
mod documentation;
#[cfg(feature = "mpi")]
mod mpi;
mod page;
mod report;
mod rings;
mod runs;
