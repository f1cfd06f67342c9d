//! What memory is for: the names under which plans, ledgers and reports account for it.
//!
//! The decision here: a buffer has one purpose all its life, so that bytes by purpose add up to all
//! bytes, in a plan as in a ledger.

use serde::{Deserialize, Serialize};

/// What a buffer is for, as memory reports show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Component {
    /// q.
    Queries,
    /// The rank's own k and v.
    OwnKv,
    /// k and v of others, passing through. The own rows are packed where their journey begins, in
    /// one of these buffers, so packing takes no memory of its own.
    TravellingKv,
    /// Queries of others, with dout, lse and delta, passing through.
    TravellingQueries,
    /// acc, m and l of the rank's own queries.
    Carry,
    /// acc, m and l of others' queries, passing through.
    TravellingCarry,
    /// out and lse.
    Output,
    /// What backward is given beside q, k and v: dout, dlse, and delta made of them.
    Upstream,
    /// dq, dk and dv in the type sums are kept in.
    Gradients,
    /// Gradients of others, passing through.
    TravellingGradients,
    /// Finished rows on their way to every rank (queries replicated).
    Sharing,
    /// Inputs of another rank, kept so that its tokens can be adopted when it dies.
    Replica,
    /// Rows of any tensor, held or on their way, while a ring changes its size.
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

    /// Whether it stays at home: what it holds is of its shard's own rows, and of no round in
    /// particular.
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
