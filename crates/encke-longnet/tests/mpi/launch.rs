//! Runs the command under mpirun.

use std::process::Output;

use crate::command::{LongnetFolder, text};
use crate::mpirun::{job, output};

/// Runs `mpirun -n ranks longnet arguments` in a folder, to its end.
pub fn run(folder: &LongnetFolder, ranks: usize, arguments: &str) -> Output {
    let longnet = env!("CARGO_BIN_EXE_longnet");
    output(&mut job(longnet, folder.path(), ranks, arguments))
}

/// Runs it and expects success; returns standard output and standard error.
pub fn succeeds(folder: &LongnetFolder, ranks: usize, arguments: &str) -> (String, String) {
    let output = run(folder, ranks, arguments);
    let (output_text, noted) = (text(&output.stdout), text(&output.stderr));
    let code = output.status.code();
    assert_eq!(code, Some(0), "{ranks} x longnet {arguments}: {noted}");
    (output_text, noted)
}
