//! How a rank and a call can fail, and which rank the error names.

use std::panic::{AssertUnwindSafe, catch_unwind};

use encke_core::kernel::KernelError;
use encke_core::sharding::Sharding;
use encke_core::transport::TransportError;

use crate::sequence::RowPositions;

/// How one rank failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RankError {
    /// Its kernel failed.
    #[error("in round {round}: {source}")]
    Kernel {
        /// The round; 0 also stands for the time before the first round.
        round: usize,
        /// The kernel's error.
        source: KernelError,
    },
    /// An exchange failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// Its process or its machine ended without a message.
    #[error("rank {rank} died in round {round}; start it again, or the call without it")]
    Died {
        /// The rank.
        rank: usize,
        /// The round it did not begin.
        round: usize,
    },
    /// The tokens of a dead rank are lost, so the surviving ranks cannot finish.
    #[error(transparent)]
    Lost(encke_core::Error),
    /// Its outputs could not be stored.
    #[error("{reason}")]
    Deliver {
        /// Why.
        reason: String,
    },
    /// It panicked: a bug, which fails the call but does not hang it.
    #[error("panicked: {message}")]
    Panic {
        /// The panic's message.
        message: String,
    },
}

impl RankError {
    /// A kernel error before the first round.
    pub fn before_start(source: KernelError) -> RankError {
        RankError::Kernel { round: 0, source }
    }

    /// True if this rank stopped only because another one did.
    pub fn is_consequence(&self) -> bool {
        matches!(
            self,
            RankError::Transport(TransportError::PeerFailed { .. } | TransportError::Gone { .. })
        )
    }

    /// True if the rank died: other ranks can adopt its tokens.
    pub fn is_death(&self) -> bool {
        matches!(self, RankError::Died { .. } | RankError::Panic { .. })
    }

    /// True if the error ends the call and the other ranks must be notified. A death can be
    /// survived, and every survivor detects a lost shard by itself.
    pub fn ends_call(&self) -> bool {
        !self.is_consequence() && !self.is_death() && !matches!(self, RankError::Lost(_))
    }
}

/// Runs a rank's work; a panic in it becomes [`RankError::Panic`].
pub fn catch_panic<R>(work: impl FnOnce() -> Result<R, RankError>) -> Result<R, RankError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_string());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        let message = text.unwrap_or_else(|| "no message".to_string());
        Err(RankError::Panic { message })
    })
}

/// How a call can fail.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RingError {
    /// The request was refused before any work started.
    #[error(transparent)]
    Request(#[from] encke_core::Error),
    /// An input is missing from the call.
    #[error("the call needs {role:?} and was not given it")]
    MissingInput {
        /// Which tensor.
        role: encke_core::plan::program::Role,
    },
    /// A tensor has another sharding than the ring.
    #[error(
        "{tensor} lies in the shards of {} ranks ({:?}), the ring has {} ({:?}); resize it first",
        got.ranks(), got.cut(), expected.ranks(), expected.cut()
    )]
    Sharding {
        /// The tensor's name.
        tensor: &'static str,
        /// The tensor's sharding.
        got: Sharding,
        /// The ring's sharding.
        expected: Sharding,
    },
    /// The queries of a tensor in shards stand at other positions than those of the call.
    #[error(
        "{tensor} has its rows {got}, the call {expected}; shard queries with the offset and the \
         number of keys of the call"
    )]
    Positions {
        /// The tensor's name.
        tensor: &'static str,
        /// The tensor's positions.
        got: RowPositions,
        /// The positions of the call.
        expected: RowPositions,
    },
    /// Replicated queries cannot be given as shards.
    #[error(
        "every rank would hold all queries, and these lie in shards; use sharded queries, or give \
         whole tensors"
    )]
    ReplicatedShards,
    /// A setting that was left open could not be chosen.
    #[error("{reason}")]
    Undecided {
        /// Why not.
        reason: String,
    },
    /// A checkpoint could not be offloaded to a file, or read back.
    #[error(
        "the checkpoint could not be written to, or read from, a temporary file: {reason}; make \
         room there, or let TMPDIR name another folder"
    )]
    Offload {
        /// The error of the operating system.
        reason: String,
    },
    /// The process cannot compute: it has no threads to do so.
    #[error(transparent)]
    Pool(#[from] encke_pool::PoolError),
    /// A thread could not be started.
    #[error("the thread of rank {rank} could not be started: {reason}; use fewer ranks")]
    Thread {
        /// The rank.
        rank: usize,
        /// The error of the operating system.
        reason: String,
    },
    /// A feature that needs all ranks of a call in one process.
    #[error("{what} is not supported where the other ranks are elsewhere; {hint}")]
    Elsewhere {
        /// What was asked for.
        what: &'static str,
        /// What to do instead.
        hint: &'static str,
    },
    /// The requested kernel is not available here.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A rank failed, and with it the call.
    #[error("rank {rank} failed: {source}")]
    Rank {
        /// The rank that failed first.
        rank: usize,
        /// How.
        source: RankError,
        /// How every other rank failed that did not finish.
        others: Vec<(usize, RankError)>,
    },
}

impl RingError {
    /// The failure of one rank, where nothing is known of the others.
    pub fn of_rank(rank: usize, source: RankError) -> RingError {
        RingError::Rank {
            rank,
            source,
            others: Vec::new(),
        }
    }
}
