//! Starting processes, and looking at them while they run.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::command::Folder;
use crate::mpirun::version;

/// Whether deaths are told to the survivors; if not, says so.
pub fn ulfm(test: &str) -> bool {
    let said = version();
    let open_mpi = said.split("(Open MPI)").nth(1).map(str::trim);
    let has = open_mpi.is_some_and(|v| v.split('.').next().unwrap().parse::<u32>().unwrap() >= 5);
    if !has {
        let name = said.lines().next().unwrap_or_default();
        println!("{test}: skipped, {name} ends all processes when one dies (no ULFM)");
    }
    has
}

/// `mpirun -n ranks encke arguments`, in a folder.
pub fn together(folder: &Folder, ranks: usize, arguments: &str) -> Command {
    let encke = env!("CARGO_BIN_EXE_encke");
    crate::mpirun::together(encke, folder.path(), ranks, arguments)
}

/// Runs it to its end.
pub fn run(folder: &Folder, ranks: usize, arguments: &str) -> Output {
    together(folder, ranks, arguments).output().unwrap()
}

/// Runs it and expects success; returns standard output.
pub fn succeeds(folder: &Folder, ranks: usize, arguments: &str) -> String {
    let output = run(folder, ranks, arguments);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let code = output.status.code();
    assert_eq!(code, Some(0), "{ranks} x encke {arguments}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

/// The lines of encke's own in what was said; launchers say things too.
pub fn own_lines(said: &str) -> Vec<&str> {
    said.lines()
        .filter(|line| line.starts_with("encke: "))
        .collect()
}

/// Processes that are running, with everything they say and when.
pub struct Running {
    child: Child,
    lines: Arc<Mutex<Vec<(Instant, String)>>>,
    reader: JoinHandle<()>,
}

impl Running {
    /// Starts `mpirun -n ranks encke arguments`.
    pub fn start(folder: &Folder, ranks: usize, arguments: &str) -> Running {
        let mut command = together(folder, ranks, arguments);
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = Arc::new(Mutex::new(Vec::new()));
        let said = BufReader::new(child.stderr.take().unwrap());
        let into = Arc::clone(&lines);
        let reader = std::thread::spawn(move || {
            for line in said.lines().map_while(Result::ok) {
                let mut lines = into.lock().unwrap_or_else(PoisonError::into_inner);
                lines.push((Instant::now(), line));
            }
        });
        Running {
            child,
            lines,
            reader,
        }
    }

    /// The process of a rank, once it is there.
    pub fn process(&self, folder: &Folder, rank: usize) -> u32 {
        let since = Instant::now();
        loop {
            if let Some(found) = process_of(folder.path(), rank) {
                return found;
            }
            assert!(
                since.elapsed() < Duration::from_secs(60),
                "rank {rank} has not come"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for the end, no longer than `limit`; what was said, with the times.
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

/// The process that works in `folder` as this rank.
fn process_of(folder: &Path, rank: usize) -> Option<u32> {
    let variable = format!("OMPI_COMM_WORLD_RANK={rank}");
    for entry in std::fs::read_dir("/proc").ok()?.flatten() {
        let Some(process) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        let there = std::fs::read_link(entry.path().join("cwd")).is_ok_and(|cwd| cwd == folder);
        let about = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        let is = about
            .split(|byte| *byte == 0)
            .any(|line| line == variable.as_bytes());
        if there && is {
            return Some(process);
        }
    }
    None
}

/// Sends a signal to a process; whether it was there to get it.
pub fn signal(process: u32, name: &str) -> bool {
    let sent = Command::new("kill")
        .args([name, &process.to_string()])
        .output();
    sent.unwrap().status.success()
}
