//! Signals, and the other calls of the system that need `unsafe`.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::path::Path;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicPtr};

use crate::temporaries::remove_all;

/// Signals that end a process unless it handles them.
const ENDS: [c_int; 9] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGABRT,
    libc::SIGALRM,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGXCPU,
];
/// The others, which a debugger, a profiler or a timer of the caller may handle: only where none
/// does.
const ALSO_ENDS: &[c_int] = &[
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGFPE,
    libc::SIGSYS,
    libc::SIGVTALRM,
    libc::SIGPROF,
    #[cfg(target_os = "linux")]
    libc::SIGIO,
    #[cfg(target_os = "linux")]
    libc::SIGPWR,
    #[cfg(target_os = "linux")]
    libc::SIGSTKFLT,
];
/// Signals of a fault, which the standard library handles before: it reports a stack overflow.
const FAULTS: [c_int; 2] = [libc::SIGBUS, libc::SIGSEGV];

/// What the standard library does at a fault.
static BEFORE: [AtomicPtr<libc::sigaction>; 2] = [const { AtomicPtr::new(ptr::null_mut()) }; 2];

/// How a process ends after an invalid memory access, if not by the signal.
struct FaultReport {
    line: String,
    grace_s: u32,
}

/// What [`exit_on_invalid_access`] stored.
static REPORT: AtomicPtr<FaultReport> = AtomicPtr::new(ptr::null_mut());
/// Whether a thread has printed the line.
static REPORTED: AtomicBool = AtomicBool::new(false);

/// From now on an invalid memory access removes the temporary files, prints a line, and ends this
/// process with exit code 2 some seconds later: for libraries that crash where they should return
/// an error. Takes effect after [`remove_temporaries_on_signals`].
pub fn exit_on_invalid_access(line: &str, grace_s: u32) {
    let line = format!("{line}\n");
    // Kept for the life of the process, as the handler may read it at any time.
    let report = Box::into_raw(Box::new(FaultReport { line, grace_s }));
    REPORT.store(report, SeqCst);
}

/// From now on a signal that ends this process removes its temporary files first. A signal that is
/// ignored (as under `nohup`) stays so, and an interrupt that is handled already (as by Python).
/// Other handlers are replaced: libraries of MPI install one for SIGHUP when they are loaded, which
/// returns (also where it was ignored: a program with MPI does not know `nohup`). A file that
/// exceeds the limit of the shell becomes an error of the write.
pub fn remove_temporaries_on_signals() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for signal in ENDS {
            let action = action_of(signal).sa_sigaction;
            if action == libc::SIG_DFL || (action != libc::SIG_IGN && signal != libc::SIGINT) {
                handle(signal, on_end as extern "C" fn(c_int) as usize, 0);
            }
        }
        for &signal in ALSO_ENDS {
            if action_of(signal).sa_sigaction == libc::SIG_DFL {
                handle(signal, on_end as extern "C" fn(c_int) as usize, 0);
            }
        }
        enlarge_signal_stack();
        for (signal, before) in FAULTS.into_iter().zip(&BEFORE) {
            // Kept for the life of the process: a handler cannot know when it is the last one.
            before.store(Box::into_raw(Box::new(action_of(signal))), SeqCst);
            handle(signal, on_fault as FaultHandler as usize, libc::SA_ONSTACK);
        }
        if action_of(libc::SIGXFSZ).sa_sigaction == libc::SIG_DFL {
            handle(libc::SIGXFSZ, libc::SIG_IGN, 0);
        }
    });
}

/// Removes the files and lets the process die of the signal.
extern "C" fn on_end(signal: c_int) {
    remove_all();
    // SAFETY: both calls are allowed in a signal handler. The signal is blocked until it returns.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}

type FaultHandler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut libc::c_void);

/// Removes the files; the faulting instruction is then repeated under the action of before. There
/// is none if another process has sent the signal: then this one dies of it as of any other.
extern "C" fn on_fault(signal: c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the system passes a valid pointer to a handler with SA_SIGINFO.
    if unsafe { (*info).si_code } <= 0 {
        return on_end(signal);
    }
    remove_all();
    if signal == libc::SIGBUS {
        write_line("encke: a file became shorter or unreadable while it was being read\n");
    }
    // SAFETY: the pointer is null, or to a value that is never freed.
    let report = unsafe { REPORT.load(SeqCst).as_ref() };
    if let (libc::SIGSEGV, Some(report)) = (signal, report) {
        if !REPORTED.swap(true, SeqCst) {
            write_line(&report.line);
        }
        // SAFETY: both calls are allowed in a signal handler.
        unsafe {
            libc::sleep(report.grace_s);
            libc::_exit(2);
        }
    }
    for (fault, before) in FAULTS.into_iter().zip(&BEFORE) {
        if fault == signal {
            // SAFETY: `sigaction` is allowed in a signal handler; the pointer was stored before
            // this handler was installed, and is never freed.
            unsafe { libc::sigaction(signal, before.load(SeqCst), ptr::null_mut()) };
        }
    }
}

