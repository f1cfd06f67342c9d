//! The part of Encke's programs that is not a command line: what `encke verify`, `bench`,
//! `profile`,
//! `billion` and `report` measure and check, and the files, tables, charts and pages they produce.
//!
//! Measuring functions take plain settings and return records; options, help and printed text
//! belong to the programs (`encke-cli`, `encke-longnet`). The decision here: everything that two
//! programs need lives in this crate once, so that their files, numbers, errors and exit codes
//! follow the same rules ([`program()`], [`output`], [`terminal`]).
#![forbid(unsafe_code)]

pub mod arguments;
pub mod bench;
pub mod billion;
pub mod charts;
pub mod chrome_trace;
#[cfg(feature = "mpi")]
pub mod cluster;
pub mod device;
pub mod format;
#[cfg(feature = "mpi")]
mod gpu_links;
pub mod longnet;
pub mod memory_table;
pub mod number;
pub mod output;
pub mod process;
pub mod profile;
pub mod program;
#[cfg(feature = "mpi")]
pub mod rank_kernel;
pub mod report;
pub mod ring_memory;
pub mod row_check;
pub mod scale;
pub mod schedules;
pub mod table;
pub mod tensors;
pub mod terminal;
pub mod verify;
pub mod wire_choice;

pub use program::{AlreadyReported, Verdict, program, without_mpi};
