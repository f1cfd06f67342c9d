//! The plan: which rank computes what, sends what to which rank, in which order, and how many bytes
//! of memory and traffic that takes.
//!
//! A pure function of the [`Request`], identical on every rank. [`Plan::new`] finds the rings,
//! [`Plan::rank`] resolves one rank into a program. Nothing here grows with the number of tokens: a
//! plan for a billion tokens takes as long as one for a thousand.

mod adoption;
mod all_gather;
mod assignment;
mod backward;
pub mod balance;
mod batches;
mod builder;
mod component;
mod direct;
pub mod explain;
mod forward;
mod fuse_softmax;
mod head_shares;
mod jobs;
mod join_heads;
mod layout;
pub mod membership;
pub mod nodes;
mod packed;
mod pieces;
mod position;
pub mod program;
pub mod progress;
mod reduce;
mod request;
pub mod resize;
pub mod rings;
mod rotation;
mod schedule;
mod sparse;
mod tile_gradients;
mod tile_order;
mod topology;
mod traffic;
mod two_level;
mod width;
mod work;

use std::sync::{Arc, OnceLock};

use crate::error::{Error, Result};
use program::RankPlan;
pub use request::{Pass, Queries, Request};
pub use schedule::Schedule;
pub use topology::{Plan, Topology};

impl Plan {
    /// The program of one rank.
    pub fn rank(&self, rank: usize) -> Result<RankPlan> {
        if rank >= self.ranks() {
            return Err(Error::NoSuchRank {
                rank,
                ranks: self.ranks(),
            });
        }
        if !self.shares.is_empty() {
            return head_shares::program(self, rank);
        }
        if self.request.bits.tile().is_some() {
            return Ok(tile_order::program(self, rank, true));
        }
        Ok(match self.request.pass {
            Pass::Forward if self.request.jobs_write_output() => {
                fuse_softmax::fuse(forward::program(self, rank), self.is_resumable())
            }
            Pass::Forward => forward::program(self, rank),
            Pass::Backward { dlse } => backward::program(self, rank, dlse),
            Pass::BackwardByBranch => backward::program(self, rank, false),
        })
    }

    /// The same, made once and kept with the plan.
    pub fn program(&self, rank: usize) -> Result<Arc<RankPlan>> {
        if let Some(made) = self.programs.get(rank).and_then(OnceLock::get) {
            let mut made = Arc::clone(made);
            if let Some(dropout) = self.request.dropout {
                Arc::make_mut(&mut made).set_seed(dropout.seed());
            }
            return Ok(made);
        }
        let made = Arc::new(self.rank(rank)?);
        Ok(Arc::clone(self.programs[rank].get_or_init(|| made)))
    }
}
