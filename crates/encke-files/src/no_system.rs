//! A system without signals and owners of files.

use std::ffi::c_char;

/// Where there are no signals, files are removed when they are dropped.
pub fn remove_temporaries_on_signals() {}

pub(crate) fn process_id() -> u32 {
    std::process::id()
}

pub(crate) fn unlink(_: *const c_char) {}

pub(crate) fn without_signals<R>(run: impl FnOnce() -> R) -> R {
    run()
}
