//! The threads that compute: one rayon pool of the process, apart from every pool of the caller.
//!
//! The decision here: kernels never use the pool they are called from. A rayon worker that calls a
//! ring waits for its ranks; if the ranks in turn needed that worker, nothing would ever finish.
//! The threads of this pool run no code of a caller, so they wait for no caller, and a caller that
//! waits for them runs nothing else meanwhile: another task of its pool could wait for this one.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;

use rayon::{ThreadPool, ThreadPoolBuilder};

/// The process that first computed: a fork does not copy its threads.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// More threads than any machine has cores: starting them would take minutes.
const MOST_THREADS: usize = 4096;

/// Why this process cannot compute.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// The process is a fork of one that has threads, which it has not.
    #[error(
        "process {here} was forked from {parent} after that had computed with Encke; a fork does \
         not copy its threads: start processes with \"spawn\" or \"forkserver\" (exec), or fork \
         before the first call"
    )]
    Forked {
        /// The id of this process.
        here: u32,
        /// The id of the process that computed first.
        parent: u32,
    },
    /// The threads could not be started.
    #[error("the threads that compute could not be started: {reason}; set RAYON_NUM_THREADS lower")]
    Threads {
        /// The error of the operating system.
        reason: String,
    },
}

/// The pool, as large as rayon's global one: `RAYON_NUM_THREADS`, what the program has set with
/// `build_global`, or the number of cores.
fn pool() -> Result<&'static ThreadPool, PoolError> {
    static POOL: OnceLock<Result<ThreadPool, PoolError>> = OnceLock::new();
    let build = || {
        // rayon starts a pool of that size before it answers how large it is.
        let set = std::env::var("RAYON_NUM_THREADS").ok();
        let set = set.and_then(|threads| threads.parse::<usize>().ok());
        if let Some(threads) = set.filter(|threads| *threads > MOST_THREADS) {
            return Err(format!("{threads} are more than {MOST_THREADS}"));
        }
        // Asked on a thread that belongs to no pool, because a pool's own thread answers for it.
        let asked = std::thread::Builder::new().spawn(rayon::current_num_threads);
        let threads = asked.map_err(|error| error.to_string())?.join();
        let threads = threads.map_err(|_| "rayon has no global pool".to_string())?;
        let pool = ThreadPoolBuilder::new().num_threads(threads);
        let pool = pool.thread_name(|index| format!("encke-{index}")).build();
        pool.map_err(|error| error.to_string())
    };
    let built = POOL.get_or_init(|| build().map_err(|reason| PoolError::Threads { reason }));
    built.as_ref().map_err(PoolError::clone)
}

/// Refuses a process that was forked after its parent had computed: it has none of the threads,
/// and a lock that one of them held stays locked.
pub fn check() -> Result<(), PoolError> {
    let here = std::process::id();
    match PROCESS.compare_exchange(0, here, Ordering::Relaxed, Ordering::Relaxed) {
        Err(parent) if parent != here => Err(PoolError::Forked { here, parent }),
        _ => Ok(()),
    }
}

/// Checks the process, and starts the threads unless they run already.
pub fn start() -> Result<(), PoolError> {
    check().and_then(|()| pool().map(drop))
}

/// How many threads compute for a call on this thread: those of the pool, or fewer where the caller
/// is a thread of a smaller rayon pool.
pub fn threads() -> usize {
    let threads = pool().map_or(1, ThreadPool::current_num_threads);
    match rayon::current_thread_index() {
        Some(_) => threads.min(rayon::current_num_threads()),
        None => threads,
    }
}

/// Runs `work` on a thread of the pool, where rayon's functions use the whole pool, and waits.
///
/// # Panics
/// If `work` does, or where [`start`] would refuse.
pub fn install<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    let pool = pool().unwrap_or_else(|error| panic!("{error}"));
    match (rayon::current_thread_index(), pool.current_thread_index()) {
        // rayon blocks a thread that belongs to no pool, and runs work of the pool itself at once.
        (None, _) | (_, Some(_)) => pool.install(work),
        // A pool of one thread shares its tasks with no other thread: it finds only its own.
        _ if rayon::current_num_threads() == 1 => work(),
        // rayon would let a thread of another pool take tasks of that pool while it waits.
        _ => join(|| (), work).1,
    }
}

/// Runs `here` on this thread and `work` on a thread of the pool, and returns both results.
///
/// # Panics
/// As [`install`], or if `here` does.
pub fn join<A, B: Send>(here: impl FnOnce() -> A, work: impl FnOnce() -> B + Send) -> (A, B) {
    let pool = pool().unwrap_or_else(|error| panic!("{error}"));
    if pool.current_thread_index().is_some() {
        return (here(), work());
    }
    let (done, result) = mpsc::sync_channel(1);
    let task: Box<dyn FnOnce() + Send + '_> = Box::new(move || {
        // The receiver waits until this is sent.
        let _ = done.send(catch_unwind(AssertUnwindSafe(work)));
    });
    // SAFETY: this function does not return before the task has sent its result, which ends every
    // use of what `work` borrows; afterwards the task holds only its half of an empty channel,
    // which the channel itself keeps alive.
    let task: Box<dyn FnOnce() + Send + 'static> = unsafe { std::mem::transmute(task) };
    pool.spawn(task);
    let here = catch_unwind(AssertUnwindSafe(here));
    let work = result.recv().expect("a task sends its result");
    match (here, work) {
        (Ok(here), Ok(work)) => (here, work),
        (Err(panic), _) | (_, Err(panic)) => resume_unwind(panic),
    }
}
