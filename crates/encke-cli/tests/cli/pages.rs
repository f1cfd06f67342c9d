//! Runs every command in the `console` blocks of the documentation and compares its output.
//!
//! Commands of one page share a folder and run in order. Only `encke` runs here; the page about
//! models, whose command is `longnet`, has a test in that crate. Commands that need other programs
//! or a GPU are not in `console` blocks.

use std::path::{Path, PathBuf};

use crate::command::{CommandFolder, text};
use crate::console::{agrees, steps};

fn pages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages: Vec<PathBuf> = std::fs::read_dir(root.join("docs"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|kind| kind == "md"))
        .filter(|path| !path.ends_with("model.md"))
        .collect();
    pages.sort();
    pages
}

#[test]
fn every_command_of_the_documentation_has_the_output_it_shows() {
    let mut run = 0;
    for page in pages() {
        let name = page.file_name().unwrap().to_string_lossy().into_owned();
        let folder = CommandFolder::new();
        for step in steps(&std::fs::read_to_string(&page).unwrap()) {
            let place = format!("docs/{name}, line {}: {}", step.line, step.command);
            let arguments = step.command.strip_prefix("encke ");
            let arguments = arguments.unwrap_or_else(|| panic!("{place}: only encke is run"));
            let output = folder.encke(arguments);
            // A page may show an error: then it shows the line.
            let (said, refused) = (text(&output.stdout), text(&output.stderr));
            let shown = match output.status.code() {
                Some(0) => said.clone(),
                _ => refused.clone(),
            };
            let lines: Vec<&str> = shown.trim_end().lines().collect();
            let expects_error = step.output.first();
            let expects_error = expects_error.is_some_and(|line| line.starts_with("encke: "));
            let fine = output.status.success() != expects_error
                && (step.output.is_empty() || agrees(&step.output, &lines));
            assert!(fine, "{place}\n{said}{refused}");
            run += 1;
        }
    }
    assert!(run >= 20, "only {run} commands were found in the pages");
}
