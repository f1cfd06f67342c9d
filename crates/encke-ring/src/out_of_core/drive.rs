//! Ranks one after another, each in the memory of the one before.

use std::time::{Duration, Instant};

use crate::memory::planned;
use crate::trace::{Activity, Event, Recorder};
use crate::{Rank, RankError, RankMemory};
use encke_core::kernel::Kernel;
use encke_core::plan::program::Component;
use encke_core::plan::rings::Rotating;
use encke_core::plan::{Pass, Plan, Queries, Request};
use encke_core::transport::Moved;

use super::row_io::{HostRowIo, RowIo};
use super::staging::StagingBuffer;
use super::{GradientFile, Sink, Source, StreamError, Streamed, rows};

/// What one rank did.
#[derive(Debug)]
pub struct RankDone {
    /// The rank.
    pub rank: usize,
    /// (query, key) pairs it computed.
    pub pairs: u128,
    /// What it held.
    pub memory: RankMemory,
    /// What it did when, counted from its own beginning.
    pub events: Vec<Event>,
    /// How long it lived.
    pub took: Duration,
}

/// A plan that is carried out one rank at a time.
pub struct Stream<'a, K: Kernel> {
    kernel: &'a K,
    plan: &'a Plan,
    desk: StagingBuffer<'a, K>,
    /// The rank before, whose memory the next one takes.
    before: Option<Rank<K>>,
}

/// Refuses what ranks cannot do alone.
pub(super) fn check(request: &Request) -> Result<(), StreamError> {
    if request.redundancy > 0 {
        return Err(StreamError::Unsupported {
            what: "a call with redundancy",
            hint: "ranks that come one after another cannot adopt each other's tokens; use 0",
        });
    }
    if request.queries == Queries::Replicated && request.sharding.ranks() > 1 {
        return Err(StreamError::Unsupported {
            what: "a call whose queries are replicated",
            hint: "its memory does not shrink with the number of ranks; shard the queries",
        });
    }
    let alone = request.sharding.ranks() == 1 || request.pass == Pass::Forward;
    if request.schedule.backward == Rotating::Queries && !alone {
        return Err(StreamError::Unsupported {
            what: "a backward pass whose queries travel",
            hint: "what is made of dout on the way is in no file; let keys travel",
        });
    }
    check_slots(request)
}

/// Refuses patterns whose branches are combined by whoever has all rows.
pub(super) fn check_slots(request: &Request) -> Result<(), StreamError> {
    if request.pattern.splits_slots() {
        return Err(StreamError::Unsupported {
            what: "a pattern whose branches are combined after the last rank (fkodom, detached \
                   mixing gradients)",
            hint: "use group mode, or mix mode with exact gradients",
        });
    }
    Ok(())
}

impl<'a, K: Kernel> Stream<'a, K> {
    /// Takes a plan that can be carried out so.
    pub fn new(kernel: &'a K, plan: &'a Plan) -> Result<Stream<'a, K>, StreamError> {
        check(plan.request())?;
        Ok(Stream {
            kernel,
            plan,
            desk: StagingBuffer::new(kernel),
            before: None,
        })
    }

    /// The whole life of one rank, whose rows come from the host and go to it. Ranks may come in any
    /// order and need not all come; a backward pass needs all of them, and a spool for the gradients
    /// of keys and values.
    pub fn rank(
        &mut self,
        number: usize,
        source: &dyn Source,
        sink: &mut dyn Sink,
        spool: Option<&mut GradientFile>,
    ) -> Result<RankDone, StreamError> {
        self.desk.rank = number;
        let mut dock = HostRowIo {
            desk: &mut self.desk,
            source,
            sink,
            spool,
        };
        live(self.kernel, self.plan, &mut self.before, number, &mut dock)
    }

    /// The same with rows that come and go by way of a dock.
    pub fn rank_at(
        &mut self,
        number: usize,
        dock: &mut dyn RowIo<K>,
    ) -> Result<RankDone, StreamError> {
        live(self.kernel, self.plan, &mut self.before, number, dock)
    }
}

/// The whole life of one rank, in the memory of the one before.
fn live<K: Kernel>(
    kernel: &K,
    plan: &Plan,
    before: &mut Option<Rank<K>>,
    number: usize,
    dock: &mut dyn RowIo<K>,
) -> Result<RankDone, StreamError> {
    let begin = Instant::now();
    let request = plan.request();
    let program = plan.rank(number)?;
    let planned = planned(kernel, &program, 1, request);
    // The rank before may have needed more.
    kernel.release_scratch();
    let pairs = program.pairs();
    let failed = |source: RankError| StreamError::Rank {
        rank: number,
        source,
    };
    let made = match before.take() {
        Some(before) => before.reuse_for(kernel, program),
        None => Rank::new(kernel, program),
    };
    let mut rank = made.map_err(|source| failed(RankError::Kernel { round: 0, source }))?;
    let mut recorder = Recorder::new(number, begin);
    let loading = Instant::now();
    for port in rank.plan().inputs.clone() {
        rows::load(&mut rank, &port, &request.shape, dock)?;
    }
    recorder.note(0, Activity::Load, loading, Moved::default());
    let mut streamed = Streamed::new(kernel, request, rank.plan(), dock);
    if let Err(error) = rank.run(kernel, &mut streamed, &mut recorder) {
        return Err(streamed.failure().unwrap_or_else(|| failed(error)));
    }
    for port in &rank.plan().outputs {
        rows::store(&rank, port, request, dock)?;
    }
    let scratch = kernel.scratch_bytes();
    let last = rank.plan().rounds.len();
    rank.ledger_mut().hold(last, Component::Workspace, scratch);
    let memory = RankMemory {
        rank: number,
        planned,
        lent_bytes: 0,
        allocated_bytes: rank.allocated_bytes(),
        ledger: rank.ledger().clone(),
    };
    *before = Some(rank);
    Ok(RankDone {
        rank: number,
        pairs,
        memory,
        events: recorder.finish(),
        took: begin.elapsed(),
    })
}
