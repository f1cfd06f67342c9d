//! Starts programs under the mpirun of `MPIRUN`, or the one in PATH.

use std::path::Path;
use std::process::{Command, Output};

/// The mpirun of the tests.
pub fn mpirun() -> String {
    std::env::var("MPIRUN").unwrap_or_else(|_| "mpirun".to_string())
}

/// The output of `mpirun --version`.
pub fn version() -> String {
    let output = Command::new(mpirun()).arg("--version").output();
    let output = output.expect("the tests of processes need an mpirun");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// `mpirun -n ranks program arguments`, in a folder.
pub fn job(program: &str, folder: &Path, ranks: usize, arguments: &str) -> Command {
    let mut command = Command::new(mpirun());
    let version = version();
    command.args(["-n", &ranks.to_string()]);
    if version.contains("(Open MPI) 4") {
        command.args(["--oversubscribe", "--bind-to", "none"]);
    } else if version.contains("(Open MPI)") {
        command.args("--with-ft ulfm --map-by :OVERSUBSCRIBE --bind-to none".split(' '));
    }
    command.arg(program);
    command.args(arguments.split_whitespace());
    command.current_dir(folder);
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1");
    command.env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    // One thread per process is enough for small calls; more would compete for the cores.
    command.env("RAYON_NUM_THREADS", "1");
    // The same on a machine with a GPU as on one without.
    command.env("ENCKE_LIBCUDA", "no-driver-for-tests.so");
    // Launchers keep short writes in one piece, and a backtrace is not short.
    command.env("RUST_BACKTRACE", "0");
    // Launchers may give processes a terminal of their own.
    command.env("NO_COLOR", "1");
    command
}

/// How often a job is started at most, if the launcher cannot start.
pub const STARTS: usize = 5;

/// Whether the launcher itself could not start, as on a busy machine; prints that it is started
/// again.
pub fn launcher_failed(stderr: &str) -> bool {
    let failed = stderr.contains("listener thread failed to start");
    if failed {
        println!("the launcher could not start, and is started again: {stderr}");
    }
    failed
}

/// Runs a job to its end.
pub fn output(job: &mut Command) -> Output {
    for _ in 1..STARTS {
        let output = job.output().unwrap();
        if !launcher_failed(&String::from_utf8_lossy(&output.stderr)) {
            return output;
        }
    }
    job.output().unwrap()
}

/// The lines of standard error that the program itself wrote; launchers write some too, and end
/// them with a zero byte.
pub fn lines_of<'a>(program: &str, stderr: &'a str) -> Vec<&'a str> {
    let prefix = format!("{program}: ");
    let lines = stderr.lines().map(|line| line.trim_start_matches('\0'));
    lines.filter(|line| line.starts_with(&prefix)).collect()
}
