//! A call with injected faults: all ranks on one thread, in virtual time, over a faulty network.
//!
//! The ranks are those of a ring of threads, and messages pass the checks of a network transport
//! ([`PostedReceive`](encke_ring::envelope::PostedReceive)). A run shows that a call returns the
//! right result, or that every rank ends with a typed error inside its deadline.
//!
//! The protocol is minimal. Messages are checked and never retransmitted; a rank waits for its
//! receives until its deadline and then fails; it does not notify the others, since the network
//! that would carry the notification is what failed. The caller closes the call: if a rank has
//! failed, the ranks that had finished get an error there, because a result with a missing part is
//! invalid. Where deaths are survived, the survivors agree and continue as threads do
//! (`recovery.rs`).
//!
//! Every run terminates: each round of a rank causes at most two events, each message at most two,
//! and nothing else causes any; the event loop asserts this bound.

use std::sync::Arc;
use std::time::{Duration, Instant};

use encke_core::Data;
use encke_core::kernel::Kernel;
use encke_core::plan::Plan;
use encke_core::plan::program::Role;
use encke_core::tensor::View;
use encke_core::transport::{Moved, TransportError, WireBuffer};
use encke_cost::EventQueue;
use encke_ring::call::{self, check_inputs, new_rank};
use encke_ring::error::catch_panic;
use encke_ring::rank::BorrowedInputs;
use encke_ring::rank_threads::join_results;
use encke_ring::trace::Recorder;
use encke_ring::{Outcome, RankError, RingError};

use crate::fault_config::{FaultConfig, FaultKind, RankDeath};
use crate::inbox::receive_arrived;
use crate::lockstep;
use crate::membership::SimulatedMembership;
use crate::network::{InjectedFault, Packet, SimulatedNetwork};
pub use crate::simulated_ring::RankEnd;
use crate::simulated_ring::{RingEvent, SimulatedRank, SimulatedRing};

/// The result of a call with injected faults.
#[derive(Debug)]
pub struct FaultRun {
    /// The outputs, or the error of every rank.
    pub result: Result<Outcome, RingError>,
    /// When and in which round each rank ended, before the call was closed.
    pub ends: Vec<RankEnd>,
    /// The injected faults, in order.
    pub faults: Vec<InjectedFault>,
    /// The number of events.
    pub events: usize,
    /// The rounds of the longest program of each epoch: one epoch, unless deaths were survived.
    pub epochs: Vec<usize>,
}

