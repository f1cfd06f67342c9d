//! The `longnet` command; all of it is the library's.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(encke_longnet::command(std::env::args_os()))
}
