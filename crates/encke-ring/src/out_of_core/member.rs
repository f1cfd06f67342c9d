//! One rank of a ring whose other ranks are elsewhere: its rows come from a source and go to a sink,
//! and what it receives comes over a transport.
//!
//! The steps are apart so that whoever drives it can ask the other ranks in between, before anyone
//! waits for anyone.

use std::sync::Arc;
use std::time::Instant;

use crate::call::guarded;
use crate::memory::planned;
use crate::rank::BorrowedInputs;
use crate::survive::survive;
use crate::trace::{Activity, Recorder};
use crate::{Rank, RankError, RankMemory};
use encke_core::kernel::Kernel;
use encke_core::plan::Plan;
use encke_core::plan::membership::Epoch;
use encke_core::plan::program::Component;
use encke_core::transport::{Moved, Survivors, Transport};

use super::drive::check_slots;
use super::row_io::{HostRowIo, NoIo};
use super::staging::StagingBuffer;
use super::{RankDone, Sink, Source, StreamError, rows};

/// One rank, from its first buffer to its last.
pub struct Member<'a, K: Kernel> {
    kernel: &'a K,
    plan: &'a Arc<Plan>,
    desk: StagingBuffer<'a, K>,
    rank: Rank<K>,
    recorder: Recorder,
    began: Instant,
}

impl<'a, K: Kernel> Member<'a, K> {
    /// A rank with all its buffers.
    pub fn new(
        kernel: &'a K,
        plan: &'a Arc<Plan>,
        number: usize,
    ) -> Result<Member<'a, K>, StreamError> {
        check_slots(plan.request())?;
        let began = Instant::now();
        let made = Rank::new(kernel, plan.rank(number)?);
        let rank = made.map_err(|source| StreamError::Rank {
            rank: number,
            source: RankError::Kernel { round: 0, source },
        })?;
        let mut desk = StagingBuffer::new(kernel);
        desk.rank = number;
        Ok(Member {
            kernel,
            plan,
            desk,
            rank,
            recorder: Recorder::new(number, began),
            began,
        })
    }

    /// Reads its rows.
    pub fn load(&mut self, source: &dyn Source) -> Result<(), StreamError> {
        let loading = Instant::now();
        let mut dock = HostRowIo {
            desk: &mut self.desk,
            source,
            sink: &mut NoIo,
            spool: None,
        };
        for port in self.rank.plan().inputs.clone() {
            let shape = &self.plan.request().shape;
            rows::load(&mut self.rank, &port, shape, &mut dock)?;
        }
        self.desk.clear();
        let recorder = &mut self.recorder;
        recorder.note(0, Activity::Load, loading, Moved::default());
        Ok(())
    }

    /// Counts times from now: all ranks are ready.
    pub fn start(&mut self) {
        self.began = Instant::now();
        self.recorder = Recorder::new(self.rank.plan().rank, self.began);
    }

    /// Carries out its program.
    pub fn run(&mut self, transport: &mut dyn Transport<K::Buffer>) -> Result<(), RankError> {
        guarded(|| self.rank.run(self.kernel, transport, &mut self.recorder))
    }

    /// Carries out its part of a call that survives deaths, and writes its rows, and those of the
    /// dead that became its own, when they are finished.
    pub fn survive(
        &mut self,
        transport: &mut dyn Survivors<K::Buffer>,
        sink: &mut dyn Sink,
    ) -> Result<(), RankError> {
        let Member {
            kernel,
            plan,
            desk,
            rank,
            recorder,
            ..
        } = self;
        let kernel: &K = kernel;
        let mut epoch = Epoch::first(plan);
        let mut dock = HostRowIo {
            desk,
            source: &NoIo,
            sink,
            spool: None,
        };
        let mut deliver = |rank: &Rank<K>| {
            let mut ports = rank.plan().outputs.iter();
            let stored =
                ports.try_for_each(|port| rows::store(rank, port, plan.request(), &mut dock));
            let reason = |error: StreamError| RankError::Deliver {
                reason: error.to_string(),
            };
            stored.map_err(reason)
        };
        guarded(|| {
            let loans = BorrowedInputs::default();
            let epoch = &mut epoch;
            survive(
                kernel,
                rank,
                epoch,
                loans,
                transport,
                recorder,
                &mut deliver,
            )
        })
    }

    /// Writes its rows.
    pub fn store(&mut self, sink: &mut dyn Sink) -> Result<(), StreamError> {
        let mut dock = HostRowIo {
            desk: &mut self.desk,
            source: &NoIo,
            sink,
            spool: None,
        };
        for port in &self.rank.plan().outputs {
            rows::store(&self.rank, port, self.plan.request(), &mut dock)?;
        }
        Ok(())
    }

    /// The rank, for whoever wants to look at its buffers.
    pub fn rank(&self) -> &Rank<K> {
        &self.rank
    }

    /// Ends its life, and says what it did.
    pub fn finish(self) -> RankDone {
        let Member {
            kernel,
            plan,
            mut rank,
            recorder,
            began,
            ..
        } = self;
        let (number, last) = (rank.plan().rank, rank.plan().rounds.len());
        let scratch = kernel.scratch_bytes();
        rank.ledger_mut().hold(last, Component::Workspace, scratch);
        let memory = RankMemory {
            rank: number,
            planned: planned(kernel, rank.plan(), 1, plan.request()),
            lent_bytes: 0,
            allocated_bytes: rank.allocated_bytes(),
            ledger: rank.ledger().clone(),
        };
        RankDone {
            rank: number,
            pairs: rank.plan().pairs(),
            memory,
            events: recorder.finish(),
            took: began.elapsed(),
        }
    }
}
