//! Exact attention over sequences that are too long for one device.
//!
//! [`Attention`] is the interface, on 1 rank and on 32: the number of ranks changes where the work
//! is done, not the result. Tensors are `[b, n, h, d]`; [`View`] borrows the caller's, with any
//! strides whose last dimension is contiguous.
//!
//! ```
//! use encke::{Attention, Mode, OffsetRule, MixingGradient, Pattern, View};
//!
//! // A LongNet pattern: every head mixes two branches under one softmax.
//! let mode = Mode::Mix { offsets: OffsetRule::HeadMod, gradient: MixingGradient::Exact };
//! let pattern = Pattern::dilated(&[16, 64], &[1, 4], mode)?.causal(true);
//! let attention = Attention::builder().pattern(pattern).ranks(4).build()?;
//!
//! // One batch entry, 64 tokens, 2 heads (sharing one key head), head dimension 8.
//! let values = |n: usize, phase: f32| (0..n).map(|i| (i as f32 * 0.37 + phase).sin()).collect();
//! let (q, k, v): (Vec<f32>, Vec<f32>, Vec<f32>) =
//!     (values(64 * 2 * 8, 0.0), values(64 * 8, 1.0), values(64 * 8, 2.0));
//! let q = View::contiguous(&q, [1, 64, 2, 8])?;
//! let k = View::contiguous(&k, [1, 64, 1, 8])?;
//! let v = View::contiguous(&v, [1, 64, 1, 8])?;
//!
//! let forward = attention.forward(&q, &k, &v)?;
//! assert_eq!(forward.out.dims(), [1, 64, 2, 8]);
//! assert_eq!(forward.lse.dims(), [1, 64, 2, 1]);
//!
//! // The gradient of the loss "sum of all outputs". Only (out, lse) was saved for it.
//! let ones = vec![1.0f32; 64 * 2 * 8];
//! let dout = View::contiguous(&ones, [1, 64, 2, 8])?;
//! let backward = attention.backward(&q, &k, &v, &forward.checkpoint, &dout, None)?;
//! assert_eq!(backward.dk.dims(), [1, 64, 1, 8]);
//!
//! // One rank gives the same answer, to rounding.
//! let alone = Attention::builder().pattern(attention.pattern().clone()).build()?;
//! let same = alone.forward(&q, &k, &v)?;
//! for (a, b) in forward.out.to_f64().iter().zip(same.out.to_f64()) {
//!     assert!((a - b).abs() < 1e-5);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The same on a GPU is `builder().build_on(CudaKernel::new(0)?)`: kernels are compiled for the
//! installed GPU at first use; without a GPU the error names what was looked for. The default
//! feature `cuda` brings this; with `default-features = false` no CUDA crate is compiled.
//!
//! [`Builder::auto`] chooses the number of ranks and the sharding: it plans and times the
//! alternatives on a described machine ([`tune`] describes this one) and takes the fastest that
//! fits ([`choose`]).
//!
//! Tensors can stay sharded between calls, and the ring can change its size: a resize moves the
//! fewest bytes, and later calls give the bits of a new ring of that size.
//!
//! ```
//! # use encke::{Attention, View};
//! # let values: Vec<f32> = (0..48 * 2 * 8).map(|i| (i as f32 * 0.37).sin()).collect();
//! # let tensor = View::contiguous(&values, [1, 48, 2, 8])?;
//! let mut ring = Attention::builder().ranks(4).build()?;
//! let mut x = ring.shard(&tensor)?;
//! let four = ring.forward_shards(&x, &x, &x)?;
//! let moved = ring.resize(3, &mut [&mut x])?;
//! assert_eq!(moved.sent_bytes, 48 / 3 * 2 * 8 * 4);        // a third of the rows
//! let three = ring.forward_shards(&x, &x, &x)?;
//! assert_eq!(three.out.sharding().ranks(), 3);
//! # assert_eq!(four.out.dims(), three.out.dims());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Every result carries the memory and the traffic of each rank ([`Report`]); [`Attention::plan`]
//! computes both beforehand, for any shape.
//!
//! Where each process is one rank with its own rows, [`Builder::build_shard`] makes a
//! [`ShardAttention`], which communicates through any [`Transport`].
//!
//! NaN and infinity are not treated specially: they propagate by IEEE arithmetic, to the rows that
//! attend to them and to no others.
#![forbid(unsafe_code)]

mod attention;
mod auto;
mod builder;
mod checkpoint;
pub mod choose;
mod elastic;
#[cfg(feature = "cuda")]
mod gpu_call;
mod offload;
#[cfg(feature = "cuda")]
mod on_gpu;
mod passes;
mod results;
mod saved_state;
mod shard;
pub mod tune;

pub use attention::Attention;
pub use auto::Auto;
pub use builder::{Builder, Precision};
pub use checkpoint::{Checkpoint, CheckpointPolicy, SavedOutput};
pub use elastic::{NewRing, Proposal, Resizing, ShardedBackward, ShardedForward};
pub use encke_core::kernel::{Kernel, KernelError};
pub use encke_core::memory::Memory;
pub use encke_core::plan::balance::Balance;
pub use encke_core::plan::explain;
pub use encke_core::plan::rings::Rotating;
pub use encke_core::plan::{Pass, Plan, Queries, Request, Schedule};
pub use encke_core::sharding::{Cut, Sharding, TokenRanges};
pub use encke_core::transport::{
    Address, HostWireBuffer, Incoming, Moved, Outgoing, Transport, TransportError, WireBuffer,
};
pub use encke_core::{Bits, Documents, Dropout, KeyLengths, Scores, Window, alibi_slopes};
pub use encke_core::{
    Branch, DType, Data, Element, GroupScale, MixingGradient, Mode, OffsetRule, Padding, Pattern,
    Shape, Slice, Tensor, View,
};
pub use encke_core::{conformance, denominator, plan, reference, sharding, sinks};
pub use encke_cost as cost;
pub use encke_cpu::CpuKernel;
#[cfg(feature = "cuda")]
pub use encke_cuda::{CudaKernel, DeviceView, Error as CudaError, ForeignStream};
pub use encke_ring::call::CallRows;
pub use encke_ring::{
    Activity, CacheLimits, CacheStats, Fault, FaultPhase, PoolError, RankError, RankMemory,
    RingError as Error, RowPositions, Sharded, Trace, gather_sequence, split_sequence, threads,
    trace,
};
#[cfg(feature = "cuda")]
pub use gpu_call::{EnqueueReport, GpuCall};
pub use results::{Backward, Forward, Report};
pub use saved_state::{SavedForward, SavedState};
pub use shard::ShardAttention;
