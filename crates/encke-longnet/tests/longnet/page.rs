//! docs/model.md, command by command.

use std::process::Output;

use crate::command::{Folder, text};
use crate::console::{agrees, steps};

/// How many commands were run.
#[derive(Debug, Default)]
pub struct PageRun {
    /// In one process.
    pub alone: usize,
    /// With mpirun.
    pub together: usize,
}

/// Runs every command of the page. `mpirun` runs as many processes with these arguments, or nothing
/// where that cannot be done.
pub fn follow(mpirun: impl Fn(&Folder, usize, &str) -> Option<Output>) -> PageRun {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/model.md");
    let page = std::fs::read_to_string(page).unwrap();
    let folder = Folder::new();
    let mut run = PageRun::default();
    for step in steps(&page) {
        let place = format!("docs/model.md, line {}: {}", step.line, step.command);
        let words = step.command.strip_prefix("mpirun -n ");
        let words = words.and_then(|words| words.split_once(" longnet "));
        let output = match (step.command.strip_prefix("longnet "), words) {
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
            (None, None) => panic!("{place}: only longnet is run"),
        };
        let said = text(&output.stdout);
        let lines: Vec<&str> = said.trim_end().lines().collect();
        let fine =
            output.status.success() && (step.output.is_empty() || agrees(&step.output, &lines));
        assert!(fine, "{place}\n{said}{}", text(&output.stderr));
    }
    run
}
