//! Attention on NVIDIA GPUs.
//!
//! The crate builds without CUDA: driver, NVRTC and NCCL are loaded at run time, and a missing
//! library is an error that lists the files and folders tried. Kernels are CUDA C++ without
//! headers, compiled by NVRTC for the installed GPU and cached on disk.

mod abi;
mod allocation;
mod arguments;
mod branch_deltas;
mod buffer;
mod cache;
mod catalogue;
mod device;
mod device_view;
mod error;
mod external_transport;
mod foreign_stream;
pub mod generated_rows;
mod hops;
mod host_copies;
mod host_memory;
mod kernel;
mod last_uses;
mod launch;
mod library;
mod lock;
mod masked_job;
mod messages;
mod nccl;
mod nvrtc;
mod operands;
mod pinned;
mod program;
mod shared_device;
mod shared_memory;
mod spare_memory;
mod staged;
mod tensor_map;
mod wgmma;

pub use branch_deltas::{BranchDeltas, BranchResults};
pub use buffer::Buffer;
pub use cache::Cache;
pub use catalogue::{covering, programs};
pub use device::{Device, Instant};
pub use device_view::DeviceView;
pub use error::{Error, Result};
pub use external_transport::{ExternalTransport, ExternalWire};
pub use foreign_stream::ForeignStream;
pub use hops::Hops;
pub use kernel::{CudaKernel, Path, Summation};
pub use messages::DeviceMessage;
pub use nccl::{Nccl, NcclTransport, UniqueId};
pub use nvrtc::{CompiledProgram, Nvrtc, compile_warnings};
pub use pinned::Pinned;
pub use program::Program;
pub use shared_memory::SharedMemoryProbe;
pub use staged::{ClosedSlots, Staged, StagedParcels};
