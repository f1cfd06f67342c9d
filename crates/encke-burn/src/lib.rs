//! Encke's attention in Burn: an operation with gradients, and a module.
//!
//! [`attention`] takes Burn's tensors `[b, n, h, d]` (k and v may have fewer heads) and reads them
//! in place, with any strides whose last one is 1: for a tensor `[b, h, n, d]` pass its
//! `swap_dims(1, 2)`, which on Burn's CPU backend copies nothing. Burn's own attention has no
//! backward pass: under autodiff it is a product of matrices, whose n x n scores are kept until the
//! gradient. Here the forward pass saves the output and the log-sum-exp, and gradients come from
//! Encke's backward pass, so memory is O(n).
//!
//! ```
//! use burn::tensor::{Device, Distribution, Tensor};
//! use encke::{MixingGradient, Mode, OffsetRule, Pattern};
//! use encke_burn::{Attention, attention};
//!
//! // A LongNet pattern on a ring of two ranks.
//! let mode = Mode::Mix { offsets: OffsetRule::HeadMod, gradient: MixingGradient::Exact };
//! let pattern = Pattern::dilated(&[16, 64], &[1, 4], mode)?.causal(true);
//! let longnet = Attention::new(encke::Attention::builder().pattern(pattern).ranks(2))?;
//!
//! let device = Device::flex().autodiff();
//! let random = |heads| Tensor::<4>::random([1, 64, heads, 8], Distribution::Default, &device);
//! let q = random(4).require_grad();
//! let out = attention(q.clone(), random(2), random(2), &longnet)?;
//! assert_eq!(out.dims(), [1, 64, 4, 8]);
//! let gradients = out.powi_scalar(2).sum().backward();
//! assert_eq!(q.grad(&gradients).map(|dq| dq.dims()), Some([1, 64, 4, 8]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`RingDilatedAttention`] is a layer: attention with its projections.
//!
//! Tensors must be on Burn's CPU backend, Flex; others are refused. (CubeCL, which owns the memory
//! of Burn's GPU tensors, hands out addresses but not its streams, so that a call could only be
//! ordered by waiting for the whole device.)
//!
//! The decision that shaped it: the operation is a Burn backend extension
//! ([`AttentionExtension`]), so Burn's dispatch finds the backend, the autodiff graph and the
//! checkpointing strategy of a call, and this crate contains neither.
#![forbid(unsafe_code)]

mod attention;
mod error;
mod module;
mod operation;
mod primitive;

pub use attention::{Attention, attention};
pub use error::Error;
pub use module::{RingDilatedAttention, RingDilatedAttentionConfig};
pub use operation::{AttentionCall, AttentionExtension};
