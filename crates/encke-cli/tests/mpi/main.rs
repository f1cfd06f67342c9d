//! The `encke` command under mpirun: the same answers as threads, or errors on every process.
//!
//! Built only with the feature `mpi`; `scripts/test-mpi` finds an MPI and runs this. The mpirun is that
//! of `MPIRUN`, or the one in PATH. Tests that end processes need ULFM (Open MPI 5): elsewhere the
//! launcher ends all processes when one dies, and they say that they were skipped.

#[path = "../cli/command.rs"]
#[allow(dead_code, reason = "the tests of the command use more of it")]
mod command;
#[path = "../cli/files.rs"]
#[allow(dead_code, reason = "the tests of the command use more of it")]
mod files;

mod attend;
mod faults;
mod launch;
mod mpirun;
mod refusals;
mod suite;
