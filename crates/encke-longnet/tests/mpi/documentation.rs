//! Runs every command of docs/model.md, those with mpirun too.

use crate::launch::run;
use crate::page::follow;

#[test]
fn every_command_of_the_page_runs_with_processes_too() {
    let run = follow(|folder, ranks, arguments| Some(run(folder, ranks, arguments)));
    assert!(run.together >= 1, "no command with mpirun was found");
}
