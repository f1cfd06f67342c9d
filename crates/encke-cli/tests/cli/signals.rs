//! A command that is killed while it writes leaves nothing behind.
#![cfg(target_os = "linux")]

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::command::CommandFolder;

/// All commands, with options with which each takes longer than a second. (Signals to `launch` are
/// tested with an MPI.)
const COMMANDS: [&str; 14] = [
    "generate out --tokens 4M --heads 1 --dim 16",
    "attend in -o out --trace t.json --causal",
    "attend in -o out --memory-limit 200MiB --causal --grad",
    "simulate --tokens 1M --heads 8 --dim 64 --ranks 512 --grad --json out --trace t.json",
    "profile --tokens 16k --heads 4 --dim 64 --ranks 8 --grad --csv out --json t.json",
    "report out --tokens 32k --heads 4 --dim 64 --trace t.json",
    "bench --tokens 32k --heads 4 --dim 64 --json out",
    "tune --seconds 5",
    "tune --check --record out",
    "billion --tokens 1M --ranks 64 --segment 256 --dim 16 --record out",
    "plan --tokens 1M --heads 8 --dim 64 --ranks 16000 --sharding zigzag --causal",
    "verify --count 100000",
    "verify --faults --count 100000",
    "",
];

const SIGNALS: [(&str, i32); 9] = [
    ("INT", libc::SIGINT),
    ("TERM", libc::SIGTERM),
    ("HUP", libc::SIGHUP),
    ("QUIT", libc::SIGQUIT),
    ("USR1", libc::SIGUSR1),
    ("KILL", libc::SIGKILL),
    ("ALRM", libc::SIGALRM),
    ("USR2", libc::SIGUSR2),
    ("XCPU", libc::SIGXCPU),
];
/// Of them, in turn, so many for each command.
const SIGNALS_EACH: usize = 5;

/// Starts a command and sends it a signal after a while; whether it died of that signal.
fn kill(
    folder: &CommandFolder,
    command: &str,
    (name, number): (&str, i32),
    after: Duration,
) -> bool {
    let mut child = folder.command(command);
    child.env("XDG_CONFIG_HOME", folder.join("config"));
    child.stdout(Stdio::null()).stderr(Stdio::null());
    // A shell that runs the tests in the background has made them ignore some signals.
    let not_ignored = || {
        for (_, number) in SIGNALS {
            // SAFETY: allowed between fork and exec; no handler is set.
            unsafe { libc::signal(number, libc::SIG_DFL) };
        }
        Ok(())
    };
    // SAFETY: the closure calls only `signal`.
    unsafe { child.pre_exec(not_ignored) };
    let mut child = child.spawn().unwrap();
    std::thread::sleep(after);
    let id = child.id().to_string();
    let sent = Command::new("kill").args(["-s", name, &id]).status();
    assert!(sent.unwrap().success());
    let ended = child.wait().unwrap();
    let killed = ended.signal() == Some(number);
    assert!(killed || ended.success(), "{command}: {name}: {ended}");
    killed
}

/// All files below a folder.
fn files(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap());
    let listed = entries.flat_map(|entry| match entry.path().is_dir() {
        true => files(&entry.path()),
        false => vec![entry.file_name().into_string().unwrap()],
    });
    listed.collect()
}

#[test]
fn no_signal_leaves_a_temporary_file() {
    let folder = CommandFolder::new();
    folder.succeeds("generate in --tokens 4k --heads 8 --dim 64 --grad");
    let mut killed = 0;
    for (index, command) in COMMANDS.into_iter().enumerate() {
        for turn in 0..SIGNALS_EACH {
            let signal = SIGNALS[(SIGNALS_EACH * index + turn) % SIGNALS.len()];
            let after = Duration::from_millis([3, 10, 30, 100, 250][(index + turn) % 5]);
            killed += usize::from(kill(&folder, command, signal, after));
            let left = files(folder.path());
            let temporary = left.iter().find(|name| name.starts_with(".encke"));
            assert_eq!(temporary, None, "{command}: {signal:?} after {after:?}");
        }
        for name in ["out", "t.json"] {
            let _ = std::fs::remove_file(folder.join(name));
        }
    }
    assert!(
        killed > COMMANDS.len(),
        "{killed} were killed while they ran"
    );
}

