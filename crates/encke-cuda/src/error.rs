//! What can go wrong between this program and a GPU.
//!
//! Every message names what was looked for, asked for or refused, and what to do about it.

use std::time::Duration;

use cudarc::driver::DriverError;
use encke_core::kernel::KernelError;

/// The name of the kernel in reports and errors.
pub(crate) const NAME: &str = "cuda";

/// Why something on a GPU could not be done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A library that is loaded at run time is not there.
    #[error("{library} was not found: looked for {looked}; {cure}")]
    Library {
        /// What it is.
        library: &'static str,
        /// File names and folders, with what the loader said.
        looked: String,
        /// What to do.
        cure: &'static str,
    },
    /// A library lacks a function.
    #[error("{library} has no {function}; it is too old, install a newer one")]
    Function {
        /// Which library.
        library: &'static str,
        /// Which function.
        function: String,
    },
    /// There is no such GPU.
    #[error("there is no GPU {asked}: this machine has {found}")]
    NoDevice {
        /// The number asked for.
        asked: usize,
        /// How many there are.
        found: usize,
    },
    /// The driver refused something.
    #[error("{what} failed: {reason}")]
    Driver {
        /// What was tried.
        what: String,
        /// What the driver said.
        reason: String,
    },
    /// There is not enough memory on the GPU.
    #[error("the GPU could not allocate {bytes} bytes; use more ranks or a narrower type")]
    Memory {
        /// How much was asked for.
        bytes: usize,
    },
    /// The GPU did not get there in time.
    #[error("waited {waited:?} for {what}, longer than the deadline of {limit:?}")]
    Deadline {
        /// What was waited for.
        what: String,
        /// How long.
        waited: Duration,
        /// How long was allowed.
        limit: Duration,
    },
    /// NCCL refused something.
    #[error("NCCL: {what} failed: {reason}")]
    Nccl {
        /// What was tried.
        what: String,
        /// What NCCL said.
        reason: String,
    },
    /// A program did not compile.
    #[error("NVRTC {version} could not compile {program} for {arch}:\n{log}")]
    Compile {
        /// The compiler's version.
        version: String,
        /// Which program.
        program: String,
        /// For which architecture.
        arch: String,
        /// What the compiler said.
        log: String,
    },
    /// A request no kernel here has a path for.
    #[error("no CUDA kernel for {what}")]
    Unsupported {
        /// What was asked for.
        what: String,
    },
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// A driver's refusal, with what was tried.
    pub(crate) fn driver(what: impl Into<String>, error: DriverError) -> Error {
        let name = error.error_name().map(|x| x.to_string_lossy().into_owned());
        let said = error
            .error_string()
            .map(|x| x.to_string_lossy().into_owned());
        Error::Driver {
            what: what.into(),
            reason: match (name, said) {
                (Ok(name), Ok(said)) => format!("{said} ({name})"),
                _ => format!("{:?}", error.0),
            },
        }
    }
}

impl From<Error> for KernelError {
    fn from(error: Error) -> KernelError {
        match error {
            Error::Memory { bytes } => KernelError::Memory {
                kernel: NAME,
                bytes,
            },
            Error::Unsupported { what } => KernelError::Unsupported { kernel: NAME, what },
            other => KernelError::Device {
                kernel: NAME,
                reason: other.to_string(),
            },
        }
    }
}
