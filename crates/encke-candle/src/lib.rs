//! Encke's attention in candle: an operation with gradients, and a module.
//!
//! [`attention`] takes candle's tensors `[b, n, h, d]` (k and v may have fewer heads) and reads them
//! where they are, whatever their strides, as long as the last dimension is contiguous: a tensor
//! `[b, h, n, d]` is transposed on its way in, which in candle moves nothing. Its gradients come from
//! Encke's backward pass, out of the output and the log-sum-exp of the forward pass and nothing else.
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
//! Tensors on an NVIDIA GPU stay there (feature `cuda`, off by default): `attention` is the same line,
//! Encke's kernels work on candle's memory in the order of candle's stream, and gradients are tensors of
//! the same GPU. The feature is candle's own with what it asks for: a CUDA toolkit with `nvcc` when it is
//! built, CUDA's libraries and a driver when it runs. Both libraries use one cudarc, for CUDA 13.0; the
//! default build knows nothing of it.
//!
//! [`RingDilatedAttention`] is the same with its projections, as one layer of a model.
//!
//! The decision that shaped it: whoever runs the ring is a [`Ring`], so ranks in this process and one
//! rank whose neighbours are other processes ([`Shard`]) are the same operation to candle.
#![forbid(unsafe_code)]

mod attention;
mod error;
#[cfg(feature = "cuda")]
mod gpus;
mod module;
mod norm;
mod operation;
mod ring;
mod storage;

pub use attention::{Attention, Reports, attention};
pub use error::Error;
pub use module::{Config, RingDilatedAttention};
pub use norm::rms_norm;
pub use ring::{Left, Ring, Shard};
