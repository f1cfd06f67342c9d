//! Every command that a page of the documentation shows is run, and says what the page says.
//!
//! A `console` block is a terminal: lines that begin with `$ ` are commands, the lines below them
//! what the command answers, where `...` stands for any lines. Commands of one page share a folder
//! and are run from its top to its end. Only `encke` is run; a block that needs other programs or
//! a GPU is not a `console` block.

use std::path::{Path, PathBuf};

use crate::command::{Folder, text};

/// A command and what the page says of its answer.
struct Step {
    line: usize,
    command: String,
    answer: Vec<String>,
}

fn pages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages: Vec<PathBuf> = std::fs::read_dir(root.join("docs"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|kind| kind == "md"))
        .collect();
    pages.sort();
    pages
}

fn steps(page: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut inside = false;
    for (number, line) in page.lines().enumerate() {
        match (inside, line) {
            (false, "```console") => inside = true,
            (true, "```") => inside = false,
            (true, line) => match (line.strip_prefix("$ "), steps.last_mut()) {
                (Some(command), _) => steps.push(Step {
                    line: number + 1,
                    command: command.into(),
                    answer: Vec::new(),
                }),
                (None, Some(step)) if step.command.ends_with('\\') => {
                    step.command.pop();
                    step.command += line.trim_start();
                }
                (None, Some(step)) => step.answer.push(line.trim_end().into()),
                (None, None) => panic!("line {}: an answer without a command", number + 1),
            },
            _ => {}
        }
    }
    steps
}

/// Whether lines are those of the page, where `...` stands for any.
fn agrees(page: &[String], said: &[&str]) -> bool {
    match page.split_first() {
        None => said.is_empty(),
        Some((first, rest)) if first == "..." => {
            (0..=said.len()).any(|skipped| agrees(rest, &said[skipped..]))
        }
        Some((first, rest)) => said
            .split_first()
            .is_some_and(|(line, said)| line.trim_end() == first && agrees(rest, said)),
    }
}

#[test]
fn every_command_of_the_documentation_runs_and_says_what_it_says() {
    let mut run = 0;
    for page in pages() {
        let name = page.file_name().unwrap().to_string_lossy().into_owned();
        let folder = Folder::new();
        for step in steps(&std::fs::read_to_string(&page).unwrap()) {
            let place = format!("docs/{name}, line {}: {}", step.line, step.command);
            let arguments = step.command.strip_prefix("encke ");
            let arguments = arguments.unwrap_or_else(|| panic!("{place}: only encke is run"));
            let output = folder.encke(arguments);
            // A page may show a refusal: then it shows the line.
            let (said, refused) = (text(&output.stdout), text(&output.stderr));
            let shown = match output.status.code() {
                Some(0) => said.clone(),
                _ => refused.clone(),
            };
            let lines: Vec<&str> = shown.trim_end().lines().collect();
            let fine = match step.answer.is_empty() {
                true => output.status.success(),
                false => agrees(&step.answer, &lines),
            };
            assert!(fine, "{place}\n{said}{refused}");
            run += 1;
        }
    }
    assert!(run >= 20, "only {run} commands were found in the pages");
}

#[test]
fn dots_stand_for_any_lines() {
    let page = |lines: &[&str]| lines.iter().map(|x| x.to_string()).collect::<Vec<_>>();
    assert!(agrees(&page(&["a", "...", "d"]), &["a", "b", "c", "d"]));
    assert!(agrees(&page(&["..."]), &[]));
    assert!(!agrees(&page(&["a", "...", "d"]), &["a", "b"]));
    assert!(!agrees(&page(&["a"]), &["a", "b"]));
}
