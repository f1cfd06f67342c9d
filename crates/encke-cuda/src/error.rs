//! Errors of libraries, driver, compiler and GPU.
//!
//! Every message names what was searched, requested or refused, and what to do about it.

use std::time::Duration;

use cudarc::driver::DriverError;
use encke_core::kernel::KernelError;

/// The name of the kernel in reports and errors.
pub(crate) const NAME: &str = "cuda";

/// An error on or around a GPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A library that is loaded at run time is missing.
    #[error("{library} was not found: looked for {searched}; {advice}")]
    Library {
        /// The library.
        library: &'static str,
        /// The file names and folders tried, with the loader's messages.
        searched: String,
        /// What to do.
        advice: &'static str,
    },
    /// A library lacks a function.
    #[error("{library} has no {function}; it is too old, install a newer one")]
    Function {
        /// The library.
        library: &'static str,
        /// The missing function.
        function: String,
    },
    /// No GPU with this ordinal.
    #[error("there is no GPU {asked}: this machine has {found}")]
    NoDevice {
        /// The requested ordinal.
        asked: usize,
        /// The number of GPUs.
        found: usize,
    },
    /// The driver reported an error.
    #[error("{what} failed: {reason}")]
    Driver {
        /// The failed operation.
        what: String,
        /// The driver's message.
        reason: String,
    },
    /// The GPU is out of memory.
    #[error("the GPU could not allocate {bytes} bytes; use more ranks or a narrower type")]
    Memory {
        /// The requested bytes.
        bytes: usize,
    },
    /// A wait for the GPU exceeded its deadline.
    #[error("waited {waited:?} for {what}, longer than the deadline of {limit:?}")]
    Deadline {
        /// The awaited event.
        what: String,
        /// The time waited.
        waited: Duration,
        /// The deadline.
        limit: Duration,
    },
    /// NCCL reported an error.
    #[error("NCCL: {what} failed: {reason}")]
    Nccl {
        /// The failed operation.
        what: String,
        /// NCCL's message.
        reason: String,
    },
    /// A program did not compile.
    #[error("NVRTC {version} could not compile {program} for {arch}:\n{log}")]
    Compile {
        /// The compiler's version.
        version: String,
        /// The program.
        program: String,
        /// The architecture.
        arch: String,
        /// The compiler's log.
        log: String,
    },
    /// No kernel supports the request.
    #[error("no CUDA kernel for {what}")]
    Unsupported {
        /// The request.
        what: String,
    },
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error of the driver while doing `what`.
    pub(crate) fn driver(what: impl Into<String>, error: DriverError) -> Error {
        let name = error.error_name().map(|x| x.to_string_lossy().into_owned());
        let text = error
            .error_string()
            .map(|x| x.to_string_lossy().into_owned());
        Error::Driver {
            what: what.into(),
            reason: match (name, text) {
                (Ok(name), Ok(text)) => format!("{text} ({name})"),
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
