//! One rank's part of one call, where the other ranks are elsewhere: in other processes, on other
//! machines, or not running at the same time.
//!
//! This is the only driver of a single rank. It does not know where rows come from
//! ([`ShardInput`]: tensors of the caller, a GPU's memory, files), where they go ([`ShardOutput`]),
//! or how messages travel ([`Transport`]).
//!
//! The decision here: each step is a method. Processes can then agree, between the steps, that all
//! of them have loaded their inputs or stored their outputs, before any of them waits for another.

use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use encke_core::kernel::Kernel;
use encke_core::plan::membership::Epoch;
use encke_core::plan::{Plan, Request};
use encke_core::transport::{Moved, Survivors, Transport};

use crate::error::{RankError, RingError, catch_panic};
use crate::memory::{self, RankMemory};
use crate::rank::{BorrowedInputs, Rank};
use crate::survival::run_surviving;
use crate::trace::{Activity, Event, Recorder};

/// Where a rank's inputs come from. `'a` is how long inputs that are read in place stay borrowed.
pub trait ShardInput<'a, K: Kernel> {
    /// Why the inputs could not be loaded.
    type Error: From<RingError>;

    /// Allocates the rank's buffers and fills those of its inputs, except the inputs that the rank
    /// reads in place, which it returns.
    fn load(
        &mut self,
        kernel: &K,
        request: &Request,
        rank: &mut Rank<K>,
    ) -> Result<BorrowedInputs<'a>, Self::Error>;
}

/// Where a rank's outputs go.
pub trait ShardOutput<K: Kernel> {
    /// Why the outputs could not be stored.
    type Error: From<RingError> + Display;

    /// Stores the outputs of a rank that has finished. After a death, the outputs include those of
    /// the shards that the rank has adopted, and it may be called again.
    fn store(&mut self, kernel: &K, request: &Request, rank: &Rank<K>) -> Result<(), Self::Error>;
}

/// What one rank did in one call.
#[derive(Debug)]
pub struct RankReport {
    /// The rank.
    pub rank: usize,
    /// (query, key) pairs it computed.
    pub pairs: u128,
    /// Its memory, planned and measured.
    pub memory: RankMemory,
    /// What it did, with times counted from the start of the call.
    pub events: Vec<Event>,
    /// Time from the start of the call to this report.
    pub elapsed: Duration,
}

/// One rank in one call: `load`, then `run` and `store` (or `run_surviving`), then `finish`.
pub struct ShardCall<'a, K: Kernel> {
    kernel: &'a K,
    plan: &'a Plan,
    rank: Rank<K>,
    inputs: BorrowedInputs<'a>,
    recorder: Recorder,
    started: Instant,
}

impl<'a, K: Kernel> ShardCall<'a, K> {
    /// The call of rank `number`. Nothing is allocated until [`ShardCall::load`].
    pub fn new(kernel: &'a K, plan: &'a Plan, number: usize) -> Result<Self, RingError> {
        Ok(ShardCall::on_rank(
            kernel,
            plan,
            Rank::idle(plan.rank(number)?),
        ))
    }

    /// The call of a rank that may have buffers already.
    pub fn on_rank(kernel: &'a K, plan: &'a Plan, rank: Rank<K>) -> ShardCall<'a, K> {
        let started = Instant::now();
        ShardCall {
            kernel,
            plan,
            recorder: Recorder::new(rank.plan().rank, started),
            rank,
            inputs: BorrowedInputs::default(),
            started,
        }
    }

    /// Allocates the rank's buffers and loads its inputs. Waits for no other rank.
    pub fn load<I: ShardInput<'a, K>>(&mut self, input: &mut I) -> Result<(), I::Error> {
        let start = Instant::now();
        let (kernel, request) = (self.kernel, self.plan.request());
        let loaded = catch_panic(|| Ok(input.load(kernel, request, &mut self.rank)));
        let number = self.rank.plan().rank;
        self.inputs = loaded.map_err(|source| RingError::of_rank(number, source))??;
        let recorder = &mut self.recorder;
        recorder.record(0, Activity::Load, start, Moved::default());
        Ok(())
    }

    /// Restarts the clock of the report, for instance when all ranks have loaded.
    pub fn restart_clock(&mut self) {
        self.started = Instant::now();
        self.recorder = Recorder::new(self.rank.plan().rank, self.started);
    }

    /// Runs the rank's program.
    pub fn run(&mut self, transport: &mut dyn Transport<K::Buffer>) -> Result<(), RankError> {
        let (rank, recorder) = (&mut self.rank, &mut self.recorder);
        catch_panic(|| rank.run_on(self.kernel, &self.inputs, transport, recorder))
    }

    /// Runs the rank's program, survives the deaths of other ranks, and stores the outputs. A rank
    /// stores before it tells the others that it has finished, so that a rank that dies before it
    /// has stored counts as unfinished.
    pub fn run_surviving<O: ShardOutput<K>>(
        &mut self,
        transport: &mut dyn Survivors<K::Buffer>,
        output: &mut O,
    ) -> Result<(), RankError> {
        let (kernel, request) = (self.kernel, self.plan.request());
        let mut epoch = Epoch::first(&Arc::new(self.plan.clone()));
        let inputs = std::mem::take(&mut self.inputs);
        let mut store = |rank: &Rank<K>| {
            let stored = output.store(kernel, request, rank);
            stored.map_err(|error| RankError::Deliver {
                reason: error.to_string(),
            })
        };
        let (rank, recorder) = (&mut self.rank, &mut self.recorder);
        catch_panic(|| {
            let epoch = &mut epoch;
            run_surviving(kernel, rank, epoch, inputs, transport, recorder, &mut store)
        })
    }

    /// Stores the outputs after [`ShardCall::run`].
    pub fn store<O: ShardOutput<K>>(&mut self, output: &mut O) -> Result<(), O::Error> {
        output.store(self.kernel, self.plan.request(), &self.rank)
    }

    /// The rank.
    pub fn rank(&self) -> &Rank<K> {
        &self.rank
    }

    /// Frees the rank's buffers and reports what it did.
    pub fn finish(self) -> RankReport {
        self.into_parts().1
    }

    /// The rank with its buffers, and what it did.
    pub fn into_parts(self) -> (Rank<K>, RankReport) {
        let rank = self.rank;
        let ranks = std::slice::from_ref(&rank);
        let memory = memory::of_ranks(self.kernel, ranks, self.plan.request());
        let memory = memory.into_iter().next();
        let report = RankReport {
            rank: rank.plan().rank,
            pairs: rank.pairs(),
            memory: memory.expect("one rank has one report"),
            events: self.recorder.finish(),
            elapsed: self.started.elapsed(),
        };
        (rank, report)
    }
}