/// Writes to standard error, from a signal handler.
fn write_line(line: &str) {
    // SAFETY: `write` is allowed in a signal handler, and the bytes are valid during the call.
    unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
}

fn action_of(signal: c_int) -> libc::sigaction {
    let mut action = MaybeUninit::zeroed();
    // SAFETY: only writes to `action`, which is a plain C struct and valid when zeroed.
    unsafe {
        libc::sigaction(signal, ptr::null(), action.as_mut_ptr());
        action.assume_init()
    }
}

/// Faults are handled on a stack of their own (`SA_ONSTACK`), because a thread may have used up
/// its own. The other signals are not: the standard library gives threads a signal stack of the
/// least size that the system allows, which on processors with tiles (AMX) the saved registers fill
/// to the last byte.
fn handle(signal: c_int, handler: usize, stack: c_int) {
    let mut action = action_of(signal);
    action.sa_sigaction = handler;
    action.sa_flags = stack | libc::SA_RESTART | libc::SA_SIGINFO;
    // SAFETY: the handlers above call only what is allowed in one.
    unsafe {
        libc::sigfillset(&mut action.sa_mask);
        libc::sigaction(signal, &action, ptr::null_mut());
    }
}

/// Gives the calling thread a signal stack on which a handler has room beside the registers. It is
/// the main thread that signals of other processes are delivered to.
fn enlarge_signal_stack() {
    const BYTES: usize = 1 << 16;
    // Kept for the life of the process: the thread may use it at any time.
    let memory = Box::leak(vec![0u8; BYTES].into_boxed_slice());
    let stack = libc::stack_t {
        ss_sp: memory.as_mut_ptr().cast(),
        ss_flags: 0,
        ss_size: BYTES,
    };
    // SAFETY: the memory is valid for ever and used by nothing else. If the call fails, the thread
    // keeps the stack that it has.
    unsafe { libc::sigaltstack(&raw const stack, ptr::null_mut()) };
}

/// Runs a function during which no signal is handled on this thread.
pub(crate) fn without_signals<R>(run: impl FnOnce() -> R) -> R {
    let _blocked = BlockedSignals::new();
    run()
}

/// The signals of this thread as they were, restored when this is dropped.
struct BlockedSignals(libc::sigset_t);

impl BlockedSignals {
    fn new() -> BlockedSignals {
        let mut all = MaybeUninit::zeroed();
        let mut before = MaybeUninit::zeroed();
        // SAFETY: the calls write to the two sets, which are valid when zeroed.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            BlockedSignals(before.assume_init())
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: restores the mask that `new` read.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, ptr::null_mut()) };
    }
}

/// The user on whose behalf this process runs.
pub(crate) fn user() -> u32 {
    // SAFETY: it has no preconditions and cannot fail.
    unsafe { libc::geteuid() }
}

/// Like `std::process::id`, and documented as allowed in a signal handler.
pub(crate) fn process_id() -> u32 {
    // SAFETY: it has no preconditions and cannot fail.
    unsafe { libc::getpid() as u32 }
}

/// Removes a file; a failure has no consequence.
pub(crate) fn unlink(path: *const c_char) {
    // SAFETY: the caller passes a string of `CString::into_raw`, which is never freed.
    unsafe { libc::unlink(path) };
}

/// A file in a folder that has no name: it is gone with the last process that has it open. An error
/// where the file system has no such files, or [`link`] would not find it.
#[cfg(target_os = "linux")]
pub(crate) fn unnamed_file(folder: &Path, mode: u32) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = std::fs::OpenOptions::new();
    options.read(true).write(true);
    options.mode(mode).custom_flags(libc::O_TMPFILE);
    let file = options.open(folder)?;
    std::fs::metadata(descriptor_path(&file))?;
    Ok(file)
}

/// Gives an unnamed file a name, which no other file has.
#[cfg(target_os = "linux")]
pub(crate) fn link(file: &File, path: &Path) -> io::Result<()> {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    let from = CString::new(descriptor_path(file))?;
    let to = CString::new(path.as_os_str().as_bytes())?;
    let (here, follow) = (libc::AT_FDCWD, libc::AT_SYMLINK_FOLLOW);
    // SAFETY: both strings end with a zero byte and outlive the call.
    match unsafe { libc::linkat(here, from.as_ptr(), here, to.as_ptr(), follow) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The path by which this process can name a file that it has open.
#[cfg(target_os = "linux")]
fn descriptor_path(file: &File) -> String {
    format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(file))
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn unnamed_file(_: &Path, _: u32) -> io::Result<File> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn link(_: &File, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
