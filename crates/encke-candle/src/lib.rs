//! Encke's attention in candle: an operation with gradients, and a module.
//!
//! [`attention`] takes candle's tensors `[b, n, h, d]` (k and v may have fewer heads) and reads
//! them in place, with any strides whose last one is 1: for a tensor `[b, h, n, d]` pass its
//! `transpose(1, 2)`, which in candle copies nothing. Gradients come from Encke's backward pass;
//! the forward pass saves the output and the log-sum-exp for it.
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//! use encke::{MixingGradient, Mode, OffsetRule, Pattern};
//! use encke_candle::{Attention, attention};
//!
//! // A LongNet pattern on a ring of two ranks.
//! let mode = Mode::Mix { offsets: OffsetRule::HeadMod, gradient: MixingGradient::Exact };
//! let pattern = Pattern::dilated(&[16, 64], &[1, 4], mode)?.causal(true);
//! let longnet = Attention::new(encke::Attention::builder().pattern(pattern).ranks(2))?;
//!
//! let q = Var::randn(0f32, 1.0, (1, 64, 4, 8), &Device::Cpu)?;
//! let k = Tensor::randn(0f32, 1.0, (1, 64, 2, 8), &Device::Cpu)?;
//! let v = Tensor::randn(0f32, 1.0, (1, 64, 2, 8), &Device::Cpu)?;
//! let out = attention(&q, &k, &v, &longnet)?;
//! assert_eq!(out.dims(), [1, 64, 4, 8]);
//! let gradients = out.sqr()?.sum_all()?.backward()?;
//! assert_eq!(gradients.get(&q).map(|dq| dq.dims()), Some(&[1, 64, 4, 8][..]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Tensors on an NVIDIA GPU stay there (feature `cuda`, off by default): the call is the same,
//! Encke's kernels work on candle's memory in the order of candle's stream, and gradients are on
//! the same GPU. The feature turns on candle's own `cuda`, which needs a CUDA toolkit with `nvcc`
//! to build, and CUDA's libraries and a driver to run. Both libraries use the same cudarc, for CUDA
//! 13.0.
//!
//! [`RingDilatedAttention`] is a layer: attention with its projections.
//!
//! The decision that shaped it: an [`AttentionBackend`] runs the ring, so all ranks in this process
//! and one rank of several processes ([`ShardBackend`]) are the same operation to candle.
#![forbid(unsafe_code)]

mod attention;
mod backend;
#[cfg(feature = "cuda")]
mod cuda;
mod error;
mod module;
mod norm;
mod operation;
mod storage;

pub use attention::{Attention, Reports};
pub use backend::{AttentionBackend, ShardBackend};
pub use encke::SavedForward;
pub use error::Error;
pub use module::{LayerConfig, RingDilatedAttention};
pub use norm::rms_norm;
pub use operation::attention;
