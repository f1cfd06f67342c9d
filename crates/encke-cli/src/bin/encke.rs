//! The `encke` command as a program of its own; all of it is the library's.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(encke_cli::command(std::env::args_os()))
}
