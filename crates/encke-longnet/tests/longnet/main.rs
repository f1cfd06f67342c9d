//! The command, from the outside: training on rings, resuming, sampling, pages, refusals.

mod command;
#[path = "../../../encke-cli/tests/cli/console.rs"]
mod console;
mod documentation;
mod page;
mod report;
mod rings;
mod runs;
