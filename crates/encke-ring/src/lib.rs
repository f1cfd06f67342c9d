//! Ranks that run plans.
//!
//! A [`Rank`] interprets the program of one participant: it owns the buffers that the plan lists
//! and runs the tasks of each round, with any [`Kernel`](encke_core::kernel::Kernel) and any
//! [`Transport`](encke_core::transport::Transport). [`ThreadRing`] runs all ranks as threads of one
//! process. [`ShardCall`] runs one rank where the others are elsewhere; [`ShardRing`] does so on
//! tensors of the caller and keeps plans and buffers between calls.
//!
//! There is no attention in this crate, and no decision about what is computed.
#![forbid(unsafe_code)]

mod buffer_table;
pub mod cache;
pub mod call;
pub mod collectives;
pub mod envelope;
pub mod error;
pub mod fault_injector;
pub mod ledger;
mod membership;
pub mod memory;
pub mod out_of_core;
pub mod outcome;
pub mod rank;
pub mod rank_threads;
pub mod resize;
pub mod sequence;
pub mod shard_call;
pub mod shard_ring;
pub mod sharded;
pub mod survival;
mod task;
pub mod tensor_pool;
pub mod thread_ring;
pub mod threads;
pub mod trace;

pub use cache::{CacheLimits, CacheStats};
pub use call::CallInputs;
pub use encke_pool::PoolError;
pub use envelope::Envelope;
pub use error::{RankError, RingError};
pub use fault_injector::{Fault, FaultPhase};
pub use ledger::Ledger;
pub use memory::RankMemory;
pub use outcome::Outcome;
pub use rank::Rank;
pub use resize::Resized;
pub use sequence::{RowPositions, gather_sequence, split_sequence};
pub use shard_call::{RankReport, ShardCall, ShardInput, ShardOutput};
pub use shard_ring::ShardRing;
pub use sharded::Sharded;
pub use thread_ring::ThreadRing;
pub use trace::{Activity, Event, Trace};
