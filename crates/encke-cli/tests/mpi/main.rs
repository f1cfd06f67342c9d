//! The `encke` command under mpirun: the results of threads, or errors on every process.
//!
//! Built only with the feature `mpi`; `scripts/test-mpi` finds an MPI and runs these tests. Tests
//! that kill processes need ULFM (Open MPI 5) and report that they are skipped elsewhere, because
//! other launchers end all processes when one dies.

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
mod signals;
mod suite;
