//! `mpirun -n p longnet train`: the losses of one process, on every ring, or one line of refusal.
//!
//! Built only with the feature `mpi`; `scripts/test-mpi` finds an MPI and runs these tests.

mod documentation;
mod launch;
mod refusals;
mod train;
