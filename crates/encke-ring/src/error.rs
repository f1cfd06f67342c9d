//! How a call can fail, and who is named when it does.

use encke_core::kernel::KernelError;
use encke_core::sharding::Sharding;
use encke_core::transport::TransportError;

/// How one rank failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RankError {
    /// Its kernel refused.
    #[error("in round {round}: {source}")]
    Kernel {
        /// The round; 0 also stands for the time before the first.
        round: usize,
        /// What the kernel said.
        source: KernelError,
    },
    /// An exchange failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// It was gone: its process or its machine ended, and it could not say so itself.
    #[error("rank {rank} died in round {round}; start it again, or the call without it")]
    Died {
        /// The rank.
        rank: usize,
        /// The round it did not begin.
        round: usize,
    },
    /// It lives, but the tokens of one that died are lost.
    #[error(transparent)]
    Lost(encke_core::Error),
    /// What it found out could not be put where it belongs.
    #[error("{reason}")]
    Deliver {
        /// Why.
        reason: String,
    },
    /// It panicked: a bug, but never a hang.
    #[error("panicked: {message}")]
    Panic {
        /// What the panic said.
        message: String,
    },
}

impl RankError {
    /// Whether this rank only stopped because another one did.
    pub fn is_consequence(&self) -> bool {
        matches!(
            self,
            RankError::Transport(TransportError::PeerFailed { .. } | TransportError::Gone { .. })
        )
    }

    /// Whether it is gone: others can adopt its tokens.
    pub fn is_death(&self) -> bool {
        matches!(self, RankError::Died { .. } | RankError::Panic { .. })
    }

    /// Whether it ends the call for everyone, who must be told: a death can be survived, and that
    /// a shard is lost all survivors find by themselves.
    pub fn is_to_blame(&self) -> bool {
        !self.is_consequence() && !self.is_death() && !matches!(self, RankError::Lost(_))
    }
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
    /// A tensor lies in other shards than the ring's.
    #[error(
        "{tensor} lies in the shards of {} ranks ({:?}), the ring has {} ({:?}); resize it first",
        got.ranks(), got.cut(), expected.ranks(), expected.cut()
    )]
    Sharding {
        /// The tensor's name.
        tensor: &'static str,
        /// How it lies.
        got: Sharding,
        /// How the ring would have it.
        expected: Sharding,
    },
    /// Replicated queries are no shards.
    #[error(
        "every rank would hold all queries, and these lie in shards; use sharded queries, or give \
         whole tensors"
    )]
    ReplicatedShards,
    /// A choice that was left open could not be made.
    #[error("{reason}")]
    Undecided {
        /// Why not.
        reason: String,
    },
    /// A checkpoint could not be put out of memory, or fetched back.
    #[error(
        "the checkpoint could not be written to, or read from, a temporary file: {reason}; make \
         room there, or let TMPDIR name another folder"
    )]
    Offload {
        /// What the system said.
        reason: String,
    },
    /// A thread could not be started.
    #[error("the thread of rank {rank} could not be started: {reason}; use fewer ranks")]
    Thread {
        /// The rank.
        rank: usize,
        /// What the system said.
        reason: String,
    },
    /// What needs all ranks of a call in one place.
    #[error("{what} is not supported where the other ranks are elsewhere; {hint}")]
    Elsewhere {
        /// What was asked for.
        what: &'static str,
        /// What to do instead.
        hint: &'static str,
    },
    /// The kernel that was asked for is not to be had here.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A rank failed and took the call with it.
    #[error("rank {rank} failed: {source}")]
    Rank {
        /// The rank that failed first.
        rank: usize,
        /// How.
        source: RankError,
        /// How every other rank ended that did not finish.
        others: Vec<(usize, RankError)>,
    },
}
