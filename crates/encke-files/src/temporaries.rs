//! The temporary files of this process, removed however it ends: by [`Temporary`]'s drop, or by a
//! signal. (Nothing can be done at SIGKILL.)
//!
//! The decision here: the signal handler removes the files itself. `unlink` is allowed in a
//! handler, so no thread has to be woken, and the process then dies of the same signal, as its
//! parent expects.

use std::ffi::{CString, c_char};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize};

use crate::system;

/// Temporary files at one time; a command has up to three.
const MOST: usize = 64;

/// The paths of the live files. A drop or the handler takes a pointer out, and then owns it.
static LIVE: [AtomicPtr<c_char>; MOST] = [const { AtomicPtr::new(ptr::null_mut()) }; MOST];
/// Threads that are about to create a file; the handler waits for them.
static CREATING: AtomicUsize = AtomicUsize::new(0);
/// Whether the files are being removed because the process ends.
static ENDING: AtomicBool = AtomicBool::new(false);
/// The process that has the files: a fork of it has not.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// The path of a temporary file, which is removed when this is dropped or the process ends.
#[derive(Debug)]
pub(crate) struct Temporary {
    path: PathBuf,
    slot: usize,
}

impl Temporary {
    /// Creates a file of an unpredictable name in a folder.
    pub fn create<R>(
        folder: &Path,
        create: impl FnOnce(&Path) -> io::Result<R>,
    ) -> io::Result<(Temporary, R)> {
        Temporary::register(Temporary::path_in(folder), create)
    }

    /// A path of an unpredictable name in a folder.
    pub fn path_in(folder: &Path) -> PathBuf {
        // 64 random bits: no other file has the name, and no other user can prepare one.
        let name = RandomState::new().build_hasher().finish();
        folder.join(format!(".encke-{name:016x}.tmp"))
    }

    /// Removes this file, too, when the process ends; `open` creates or opens it.
    pub fn register<R>(
        path: PathBuf,
        open: impl FnOnce(&Path) -> io::Result<R>,
    ) -> io::Result<(Temporary, R)> {
        // Until the file exists, the handler waits, and so must not run on this thread.
        system::without_signals(|| Temporary::open(path, open))
    }

    fn open<R>(
        path: PathBuf,
        open: impl FnOnce(&Path) -> io::Result<R>,
    ) -> io::Result<(Temporary, R)> {
        let name = CString::new(path.as_os_str().as_encoded_bytes())?;
        CREATING.fetch_add(1, SeqCst);
        if ENDING.load(SeqCst) {
            // The process ends within moments, and a file created now would be left behind.
            CREATING.fetch_sub(1, SeqCst);
            loop {
                std::thread::park();
            }
        }
        OWNER.store(system::process_id(), SeqCst);
        let name = name.into_raw();
        let free = |live: &AtomicPtr<c_char>| {
            live.compare_exchange(ptr::null_mut(), name, SeqCst, SeqCst)
                .is_ok()
        };
        let opened = match LIVE.iter().position(free) {
            Some(slot) => {
                let temporary = Temporary { path, slot };
                open(&temporary.path).map(|opened| (temporary, opened))
            }
            None => {
                drop(owned(name));
                Err(io::Error::other(format!(
                    "{MOST} files are being written already"
                )))
            }
        };
        CREATING.fetch_sub(1, SeqCst);
        opened
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // It is gone already if it was renamed.
        let _ = std::fs::remove_file(&self.path);
        drop(owned(LIVE[self.slot].swap(ptr::null_mut(), SeqCst)));
    }
}

/// The string of a pointer that was taken out of [`LIVE`].
#[allow(unsafe_code)]
fn owned(name: *mut c_char) -> Option<CString> {
    // SAFETY: the pointer comes from `CString::into_raw`, and a swap gives it to one caller only.
    (!name.is_null()).then(|| unsafe { CString::from_raw(name) })
}

/// Removes all temporary files; for a process that is about to end without dropping them.
pub fn remove_temporaries() {
    system::without_signals(remove_all);
}

/// Removes all temporary files. The signal handler calls this, so it neither locks nor allocates.
pub(crate) fn remove_all() {
    if OWNER.load(SeqCst) != system::process_id() {
        return;
    }
    ENDING.store(true, SeqCst);
    while CREATING.load(SeqCst) > 0 {
        std::hint::spin_loop();
    }
    for live in &LIVE {
        let name = live.swap(ptr::null_mut(), SeqCst);
        if !name.is_null() {
            system::unlink(name);
        }
    }
}
