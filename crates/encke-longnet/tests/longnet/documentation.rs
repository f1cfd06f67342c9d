//! Every `longnet` command of docs/model.md runs and prints what the page shows. Commands with
//! mpirun are run by the MPI tests.

use crate::page::follow;

#[test]
fn every_command_of_the_page_runs_and_prints_what_it_shows() {
    let run = follow(|_, _, _| None);
    assert!(run.alone >= 5, "too few commands were found: {run:?}");
}
