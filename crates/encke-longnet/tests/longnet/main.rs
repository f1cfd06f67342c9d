//! The command line: training on rings, resuming, sampling, reports, refusals.

mod command;
#[path = "../../../encke-cli/tests/cli/console.rs"]
mod console;
mod documentation;
mod page;
mod report;
mod rings;
mod runs;
