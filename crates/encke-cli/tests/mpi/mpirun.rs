//! The mpirun of the tests, of whichever command.

use std::path::Path;
use std::process::Command;

/// The mpirun of the tests.
pub fn mpirun() -> String {
    std::env::var("MPIRUN").unwrap_or_else(|_| "mpirun".to_string())
}

/// What it is.
pub fn version() -> String {
    let said = Command::new(mpirun()).arg("--version").output().unwrap();
    String::from_utf8_lossy(&said.stdout).into_owned()
}

/// `mpirun -n ranks program arguments`, in a folder.
pub fn together(program: &str, folder: &Path, ranks: usize, arguments: &str) -> Command {
    let mut command = Command::new(mpirun());
    let said = version();
    command.args(["-n", &ranks.to_string()]);
    if said.contains("(Open MPI) 4") {
        command.args(["--oversubscribe", "--bind-to", "none"]);
    } else if said.contains("(Open MPI)") {
        command.args("--with-ft ulfm --map-by :OVERSUBSCRIBE --bind-to none".split(' '));
    }
    command.arg(program);
    command.args(arguments.split_whitespace());
    command.current_dir(folder);
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1");
    command.env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    // One thread a process is enough for small calls, and more would only be in the way.
    command.env("RAYON_NUM_THREADS", "1");
    // What is said in one piece arrives in one piece only where it is short.
    command.env("RUST_BACKTRACE", "0");
    // Launchers give processes a terminal of their own.
    command.env("NO_COLOR", "1");
    command
}
