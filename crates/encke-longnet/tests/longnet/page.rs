//! Runs the commands of docs/model.md.

use std::process::Output;

use crate::command::{LongnetFolder, text};
use crate::console::{agrees, steps};

/// Number of commands run.
#[derive(Debug, Default)]
pub struct CommandCount {
    /// In one process.
    pub alone: usize,
    /// With mpirun.
    pub together: usize,
}

/// Runs every command of the page. `mpirun` runs that many processes with these arguments, or
/// returns `None` without MPI.
pub fn follow(mpirun: impl Fn(&LongnetFolder, usize, &str) -> Option<Output>) -> CommandCount {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/model.md");
    let page = std::fs::read_to_string(page).unwrap();
    let folder = LongnetFolder::new();
    let mut run = CommandCount::default();
    for step in steps(&page) {
        let place = format!("docs/model.md, line {}: {}", step.line, step.command);
        let launched = step.command.strip_prefix("mpirun -n ");
        let launched = launched.and_then(|rest| rest.split_once(" longnet "));
        let output = match (step.command.strip_prefix("longnet "), launched) {
            (Some(arguments), _) => {
                run.alone += 1;
                folder.runs(arguments)
            }
            (None, Some((ranks, arguments))) => {
                let Some(output) = mpirun(&folder, ranks.parse().unwrap(), arguments) else {
                    continue;
                };
                run.together += 1;
                output
            }
            (None, None) => panic!("{place}: only longnet commands are supported"),
        };
        let output_text = text(&output.stdout);
        let lines: Vec<&str> = output_text.trim_end().lines().collect();
        let fine =
            output.status.success() && (step.output.is_empty() || agrees(&step.output, &lines));
        assert!(fine, "{place}\n{output_text}{}", text(&output.stderr));
    }
    run
}
