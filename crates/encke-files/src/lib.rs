//! Files from outside, read with limits ([`open`], [`read`], [`json`]), and files that appear
//! complete or not at all ([`AtomicFile`]).
//!
//! The decision here: nothing is known about a file before it is open. It may be a pipe that never
//! ends, a device, a link to either, or another user's; each of these is an error, and none of them
//! makes a program wait, fill its memory, or leave a file behind when it is killed.
#![deny(unsafe_code)]

mod atomic_file;
pub mod json;
#[cfg(not(unix))]
mod no_system;
mod read;
#[cfg(unix)]
mod system;
mod temporaries;

#[cfg(not(unix))]
use no_system as system;

pub use atomic_file::{AtomicFile, ExpectedFile, create_private_folder, folder};
pub use read::{open, read, read_own};
pub use system::{exit_on_invalid_access, remove_temporaries_on_signals};
pub use temporaries::remove_temporaries;