/// Executes a plan on whole tensors with injected faults. An error means that the call could not
/// begin; how it ended is in the [`FaultRun`].
pub fn run<K: Kernel<Buffer = Data>>(
    kernel: &K,
    plan: &Arc<Plan>,
    inputs: &[(Role, View<'_>)],
    config: &FaultConfig,
) -> Result<FaultRun, RingError> {
    check_inputs(plan, inputs)?;
    let mut ring = SimulatedRing {
        kernel,
        config,
        network: SimulatedNetwork::new(config),
        ranks: Vec::with_capacity(plan.ranks()),
        membership: SimulatedMembership::new(plan),
        queue: EventQueue::default(),
        max_events: 0,
        first_failed: None,
    };
    let origin = Instant::now();
    for number in 0..plan.ranks() {
        let mut rank = new_rank(kernel, plan, number)?;
        let mut recorder = Recorder::new(number, origin);
        call::load_inputs(kernel, &mut rank, inputs, &mut recorder).map_err(|source| {
            RingError::Rank {
                rank: number,
                source,
                others: Vec::new(),
            }
        })?;
        ring.ranks.push(SimulatedRank::new(rank, recorder));
    }
    let events = ring.run_events();
    ring.close(plan, events)
}

impl<K: Kernel<Buffer = Data>> SimulatedRing<'_, K> {
    /// Runs until no event is left; returns the number of events.
    fn run_events(&mut self) -> usize {
        self.begin_epoch();
        for rank in 0..self.ranks.len() {
            self.begin_round(rank, Duration::ZERO);
        }
        let mut events = 0;
        while let Some((now, event)) = self.queue.pop() {
            events += 1;
            let most = self.max_events;
            assert!(events <= most, "a run has at most {most} events");
            match event {
                RingEvent::Computed(rank) => self.wait(rank, now),
                RingEvent::Arrival(packet) => {
                    let rank = packet.to;
                    self.ranks[rank].inbox.push(packet);
                    self.receive(rank, now);
                }
                RingEvent::Deadline { rank, epoch, round } => {
                    self.expire(rank, (epoch, round), now);
                }
                RingEvent::Away { rank, epoch } => self.announce_away(rank, epoch, now),
            }
        }
        events
    }

    /// Ends a rank, with an error or finished.
    pub(crate) fn end(&mut self, rank: usize, now: Duration, error: Option<RankError>) {
        if error.is_some() {
            self.first_failed.get_or_insert(rank);
        }
        let died = error.as_ref().is_some_and(RankError::is_death);
        let to_blame = error.as_ref().is_some_and(RankError::ends_call);
        let state = &mut self.ranks[rank];
        state.waiting = None;
        state.end = Some(RankEnd {
            rank,
            at: now,
            round: state.round,
            error,
        });
        if died {
            self.leave(rank, now);
        } else if to_blame {
            self.abort(now);
        }
    }

    /// Begins the next round of a rank, unless it has finished or dies.
    pub(crate) fn begin_round(&mut self, rank: usize, now: Duration) {
        let round = self.ranks[rank].round;
        if round == self.ranks[rank].rounds() {
            return match self.membership.survives() {
                true => self.come_to_agree(rank, true, now),
                false => self.end(rank, now, None),
            };
        }
        let epoch = self.membership.epoch.number();
        let death = RankDeath { rank, epoch, round };
        if self.config.deaths.contains(&death) {
            return self.die(rank, round, now);
        }
        if let Err(error) = self.compute(rank, round, now) {
            return self.end(rank, now, Some(error));
        }
        let compute = self.config.compute_on(rank);
        if round == 0 && compute != self.config.compute {
            self.record_fault(FaultKind::Slowness, rank, round);
        }
        self.queue.push(now + compute, RingEvent::Computed(rank));
    }

    /// Kills a rank.
    pub(crate) fn die(&mut self, rank: usize, round: usize, now: Duration) {
        self.record_fault(FaultKind::Death, rank, round);
        self.end(rank, now, Some(RankError::Died { rank, round }));
    }

    fn record_fault(&mut self, kind: FaultKind, rank: usize, round: usize) {
        self.network.faults.push(InjectedFault {
            kind,
            rank,
            to: None,
            round,
        });
    }

    /// Prepares, computes and sends. Jobs do not write what is sent, so sending after them is
    /// equivalent.
    fn compute(&mut self, rank: usize, round: usize, now: Duration) -> Result<(), RankError> {
        let (kernel, epoch) = (self.kernel, self.membership.epoch.number());
        let SimulatedRank {
            rank: of,
            recorder,
            moved,
            ..
        } = &mut self.ranks[rank];
        catch_panic(|| {
            of.prepare(kernel, &BorrowedInputs::default(), round, recorder)?;
            of.compute(kernel, &BorrowedInputs::default(), round, recorder)
        })?;
        *moved = Moved::default();
        let mut packets = Vec::new();
        for message in &of.plan().rounds[round].sends {
            let parcel = of.buffer(message.buffer);
            let packet = Packet::new(rank, epoch, round, message.address, parcel);
            packets.push(packet.map_err(|source| RankError::Kernel { round, source })?);
            moved.sent_bytes += message.address.elements * parcel.element_bytes();
        }
        for packet in packets {
            for (time, packet) in self.network.send(now, round, packet) {
                self.queue.push(time, RingEvent::Arrival(packet));
            }
        }
        Ok(())
    }

    /// Waits for the receives of a round, until the deadline.
    fn wait(&mut self, rank: usize, now: Duration) {
        let state = &mut self.ranks[rank];
        let round = state.round;
        state
            .missing
            .clone_from(&state.rank.plan().rounds[round].receives);
        state.waiting = Some(now);
        self.receive(rank, now);
        let state = &self.ranks[rank];
        if state.round == round && state.waiting.is_some() {
            let epoch = self.membership.epoch.number();
            let deadline = RingEvent::Deadline { rank, epoch, round };
            self.queue.push(now + self.config.deadline, deadline);
            self.stop_if_stuck(rank, now);
        }
    }

    /// Receives what has arrived for a waiting rank; begins its next round if nothing is missing.
    fn receive(&mut self, rank: usize, now: Duration) {
        let (checks, epoch) = (self.config.checks, self.membership.epoch.number());
        let state = &mut self.ranks[rank];
        if state.waiting.is_none() {
            return;
        }
        if let Err(error) = receive_arrived(state, epoch, checks) {
            return self.end(rank, now, Some(error.into()));
        }
        if !state.missing.is_empty() {
            return;
        }
        let planned = state.rank.plan().moved(state.round);
        assert_eq!(state.moved, planned, "the bytes moved are those planned");
        state.waiting = None;
        state.round += 1;
        self.begin_round(rank, now);
    }

    /// Fails a rank that still waits at its deadline.
    fn expire(&mut self, rank: usize, (epoch, round): (usize, usize), now: Duration) {
        let state = &self.ranks[rank];
        let (Some(since), Some(missing)) = (state.waiting, state.missing.first()) else {
            return;
        };
        if (self.membership.epoch.number(), state.round) != (epoch, round) {
            return;
        }
        let error = TransportError::Deadline {
            rank,
            peer: missing.address.peer,
            round,
            waited: now - since,
            limit: self.config.deadline,
        };
        self.end(rank, now, Some(error.into()));
    }

    /// Closes the call: the outputs if every rank finished, otherwise an error for every rank.
    fn close(self, plan: &Arc<Plan>, events: usize) -> Result<FaultRun, RingError> {
        let first = self.first_failed;
        let ended = |rank: &SimulatedRank<K>| {
            let end = rank.end.clone();
            end.expect("when no event is left, all ranks have ended")
        };
        let ends: Vec<RankEnd> = self.ranks.iter().map(ended).collect();
        let survived = self.membership.survives() && self.membership.is_finished;
        let reason = first.and_then(|first| ends[first].error.clone());
        let (mut ranks, mut traces) = (Vec::new(), Vec::new());
        let (mut deaths, mut pairs) = (Vec::new(), 0);
        for (state, end) in self.ranks.into_iter().zip(&ends) {
            if let (true, Some(death)) = (survived, &end.error) {
                deaths.push((end.rank, death.clone()));
                pairs += state.rank.pairs();
                continue;
            }
            let error = end.error.clone().or_else(|| {
                if survived {
                    return None;
                }
                let (peer, reason) = (first?, reason.as_ref()?.to_string());
                let failed = TransportError::PeerFailed {
                    rank: end.rank,
                    peer,
                    round: end.round,
                    reason,
                };
                Some(failed.into())
            });
            traces.push(match error {
                None => Ok(state.recorder.finish()),
                Some(error) => Err(error),
            });
            ranks.push(state.rank);
        }
        let result = join_results(traces, first, false)
            .and_then(|joined| lockstep::conclude(self.kernel, plan, ranks, joined.events));
        let result = result.map(|mut outcome| {
            outcome.record_deaths(deaths, pairs);
            outcome
        });
        Ok(FaultRun {
            result,
            ends,
            faults: self.network.faults,
            events,
            epochs: self.membership.rounds,
        })
    }
}
