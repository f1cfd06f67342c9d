//! Errors of kernels and of device memory.

/// Why a kernel operation failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// An allocation failed.
    #[error("{kernel} could not allocate {bytes} bytes; use more ranks or a narrower type")]
    Memory {
        /// The kernel's name.
        kernel: &'static str,
        /// The size of the allocation.
        bytes: usize,
    },
    /// Types or sizes that the kernel does not support.
    #[error("{kernel} does not support {what}")]
    Unsupported {
        /// The kernel's name.
        kernel: &'static str,
        /// The unsupported request.
        what: String,
    },
    /// A device error.
    #[error("{kernel}: {reason}")]
    Device {
        /// The kernel's name.
        kernel: &'static str,
        /// The device's message.
        reason: String,
    },
}

/// A result of a kernel or of its memory.
pub type Result<T> = std::result::Result<T, KernelError>;
