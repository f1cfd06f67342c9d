//! Every `longnet` command of docs/model.md is run, and says what the page says. Those that mpirun
//! starts are run where there is an MPI, by the tests of processes.

use crate::page::follow;

#[test]
fn every_command_of_the_page_runs_and_says_what_it_says() {
    let run = follow(|_, _, _| None);
    assert!(run.alone >= 5, "too few commands were found: {run:?}");
}