/// Also those of faults, which another process may send: a process that does not die of one would
/// wait for ever, because its temporary files are gone. SIGKILL leaves nothing because a file has
/// no name before it is complete.
#[test]
fn every_signal_that_ends_a_process_leaves_nothing() {
    let names = "HUP QUIT ILL TRAP ABRT BUS FPE USR1 SEGV USR2 ALRM TERM STKFLT XCPU VTALRM PROF \
                 IO PWR SYS KILL";
    let folder = CommandFolder::new();
    for name in names.split(' ') {
        let mut child = folder.command(COMMANDS[0]);
        child.stdout(Stdio::null()).stderr(Stdio::null());
        let not_ignored = || {
            for signal in 1..32 {
                // SAFETY: allowed between fork and exec; no handler is set.
                unsafe { libc::signal(signal, libc::SIG_DFL) };
            }
            Ok(())
        };
        // SAFETY: the closure calls only `signal`.
        unsafe { child.pre_exec(not_ignored) };
        let mut child = child.spawn().unwrap();
        let since = Instant::now();
        while !writes_in(child.id(), folder.path()) {
            assert!(
                since.elapsed() < Duration::from_secs(60),
                "it does not begin"
            );
            std::thread::sleep(Duration::from_millis(2));
        }
        let id = child.id().to_string();
        let sent = Command::new("kill").args(["-s", name, &id]).status();
        assert!(sent.unwrap().success());
        let ended = loop {
            if let Some(ended) = child.try_wait().unwrap() {
                break ended;
            }
            if since.elapsed() > Duration::from_secs(120) {
                child.kill().unwrap();
                panic!("{name}: it does not end");
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        assert!(ended.signal().is_some(), "{name}: {ended}");
        assert_eq!(files(folder.path()), [""; 0], "{name}");
    }
}

/// Whether a process has a file of a folder open.
fn writes_in(process: u32, folder: &Path) -> bool {
    let open = std::fs::read_dir(format!("/proc/{process}/fd")).unwrap();
    let mut targets = open.flatten().map(|entry| std::fs::read_link(entry.path()));
    targets.any(|target| target.is_ok_and(|target| target.starts_with(folder)))
}

#[test]
fn every_interrupted_run_of_a_sequence_continues() {
    let folder = CommandFolder::new();
    let command = "billion --tokens 256k --ranks 64 --segment 256 --dim 16 --samples 50";
    let state = "encke-billion.state.json";
    // A state replaces the one before it, and for an instant the new one has a name of its own.
    let handled = SIGNALS.into_iter().filter(|(name, _)| *name != "KILL");
    for (turn, signal) in handled.enumerate() {
        kill(
            &folder,
            command,
            signal,
            Duration::from_millis(30 + 40 * turn as u64),
        );
        let names = folder.names();
        assert!(names.iter().all(|name| name == state), "{names:?}");
    }
    folder.succeeds(&format!("{command} --record r.json"));
    assert_eq!(folder.names(), ["r.json"]);
}

/// As `nohup` makes a program ignore SIGHUP. (Libraries of MPI replace that one when they are
/// loaded.)
#[test]
fn an_ignored_signal_stays_ignored() {
    let folder = CommandFolder::new();
    let program = folder.command("").get_program().to_owned();
    let command = "trap '' TERM; \"$0\" generate out --tokens 256k --heads 1 --dim 16 & \
                   id=$!; sleep 0.05; kill -TERM $id; wait $id";
    let mut shell = Command::new("sh");
    shell
        .current_dir(folder.path())
        .args(["-c", command])
        .arg(program);
    assert!(shell.status().unwrap().success());
    assert_eq!(folder.names(), ["out"]);
}

/// A disk that is full, or the shell's limit, is an error and not a signal.
#[test]
fn a_file_over_the_limit_of_the_shell_is_an_error() {
    let folder = CommandFolder::new();
    let program = folder.command("").get_program().to_owned();
    let command = "ulimit -f 64; exec \"$0\" generate out --tokens 256k --heads 1 --dim 16";
    let mut shell = Command::new("sh");
    shell
        .current_dir(folder.path())
        .args(["-c", command])
        .arg(program);
    let ended = shell.output().unwrap();
    assert_eq!(ended.status.code(), Some(2), "{ended:?}");
    assert!(
        ended.stderr.starts_with(b"encke: cannot write out: "),
        "{ended:?}"
    );
    assert!(folder.names().is_empty());
}
