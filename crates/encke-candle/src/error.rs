//! Errors of this crate; errors of the library pass through unchanged.
//!
//! candle's operations return candle's errors, so these are wrapped in one.

use candle_core::DType;

/// Why attention on these candle tensors failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A tensor does not have four dimensions.
    #[error(
        "{tensor} has {got} dimensions, {dims:?}; attention takes [batch, tokens, heads, head \
         dimension]: reshape it, and transpose(1, 2) it where heads come first"
    )]
    Rank {
        /// Which tensor.
        tensor: &'static str,
        /// Its number of dimensions.
        got: usize,
        /// Its dimensions.
        dims: Vec<usize>,
    },
    /// A tensor is not of a floating-point type.
    #[error(
        "{tensor} holds {got:?}; attention takes f64, f32, bf16 and f16: convert it with to_dtype"
    )]
    Type {
        /// Which tensor.
        tensor: &'static str,
        /// Its type.
        got: DType,
    },
    /// A tensor is on a device that this build has no kernel for.
    #[error("{tensor} is on {device}; this build computes on the CPU: move it with to_device")]
    Device {
        /// Which tensor.
        tensor: &'static str,
        /// Its device.
        device: &'static str,
    },
    /// Tensors of one call are on different devices.
    #[error("{tensor} is on {device}, but q is on {q}: move them to one device with to_device")]
    DeviceMismatch {
        /// Which tensor.
        tensor: &'static str,
        /// Its device.
        device: String,
        /// The device of q.
        q: String,
    },
    /// An attention made of a host backend was applied to tensors on a GPU.
    #[error(
        "q is on {device}, but this attention was made of a host backend: make it with \
         Attention::new, or move the tensors with to_device"
    )]
    HostBackend {
        /// The device of q.
        device: String,
    },
    /// A backward pass through an operation whose forward pass saved nothing.
    #[error(
        "the forward pass of this attention saved nothing for its backward pass: a bug in \
         encke-candle"
    )]
    NothingSaved,
    /// Numbers of heads that do not fit together.
    #[error(
        "{heads} heads cannot share {kv_heads} key heads with head dimension {dim}; all must be at \
         least 1, and the key heads must divide the heads"
    )]
    Heads {
        /// Query heads.
        heads: usize,
        /// Key heads.
        kv_heads: usize,
        /// Head dimension.
        dim: usize,
    },
    /// An error of the library.
    #[error(transparent)]
    Encke(#[from] encke::Error),
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> candle_core::Error {
        // `candle_core::Error::wrap` would append a backtrace to the message.
        candle_core::Error::Wrapped(Box::new(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With `RUST_BACKTRACE` set, candle would add some ten thousand characters.
    #[test]
    fn messages_carry_no_backtrace() {
        let refused = Error::Device {
            tensor: "q",
            device: "metal",
        };
        let message = refused.to_string();
        let wrapped = candle_core::Error::from(refused);
        assert!(matches!(wrapped, candle_core::Error::Wrapped(_)));
        assert_eq!(wrapped.to_string(), message);
    }
}
