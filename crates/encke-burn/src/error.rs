//! Errors of this crate; errors of the library pass through unchanged.

use burn::tensor::DType;

/// Why attention on these Burn tensors failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A tensor is not of a floating-point type that Encke computes with.
    #[error("{tensor} holds {got:?}; attention takes f64, f32, bf16 and f16: cast it")]
    Type {
        /// Which tensor.
        tensor: &'static str,
        /// Its type.
        got: DType,
    },
    /// A tensor is not on the CPU backend.
    #[error(
        "{tensor} is on {device}; attention takes tensors on Device::flex(): move it with \
         to_device"
    )]
    Device {
        /// Which tensor.
        tensor: &'static str,
        /// Its device, as Burn writes it.
        device: String,
    },
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
