//! Starts jobs, and finds their processes while they run.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::command::CommandFolder;
use crate::mpirun::{STARTS, job, launcher_failed, lines_of, mpirun, output, version};

/// Whether MPI reports deaths to the survivors; if not, prints that the test is skipped.
pub fn ulfm(test: &str) -> bool {
    let version = version();
    let open_mpi = version.split("(Open MPI)").nth(1).map(str::trim);
    let has = open_mpi.is_some_and(|v| v.split('.').next().unwrap().parse::<u32>().unwrap() >= 5);
    if !has {
        let name = version.lines().next().unwrap_or_default();
        println!("{test}: skipped, {name} ends all processes when one dies (no ULFM)");
    }
    has
}

/// `encke launch arguments`, in a folder.
pub fn launch(folder: &CommandFolder, arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_encke"));
    command.arg("launch").args(arguments.split(' '));
    command.current_dir(folder.path()).env("MPIRUN", mpirun());
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1");
    command.env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command
}

/// `mpirun -n ranks encke arguments`, in a folder.
pub fn encke_job(folder: &CommandFolder, ranks: usize, arguments: &str) -> Command {
    job(env!("CARGO_BIN_EXE_encke"), folder.path(), ranks, arguments)
}

/// Runs it to its end.
pub fn run(folder: &CommandFolder, ranks: usize, arguments: &str) -> Output {
    output(&mut encke_job(folder, ranks, arguments))
}

/// Runs it and expects success; returns standard output.
pub fn succeeds(folder: &CommandFolder, ranks: usize, arguments: &str) -> String {
    let output = run(folder, ranks, arguments);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let code = output.status.code();
    assert_eq!(code, Some(0), "{ranks} x encke {arguments}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

/// The lines of standard error that encke itself wrote.
pub fn own_lines(stderr: &str) -> Vec<&str> {
    lines_of("encke", stderr)
}

/// A running job, with the lines of its standard error and their times.
pub struct RunningJob {
    child: Child,
    lines: Arc<Mutex<Vec<(Instant, String)>>>,
    reader: JoinHandle<()>,
}

impl RunningJob {
    /// Starts a job in a folder, and waits for the process of `rank`.
    pub fn start(
        folder: &CommandFolder,
        rank: usize,
        job: impl Fn() -> Command,
    ) -> (RunningJob, u32) {
        for _ in 0..STARTS {
            let mut running = RunningJob::of(job());
            if let Some(process) = running.process(folder, rank) {
                return (running, process);
            }
            let (status, lines) = running.end(Duration::from_secs(60));
            let said = said(&lines);
            assert!(launcher_failed(&said), "{status}: {said}");
        }
        panic!("the launcher did not start");
    }

    /// Starts a job.
    pub fn of(mut command: Command) -> RunningJob {
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = Arc::new(Mutex::new(Vec::new()));
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let into = Arc::clone(&lines);
        let reader = std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                let mut lines = into.lock().unwrap_or_else(PoisonError::into_inner);
                lines.push((Instant::now(), line));
            }
        });
        RunningJob {
            child,
            lines,
            reader,
        }
    }

    /// Waits for the process of a rank; `None` if the launcher has ended before.
    fn process(&mut self, folder: &CommandFolder, rank: usize) -> Option<u32> {
        let variable = format!("OMPI_COMM_WORLD_RANK={rank}");
        let since = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            if let Some(found) = processes(folder.path(), &variable).first() {
                return Some(*found);
            }
            assert!(
                since.elapsed() < Duration::from_secs(60),
                "rank {rank} did not start"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        None
    }

    /// The launcher's process.
    pub fn launcher(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the end, no longer than `limit`; returns the lines with their times.
    pub fn end(mut self, limit: Duration) -> (ExitStatus, Vec<(Instant, String)>) {
        let since = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if since.elapsed() > limit {
                let _ = self.child.kill();
                let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
                panic!("it hangs after {limit:?}; so far: {lines:#?}");
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        self.reader.join().unwrap();
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        (status, lines.clone())
    }
}

/// The text of lines.
pub fn said(lines: &[(Instant, String)]) -> String {
    let lines: Vec<&str> = lines.iter().map(|(_, line)| line.as_str()).collect();
    lines.join("\n")
}

/// The processes whose working directory is `folder` and whose environment has a variable whose
/// `NAME=VALUE` begins so.
pub fn processes(folder: &Path, variable: &str) -> Vec<u32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(process) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        let there = std::fs::read_link(entry.path().join("cwd")).is_ok_and(|cwd| cwd == folder);
        let about = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        let mut variables = about.split(|byte| *byte == 0);
        if there && variables.any(|line| line.starts_with(variable.as_bytes())) {
            found.push(process);
        }
    }
    found
}

/// Waits until no process of a job in this folder is left.
pub fn all_ended(folder: &CommandFolder) {
    let since = Instant::now();
    loop {
        let left = processes(folder.path(), "OMPI_COMM_WORLD_RANK=");
        if left.is_empty() {
            return;
        }
        assert!(
            since.elapsed() < Duration::from_secs(30),
            "processes {left:?} live on"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Sends a signal to a process; false if there is no such process.
pub fn signal(process: u32, name: &str) -> bool {
    let sent = Command::new("kill")
        .args([name, &process.to_string()])
        .output();
    sent.unwrap().status.success()
}
