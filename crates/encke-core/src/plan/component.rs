//! Memory components: the names under which plans, ledgers and reports account for memory.
//!
//! The decision here: a buffer has one component for its whole life, so the bytes of all components
//! add up to the total, in a plan and in a ledger.

use serde::{Deserialize, Serialize};

/// What a buffer is for, as memory reports show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Component {
    /// q.
    Queries,
    /// The rank's own k and v.
    OwnKv,
    /// k and v of other ranks, rotating. In rounds of one distance the own parcel is packed into
    /// one of these buffers; in wider rounds it has a buffer of its own.
    TravellingKv,
    /// Queries of other ranks, with dout, lse and delta, rotating.
    TravellingQueries,
    /// acc, m and l of the rank's own queries.
    Carry,
    /// acc, m and l of other ranks' queries, being reduced.
    TravellingCarry,
    /// out and lse.
    Output,
    /// Inputs of the backward pass beside q, k and v: dout, dlse, and the delta computed from them.
    Upstream,
    /// dq, dk and dv in the accumulation type.
    Gradients,
    /// Gradients of other ranks, being reduced.
    TravellingGradients,
    /// Rows in an all-gather (replicated queries) or in an exchange of heads.
    Sharing,
    /// Inputs of another rank, held so that its tokens can be adopted when it dies.
    Replica,
    /// Rows of any tensor, resident or in flight, while a ring changes its size.
    Rows,
    /// Scratch memory of the kernel.
    Workspace,
}

impl Component {
    /// The name reports use.
    pub fn name(self) -> &'static str {
        match self {
            Component::Queries => "queries",
            Component::OwnKv => "own K/V",
            Component::TravellingKv => "travelling K/V",
            Component::TravellingQueries => "travelling queries",
            Component::Carry => "carry",
            Component::TravellingCarry => "travelling carry",
            Component::Output => "output",
            Component::Upstream => "upstream",
            Component::Gradients => "gradients",
            Component::TravellingGradients => "travelling gradients",
            Component::Sharing => "sharing",
            Component::Replica => "replica",
            Component::Rows => "rows",
            Component::Workspace => "workspace",
        }
    }

    /// Whether the buffer holds rows of its own shard for the whole program, rather than rows that
    /// change from round to round.
    pub fn is_resident(self) -> bool {
        match self {
            Component::Queries
            | Component::OwnKv
            | Component::Carry
            | Component::Output
            | Component::Upstream
            | Component::Gradients
            | Component::Replica => true,
            Component::TravellingKv
            | Component::TravellingQueries
            | Component::TravellingCarry
            | Component::TravellingGradients
            | Component::Sharing
            | Component::Rows
            | Component::Workspace => false,
        }
    }
}
