//! A signal that ends a process removes its temporary files that have a name. The process is a
//! child that runs this program.
#![cfg(target_os = "linux")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};
use std::time::Duration;

use encke_files::AtomicFile;

const FOLDER: &str = "ENCKE_FILES_TEST_FOLDER";

/// Signals that end a process, faults among them, which another process may send. SIGKILL is none
/// of them: a file with a name is left behind then.
const ENDS: [i32; 20] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGABRT,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGUSR1,
    libc::SIGSEGV,
    libc::SIGUSR2,
    libc::SIGALRM,
    libc::SIGTERM,
    libc::SIGSTKFLT,
    libc::SIGXCPU,
    libc::SIGVTALRM,
    libc::SIGPROF,
    libc::SIGIO,
    libc::SIGPWR,
    libc::SIGSYS,
];

/// Not a test of its own: what the child runs.
#[test]
fn child() {
    let Some(folder) = std::env::var_os(FOLDER) else {
        return;
    };
    encke_files::remove_temporaries_on_signals();
    let target = std::path::Path::new(&folder).join("x");
    let mut written = AtomicFile::create(&target).unwrap();
    let path = written.announce();
    written.give_path(path).unwrap();
    eprintln!("ready");
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn every_signal_that_ends_a_process_removes_its_files() {
    let folder = tempfile::tempdir().unwrap();
    let names = || fs::read_dir(folder.path()).unwrap().count();
    for signal in ENDS {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "child", "--nocapture"]);
        child.env(FOLDER, folder.path());
        child.stdout(Stdio::null()).stderr(Stdio::piped());
        // A shell that runs the tests in the background has made them ignore some signals.
        let not_ignored = || {
            for signal in ENDS {
                // SAFETY: allowed between fork and exec; no handler is set.
                unsafe { libc::signal(signal, libc::SIG_DFL) };
            }
            Ok(())
        };
        // SAFETY: the closure calls only `signal`.
        unsafe { child.pre_exec(not_ignored) };
        let mut child = child.spawn().unwrap();
        let mut said = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        while !line.ends_with("ready\n") {
            assert!(said.read_line(&mut line).unwrap() > 0, "it ended: {line}");
        }
        assert_eq!(names(), 1);
        // SAFETY: `kill` has no preconditions; the child has not been waited for.
        assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
        let ended = child.wait().unwrap();
        assert_eq!(ended.signal(), Some(signal), "{ended}");
        assert_eq!(names(), 0, "signal {signal}");
    }
}

const FAULT: &str = "ENCKE_FILES_TEST_FAULT";

/// Not a test of its own: what the child of the next one runs.
#[test]
fn faulting_child() {
    let Some(folder) = std::env::var_os(FAULT) else {
        return;
    };
    encke_files::remove_temporaries_on_signals();
    encke_files::exit_on_invalid_access("encke: it crashed", 0);
    let target = std::path::Path::new(&folder).join("x");
    let mut written = AtomicFile::create(&target).unwrap();
    let path = written.announce();
    written.give_path(path).unwrap();
    let nowhere = std::hint::black_box(8usize) as *const u8;
    // SAFETY: there is none: nothing is mapped there, and the process ends.
    unsafe { nowhere.read_volatile() };
}

#[test]
fn an_invalid_access_is_one_line_and_exit_code_2_where_that_was_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "faulting_child", "--nocapture"]);
    let ended = child.env(FAULT, folder.path()).output().unwrap();
    assert_eq!(ended.status.code(), Some(2), "{ended:?}");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(said.ends_with("encke: it crashed\n"), "{said}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

const SMALL: &str = "ENCKE_FILES_TEST_SMALL_STACK";

/// Gives the calling thread a signal stack that ends at memory it may not touch and has no room for
/// a handler: on processors with tiles, the registers fill the stacks of the standard library.
fn shrink_signal_stack() {
    // SAFETY: the memory is mapped here, and the process ends before it is unmapped.
    unsafe {
        let page = libc::sysconf(libc::_SC_PAGESIZE) as usize;
        let (access, kind) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        let bytes = page + libc::MINSIGSTKSZ.next_multiple_of(page);
        let memory = libc::mmap(std::ptr::null_mut(), bytes, access, kind, -1, 0);
        assert_ne!(memory, libc::MAP_FAILED);
        assert_eq!(libc::mprotect(memory, page, libc::PROT_NONE), 0);
        let stack = libc::stack_t {
            ss_sp: memory.add(page),
            ss_flags: 0,
            ss_size: libc::MINSIGSTKSZ,
        };
        // Some systems refuse stacks that are too small: then there is nothing to test.
        let refused = libc::sigaltstack(&raw const stack, std::ptr::null_mut()) != 0;
        println!("refused: {refused}");
    }
}

/// Not a test of its own: what the child of the next one runs.
#[test]
fn child_with_a_small_signal_stack() {
    let Some(folder) = std::env::var_os(SMALL) else {
        return;
    };
    encke_files::remove_temporaries_on_signals();
    shrink_signal_stack();
    let target = std::path::Path::new(&folder).join("x");
    let mut written = AtomicFile::create(&target).unwrap();
    let path = written.announce();
    written.give_path(path).unwrap();
    // SAFETY: `raise` has no preconditions; the handler runs on this thread.
    unsafe { libc::raise(libc::SIGTERM) };
}

#[test]
fn signals_are_handled_by_threads_whose_signal_stack_has_no_room() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "child_with_a_small_signal_stack"]);
    let ended = child.env(SMALL, folder.path()).output().unwrap();
    assert_eq!(ended.status.signal(), Some(libc::SIGTERM), "{ended:?}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}
