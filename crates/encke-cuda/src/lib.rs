//! Attention on NVIDIA GPUs.
//!
//! Builds everywhere: driver and compiler are found and loaded at run time, and where they are
//! missing the error says what was looked for and where. Kernels are CUDA C++ without headers,
//! compiled for the GPU at hand and kept in the user's cache.

mod abi;
mod buffer;
mod cache;
mod catalogue;
mod device;
mod device_view;
mod error;
mod external_transport;
mod foreign_stream;
mod hops;
mod host_memory;
mod jobs;
mod kernel;
mod launch;
mod library;
mod memory;
mod messages;
mod nccl;
mod nvrtc;
mod operands;
mod order;
mod pinned;
mod program;
mod staged;
mod tensor_map;
mod wgmma;

pub use buffer::Buffer;
pub use cache::Cache;
pub use catalogue::programs;
pub use device::{Device, Instant};
pub use device_view::DeviceView;
pub use error::{Error, Result};
pub use external_transport::{ExternalTransport, ExternalWire};
pub use foreign_stream::ForeignStream;
pub use hops::Hops;
pub use kernel::{CudaKernel, Path, Summation};
pub use launch::rows::RowSums;
pub use messages::Piece;
pub use nccl::{Nccl, NcclTransport, UniqueId};
pub use nvrtc::{Built, Nvrtc, complaints};
pub use pinned::Pinned;
pub use program::Program;
pub use staged::Staged;
