//! Errors of the library as Python exceptions: invalid arguments are a ValueError or a TypeError, a
//! failed rank or device is a RingError.

use encke::{Error, KernelError};
use encke_core::Error as RequestError;
use pyo3::create_exception;
use pyo3::exceptions::{PyMemoryError, PyOSError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;

create_exception!(
    encke,
    RingError,
    PyRuntimeError,
    "A rank, its device or an exchange failed while a call was under way."
);

create_exception!(
    encke,
    UnreadableTensor,
    PyValueError,
    "A tensor whose memory cannot be read as it lies; a copy may be readable."
);

/// An invalid request.
pub(crate) fn request(error: &RequestError) -> PyErr {
    match error {
        RequestError::DTypeMismatch { .. } => PyTypeError::new_err(error.to_string()),
        RequestError::Memory { .. } => PyMemoryError::new_err(error.to_string()),
        _ => PyValueError::new_err(error.to_string()),
    }
}

/// A tensor that cannot be read.
pub(crate) fn refused(tensor: &str, error: &RequestError) -> PyErr {
    PyValueError::new_err(format!("{tensor}: {error}"))
}

/// An error of a kernel.
pub(crate) fn kernel(error: &KernelError) -> PyErr {
    let text = error.to_string();
    match error {
        KernelError::Memory { .. } => PyMemoryError::new_err(text),
        KernelError::Unsupported { .. } => PyValueError::new_err(text),
        KernelError::Device { .. } => RingError::new_err(text),
    }
}

/// A call that failed.
pub(crate) fn call(error: &Error) -> PyErr {
    match error {
        Error::Request(error) => request(error),
        Error::Kernel(error) => kernel(error),
        Error::MissingInput { .. }
        | Error::Elsewhere { .. }
        | Error::Sharding { .. }
        | Error::Positions { .. }
        | Error::ReplicatedShards
        | Error::Undecided { .. } => PyValueError::new_err(error.to_string()),
        Error::Offload { .. } => PyOSError::new_err(error.to_string()),
        Error::Rank { source, .. } => match source {
            encke::RankError::Kernel {
                source: refused @ (KernelError::Memory { .. } | KernelError::Unsupported { .. }),
                ..
            } => kernel(refused),
            _ => RingError::new_err(with_other_ranks(error)),
        },
        Error::Pool(_) => PyRuntimeError::new_err(error.to_string()),
        Error::Thread { .. } => RingError::new_err(error.to_string()),
    }
}

/// The message of a failure, with the errors of the other ranks.
fn with_other_ranks(error: &Error) -> String {
    let mut text = error.to_string();
    if let Error::Rank { others, .. } = error {
        for (rank, source) in others {
            text += &format!("; rank {rank}: {source}");
        }
    }
    text
}
