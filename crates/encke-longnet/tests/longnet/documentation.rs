//! Every `longnet` command of docs/model.md is run, and says what the page says.

use crate::command::{Folder, text};
use crate::console::{agrees, steps};

#[test]
fn every_command_of_the_page_runs_and_says_what_it_says() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/model.md");
    let page = std::fs::read_to_string(page).unwrap();
    let folder = Folder::new();
    let mut run = 0;
    for step in steps(&page) {
        let place = format!("docs/model.md, line {}: {}", step.line, step.command);
        let arguments = step.command.strip_prefix("longnet ");
        let arguments = arguments.unwrap_or_else(|| panic!("{place}: only longnet is run"));
        let output = folder.runs(arguments);
        let said = text(&output.stdout);
        let lines: Vec<&str> = said.trim_end().lines().collect();
        let fine =
            output.status.success() && (step.answer.is_empty() || agrees(&step.answer, &lines));
        assert!(fine, "{place}\n{said}{}", text(&output.stderr));
        run += 1;
    }
    assert!(run >= 5, "only {run} commands were found");
}
