//! What this crate refuses itself; what the library refuses keeps the library's words.
//!
//! candle's operations return candle's errors, so these travel inside one of those.

use candle_core::DType;

/// Why tensors of candle cannot be attended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Attention has four dimensions.
    #[error(
        "{tensor} has {got} dimensions, {dims:?}; attention takes [batch, tokens, heads, head \
         dimension]: reshape it, and transpose(1, 2) it where heads come first"
    )]
    Rank {
        /// Which tensor.
        tensor: &'static str,
        /// How many dimensions it has.
        got: usize,
        /// They.
        dims: Vec<usize>,
    },
    /// Only floating-point numbers are attended.
    #[error(
        "{tensor} holds {got:?}; attention takes f64, f32, bf16 and f16: convert it with to_dtype"
    )]
    Type {
        /// Which tensor.
        tensor: &'static str,
        /// What it holds.
        got: DType,
    },
    /// Memory of a device that this build has no kernel for.
    #[error("{tensor} is on {device}; this build attends on the CPU: move it with to_device")]
    Device {
        /// Which tensor.
        tensor: &'static str,
        /// Where it is.
        device: &'static str,
    },
    /// Tensors of one call in different places.
    #[error("{tensor} is on {device}, but q is on {q}: move them to one device with to_device")]
    Apart {
        /// Which tensor.
        tensor: &'static str,
        /// Where it is.
        device: String,
        /// Where q is.
        q: String,
    },
    /// An attention that somebody made of a ring, on tensors that are not in the host's memory.
    #[error(
        "q is on {device}, and this attention was made of a ring of the host: make it with \
         Attention::new, or move the tensors with to_device"
    )]
    HostRing {
        /// Where q is.
        device: String,
    },
    /// A backward pass through an operation whose forward pass has left nothing.
    #[error(
        "the forward pass of this attention left nothing for its backward pass: a bug in encke-candle"
    )]
    NothingKept,
    /// Heads that do not go together.
    #[error(
        "{heads} heads cannot share {kv_heads} key heads, or have {dim} numbers each; all must be at \
         least 1, and the key heads divide the heads"
    )]
    Heads {
        /// Query heads.
        heads: usize,
        /// Key heads.
        kv_heads: usize,
        /// Numbers of a head.
        dim: usize,
    },
    /// The library's own word.
    #[error(transparent)]
    Encke(#[from] encke::Error),
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> candle_core::Error {
        // Words for whoever called, without the way the call took: `wrap` would add that to them.
        candle_core::Error::Wrapped(Box::new(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With `RUST_BACKTRACE` set, candle would add some ten thousand characters.
    #[test]
    fn what_is_said_is_said_without_a_backtrace() {
        let refused = Error::Device {
            tensor: "q",
            device: "metal",
        };
        let said = refused.to_string();
        let wrapped = candle_core::Error::from(refused);
        assert!(matches!(wrapped, candle_core::Error::Wrapped(_)));
        assert_eq!(wrapped.to_string(), said);
    }
}
