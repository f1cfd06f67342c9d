//! Ranks that carry out plans.
//!
//! A [`Rank`] interprets the program of one participant: it owns the buffers the plan lists and
//! does what each round says, with any [`Kernel`](encke_core::kernel::Kernel) and any
//! [`Transport`](encke_core::transport::Transport). [`ThreadRing`] runs all ranks as threads of
//! one process, [`ShardRing`] one rank with its shard where the others are elsewhere. There is no attention in this crate, and no decision about what is computed.
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
mod perform;
pub mod rank;
pub mod resize;
pub mod sequence;
pub mod shard_ring;
pub mod sharded;
pub mod survive;
pub mod tensor_pool;
pub mod thread_ring;
pub mod threads;
pub mod trace;

pub use cache::{CacheLimits, CacheStats};
pub use call::{Given, Outcome};
pub use envelope::Envelope;
pub use error::{RankError, RingError};
pub use fault_injector::{Fault, Phase};
pub use ledger::Ledger;
pub use memory::RankMemory;
pub use rank::Rank;
pub use resize::Resized;
pub use sequence::{gather_sequence, split_sequence};
pub use shard_ring::ShardRing;
pub use sharded::Sharded;
pub use thread_ring::ThreadRing;
pub use trace::{Activity, Event, Trace};
