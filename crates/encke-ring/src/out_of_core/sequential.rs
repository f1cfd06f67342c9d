//! Ranks one after another, each in the memory of the one before.
//!
//! The decision here: a rank is the same [`ShardCall`] as anywhere else. Only its transport differs
//! ([`SourceTransport`]): it reads what other ranks would have sent.

use encke_core::kernel::Kernel;
use encke_core::plan::rings::Rotating;
use encke_core::plan::{Pass, Plan, Queries, Request};

use crate::error::RingError;
use crate::rank::Rank;
use crate::shard_call::{RankReport, ShardCall};

use super::error::StreamError;
use super::gradient_file::GradientFile;
use super::host_row_io::HostRowIo;
use super::row_io::RowIo;
use super::rows::{RankRows, check_slots};
use super::source::{TensorSink, TensorSource};
use super::source_transport::SourceTransport;
use super::staging::StagingBuffer;

/// Runs the ranks of a plan one at a time.
pub struct Stream<'a, K: Kernel> {
    kernel: &'a K,
    plan: &'a Plan,
    staging: StagingBuffer<'a, K>,
    /// The rank that ran last, whose memory the next one takes.
    previous: Option<Rank<K>>,
}

/// Refuses requests whose ranks depend on each other in a way that no source can stand in for.
pub(super) fn check(request: &Request) -> Result<(), StreamError> {
    if request.redundancy > 0 {
        return Err(StreamError::Unsupported {
            what: "a call with redundancy",
            hint: "ranks that run one after another cannot adopt each other's tokens; use 0",
        });
    }
    if request.queries == Queries::Replicated && request.sharding.ranks() > 1 {
        return Err(StreamError::Unsupported {
            what: "a call whose queries are replicated",
            hint: "its memory does not shrink with the number of ranks; shard the queries",
        });
    }
    if request.schedule.heads > 1 {
        return Err(StreamError::Unsupported {
            what: "a call whose ranks divide the heads",
            hint: "they exchange heads before they compute; let every rank have all heads",
        });
    }
    let alone = request.sharding.ranks() == 1 || request.pass == Pass::Forward;
    let invariant = !request.bits.is_planned();
    if request.schedule.backward == Rotating::Queries && !alone && !invariant {
        return Err(StreamError::Unsupported {
            what: "a backward pass whose queries rotate",
            hint: "what ranks make of dout on the way is in no file; let keys rotate",
        });
    }
    if request.schedule.backward == Rotating::Keys && !alone && invariant {
        return Err(StreamError::Unsupported {
            what: "a backward pass with invariant bits whose keys rotate",
            hint: "its sums of dk and dv travel from rank to rank; let queries rotate",
        });
    }
    check_slots(request)
}

impl<'a, K: Kernel> Stream<'a, K> {
    /// Refuses plans that cannot be computed one rank at a time.
    pub fn new(kernel: &'a K, plan: &'a Plan) -> Result<Stream<'a, K>, StreamError> {
        check(plan.request())?;
        Ok(Stream {
            kernel,
            plan,
            staging: StagingBuffer::new(kernel, 0),
            previous: None,
        })
    }

    /// Runs one rank on rows in host memory. Ranks may run in any order, and a forward pass may
    /// skip some; a backward pass needs all of them, and a file for the gradients of keys and
    /// values.
    pub fn rank(
        &mut self,
        number: usize,
        source: &dyn TensorSource,
        sink: &mut dyn TensorSink,
        gradients: Option<&mut GradientFile>,
    ) -> Result<RankReport, StreamError> {
        self.staging.rank = number;
        let mut io = HostRowIo {
            staging: &mut self.staging,
            source,
            sink,
            gradients,
        };
        run(self.kernel, self.plan, &mut self.previous, number, &mut io)
    }

    /// Runs one rank on rows that a [`RowIo`] moves.
    pub fn rank_at(
        &mut self,
        number: usize,
        io: &mut dyn RowIo<K>,
    ) -> Result<RankReport, StreamError> {
        run(self.kernel, self.plan, &mut self.previous, number, io)
    }
}

/// Runs one rank in the memory of the previous one.
fn run<K: Kernel>(
    kernel: &K,
    plan: &Plan,
    previous: &mut Option<Rank<K>>,
    number: usize,
    io: &mut dyn RowIo<K>,
) -> Result<RankReport, StreamError> {
    encke_pool::check().map_err(RingError::Pool)?;
    let program = plan.rank(number)?;
    // The previous rank may have needed more than this one.
    kernel.release_scratch();
    let rank = match previous.take() {
        Some(previous) => previous.reuse_for(program),
        None => Rank::idle(program),
    };
    let mut call = ShardCall::on_rank(kernel, plan, rank);
    call.load(&mut RankRows(io))?;
    let mut transport = SourceTransport::new(kernel, plan.request(), call.rank().plan(), io);
    if let Err(error) = call.run(&mut transport) {
        let failed = || RingError::of_rank(number, error).into();
        return Err(transport.failure().unwrap_or_else(failed));
    }
    call.store(&mut RankRows(io))?;
    let (rank, report) = call.into_parts();
    *previous = Some(rank);
    Ok(report)
}
