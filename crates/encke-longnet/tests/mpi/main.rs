//! `mpirun -n p longnet train`: the losses of one process on every ring, and refusals in one line.
//!
//! Built only with the feature `mpi`; `scripts/test-mpi` finds an MPI and runs this.

#[path = "../longnet/command.rs"]
#[allow(dead_code, reason = "the tests of the command use more of it")]
mod command;
#[path = "../../../encke-cli/tests/cli/console.rs"]
#[allow(dead_code, reason = "its own test runs elsewhere")]
mod console;
#[path = "../longnet/page.rs"]
mod page;

#[path = "../../../encke-cli/tests/mpi/mpirun.rs"]
mod mpirun;

mod documentation;
mod launch;
mod refusals;
mod train;
