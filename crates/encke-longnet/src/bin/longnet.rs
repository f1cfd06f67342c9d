//! The `longnet` command; the library implements it.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(encke_longnet::command(std::env::args_os()))
}
