//! The discrete-event simulation: ranks go through their rounds, events happen in order of time.
//!
//! In each round a rank prepares, posts its transfers, computes, and proceeds when all transfers of
//! the round have ended; a transfer begins when both ends have posted it. Events of equal time
//! happen in the order in which they were predicted, so two runs are the same to the bit.

use std::collections::VecDeque;
use std::ops::Range;

use encke_core::plan::Pass;
use encke_ring::trace::{Activity, Event, Trace};

use crate::cores::{CoreUse, Cores, PredictedEnd};
use crate::event_queue::EventQueue;
use crate::machine::{Machine, TransferMode};
use crate::network::{ActiveTransfer, Network, PredictedArrival};
use crate::rank_costs::{PeerBytes, RankCosts, TaskTime};
use crate::simulated_run::{LinkTime, RankTime, SimulatedRun, Transfer, duration};

/// An event of the simulation.
#[derive(Debug, Clone, Copy)]
enum EngineEvent {
    /// Work on some cores ends.
    WorkEnds(PredictedEnd),
    /// The first byte of a transfer moves.
    Departs(usize),
    /// The last byte of a transfer arrives.
    Arrives(PredictedArrival),
}

/// What a rank is doing.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
enum RankStage {
    #[default]
    Load,
    Prepare,
    /// Copying, before its jobs, the send with this index, whose receiver has posted.
    EarlyCopy(usize),
    Compute,
    /// Copying, after its jobs, the deferred send with this index; false while the receiver has not
    /// posted yet.
    DeferredCopy(usize, bool),
    Wait,
    Done,
}

#[derive(Debug, Clone, Default)]
struct RankState {
    stage: RankStage,
    round: usize,
    /// Rounds whose transfers it has posted.
    posted: usize,
    /// Transfers of the round that have not ended.
    open: usize,
    /// Sends deferred until after its jobs because the receiver had not posted.
    deferred: Vec<usize>,
    /// The transfer that its own thread is copying.
    copying: usize,
    /// Work of this stage that has not started.
    rest: TaskTime,
    /// When the stage began.
    since: f64,
    /// Its transfers in flight.
    in_flight: usize,
    /// The time up to which `time` is accounted.
    accounted: f64,
    time: RankTime,
}

pub(crate) struct Engine<'a> {
    costs: &'a [RankCosts],
    machine: &'a Machine,
    recorded: Range<usize>,
    now: f64,
    queue: EventQueue<EngineEvent>,
    /// Ranks whose stage may have ended.
    ready: VecDeque<usize>,
    ranks: Vec<RankState>,
    cores: Cores,
    network: Network<'a>,
    links: [LinkTime; 2],
    arrivals: Vec<PredictedArrival>,
    events: Vec<Vec<Event>>,
    transfers: Vec<Transfer>,
}

impl<'a> Engine<'a> {
    pub fn new(costs: &'a [RankCosts], machine: &'a Machine, recorded: Range<usize>) -> Engine<'a> {
        let ranks = costs.len();
        let cores = match machine.device.shared_cores {
            Some(cores) => Cores::new(ranks, machine.ranks_per_node, cores),
            None => Cores::new(ranks, 1, 1),
        };
        let links = [(&machine.intra_node, false), (&machine.inter_node, true)];
        Engine {
            costs,
            machine,
            now: 0.0,
            queue: EventQueue::default(),
            ready: VecDeque::new(),
            ranks: vec![RankState::default(); ranks],
            cores,
            network: Network::new(machine, ranks),
            links: links.map(|(link, between_nodes)| LinkTime {
                name: link.name.clone(),
                between_nodes,
                ..LinkTime::default()
            }),
            arrivals: Vec::new(),
            events: vec![Vec::new(); recorded.len().min(ranks)],
            transfers: Vec::new(),
            recorded,
        }
    }

    /// Runs the simulation to its end.
    pub fn run(mut self, pass: Pass) -> SimulatedRun {
        for rank in 0..self.ranks.len() {
            if !self.start(rank, self.costs[rank].load) {
                self.ready.push_back(rank);
            }
        }
        loop {
            while let Some(rank) = self.ready.pop_front() {
                self.proceed(rank);
            }
            let Some((at, event)) = self.queue.pop() else {
                break;
            };
            self.now = at;
            match event {
                EngineEvent::WorkEnds(end) => self.end_work(end),
                EngineEvent::Departs(transfer) => self.depart(transfer),
                EngineEvent::Arrives(arrival) => self.arrive(arrival),
            }
        }
        let stuck = self
            .ranks
            .iter()
            .position(|rank| rank.stage != RankStage::Done);
        assert_eq!(stuck, None, "every rank of a plan finishes");
        self.finish(pass)
    }

    /// Starts the work of a rank's stage; false if there is none.
    fn start(&mut self, rank: usize, work: TaskTime) -> bool {
        let slow = self.machine.stragglers.get(&rank).copied().unwrap_or(1.0);
        self.ranks[rank].rest = TaskTime {
            delay_s: work.delay_s * slow,
            thread_s: work.thread_s * slow,
            workers_s: work.workers_s * slow,
            limited_s: work.limited_s * slow,
        };
        self.start_next(rank)
    }

    /// Starts the next part of a rank's remaining work; false if there is none.
    fn start_next(&mut self, rank: usize) -> bool {
        let rest = &mut self.ranks[rank].rest;
        let workers = CoreUse::Workers(rest.worker_share());
        let parts = [
            (&mut rest.delay_s, CoreUse::Delay),
            (&mut rest.thread_s, CoreUse::OwnThread),
            (&mut rest.workers_s, workers),
        ];
        for (left_s, core_use) in parts {
            let seconds = std::mem::take(left_s);
            if seconds > 0.0 {
                let end = self.cores.start(self.now, rank, seconds, core_use);
                self.queue.push(end.at, EngineEvent::WorkEnds(end));
                return true;
            }
        }
        false
    }

    fn end_work(&mut self, end: PredictedEnd) {
        let Some((rank, next)) = self.cores.end(end) else {
            return;
        };
        if let Some(next) = next {
            self.queue.push(next.at, EngineEvent::WorkEnds(next));
        }
        if !self.start_next(rank) {
            self.proceed(rank);
        }
    }

    /// Ends a rank's stage and moves it on to the next stage that takes time.
    fn proceed(&mut self, rank: usize) {
        loop {
            let busy = match self.ranks[rank].stage {
                RankStage::Load => {
                    self.end_activity(rank, Activity::Load);
                    self.prepare(rank)
                }
                RankStage::Prepare => {
                    self.end_activity(rank, Activity::Prepare);
                    self.enter(rank, RankStage::EarlyCopy(0));
                    self.post(rank);
                    self.copy_early(rank, 0)
                }
                RankStage::EarlyCopy(at) => {
                    self.end_copy(rank);
                    self.copy_early(rank, at + 1)
                }
                RankStage::Compute => {
                    self.end_activity(rank, Activity::Compute);
                    self.copy_deferred(rank, 0)
                }
                RankStage::DeferredCopy(at, false) => self.copy_deferred(rank, at),
                RankStage::DeferredCopy(at, true) => {
                    self.end_copy(rank);
                    self.copy_deferred(rank, at + 1)
                }
                RankStage::Wait if self.ranks[rank].open > 0 => return,
                RankStage::Wait => {
                    self.end_activity(rank, Activity::Wait);
                    self.ranks[rank].round += 1;
                    self.prepare(rank)
                }
                RankStage::Done => return,
            };
            if busy {
                return;
            }
        }
    }

    /// Accounts the time since the last change: in flight, exposed or idle.
    fn account(&mut self, rank: usize) {
        let state = &mut self.ranks[rank];
        let passed = self.now - state.accounted;
        state.accounted = self.now;
        let waits = matches!(
            state.stage,
            RankStage::EarlyCopy(_) | RankStage::DeferredCopy(..) | RankStage::Wait
        );
        if state.in_flight > 0 {
            state.time.in_flight_s += passed;
        }
        match (waits, state.in_flight) {
            (true, 0) => state.time.idle_s += passed,
            (true, _) => state.time.exposed_s += passed,
            (false, _) => {}
        }
    }

    fn enter(&mut self, rank: usize, stage: RankStage) {
        self.account(rank);
        let from = std::mem::replace(&mut self.ranks[rank].stage, stage);
        // In the trace, copying deferred sends and waiting for receives is one interval.
        if !matches!(from, RankStage::DeferredCopy(..)) {
            self.ranks[rank].since = self.now;
        }
    }

    /// Starts the tasks before the transfers of the next round, or ends the rank.
    fn prepare(&mut self, rank: usize) -> bool {
        let round = self.ranks[rank].round;
        match self.costs[rank].rounds.get(round) {
            Some(cost) => {
                self.enter(rank, RankStage::Prepare);
                self.start(rank, cost.before)
            }
            None => {
                self.enter(rank, RankStage::Done);
                self.ranks[rank].time.end_s = self.now;
                true
            }
        }
    }

    /// Posts the transfers of the round; those that the other end has posted begin.
    fn post(&mut self, rank: usize) {
        let costs = self.costs;
        let round = self.ranks[rank].round;
        let (sends, receives) = (costs[rank].sends(round), costs[rank].receives(round));
        self.ranks[rank].posted = round + 1;
        self.ranks[rank].open = sends.len() + receives.len();
        self.ranks[rank].deferred.clear();
        for sent in sends {
            let peer = sent.peer as usize;
            if self.is_offloaded(rank, peer) && self.ranks[peer].posted > round {
                self.launch(rank, peer, sent.bytes);
            }
        }
        for received in receives {
            let peer = received.peer as usize;
            if self.ranks[peer].posted <= round {
                continue;
            }
            if self.is_offloaded(peer, rank) {
                self.launch(peer, rank, received.bytes);
            } else if matches!(self.ranks[peer].stage, RankStage::DeferredCopy(_, false)) {
                // The sender may be waiting for this rank.
                self.ready.push_back(peer);
            }
        }
    }

    fn is_offloaded(&self, from: usize, to: usize) -> bool {
        self.machine.link(from, to).0.mode == TransferMode::Offloaded
    }

    fn launch(&mut self, from: usize, to: usize, bytes: u64) {
        let transfer = self.open_transfer(from, to, bytes);
        let latency = self.machine.link(from, to).0.latency_s;
        if latency > 0.0 {
            self.queue
                .push(self.now + latency, EngineEvent::Departs(transfer));
        } else {
            self.depart(transfer);
        }
    }

    fn open_transfer(&mut self, from: usize, to: usize, bytes: u64) -> usize {
        for rank in [from, to] {
            self.account(rank);
            self.ranks[rank].in_flight += 1;
        }
        let round = self.ranks[from].round;
        self.network.post(self.now, from, to, round, bytes)
    }

    fn depart(&mut self, transfer: usize) {
        self.network.depart(self.now, transfer, &mut self.arrivals);
        self.queue_arrivals();
    }

    fn arrive(&mut self, arrival: PredictedArrival) {
        let transfer = self.network.arrive(arrival, &mut self.arrivals);
        self.queue_arrivals();
        if let Some(transfer) = transfer {
            self.end_transfer(&transfer);
        }
    }

    fn queue_arrivals(&mut self) {
        let mut arrivals = std::mem::take(&mut self.arrivals);
        for arrival in arrivals.drain(..) {
            self.queue.push(arrival.at, EngineEvent::Arrives(arrival));
        }
        self.arrivals = arrivals;
    }

    /// Ends a transfer at both ends.
    fn end_transfer(&mut self, transfer: &ActiveTransfer) {
        let &ActiveTransfer {
            from,
            to,
            round,
            bytes,
            start_s,
            ..
        } = transfer;
        for rank in [from, to] {
            self.account(rank);
            let state = &mut self.ranks[rank];
            state.in_flight -= 1;
            state.open -= 1;
            if state.stage == RankStage::Wait && state.open == 0 {
                self.ready.push_back(rank);
            }
        }
        self.ranks[from].time.sent_bytes += bytes;
        self.ranks[to].time.received_bytes += bytes;
        let between_nodes = self.machine.link(from, to).1;
        let link = &mut self.links[usize::from(between_nodes)];
        link.bytes += bytes;
        link.transfers += 1;
        if self.recorded.contains(&from) || self.recorded.contains(&to) {
            self.transfers.push(Transfer {
                from,
                to,
                round,
                bytes,
                between_nodes,
                start_s,
                end_s: self.now,
            });
        }
    }

    /// Copies the sends of the round from index `at` on whose receivers have posted, defers the
    /// others, then computes.
    fn copy_early(&mut self, rank: usize, at: usize) -> bool {
        let costs = self.costs;
        let round = self.ranks[rank].round;
        for (i, sent) in costs[rank].sends(round).iter().enumerate().skip(at) {
            let peer = sent.peer as usize;
            if self.is_offloaded(rank, peer) {
                continue;
            }
            if self.ranks[peer].posted > round {
                self.enter(rank, RankStage::EarlyCopy(i));
                return self.copy(rank, *sent);
            }
            self.ranks[rank].deferred.push(i);
        }
        self.enter(rank, RankStage::Compute);
        self.start(rank, costs[rank].rounds[round].meanwhile)
    }

    /// Copies the deferred sends in order, each once its receiver has posted, then waits.
    fn copy_deferred(&mut self, rank: usize, at: usize) -> bool {
        let round = self.ranks[rank].round;
        let Some(&i) = self.ranks[rank].deferred.get(at) else {
            self.enter(rank, RankStage::Wait);
            return false;
        };
        let sent = self.costs[rank].sends(round)[i];
        let ready = self.ranks[sent.peer as usize].posted > round;
        self.enter(rank, RankStage::DeferredCopy(at, ready));
        if ready { self.copy(rank, sent) } else { true }
    }

    /// Starts a transfer that the rank's own thread copies.
    fn copy(&mut self, rank: usize, sent: PeerBytes) -> bool {
        let peer = sent.peer as usize;
        self.ranks[rank].copying = self.open_transfer(rank, peer, sent.bytes);
        let link = self.machine.link(rank, peer).0;
        let work = TaskTime {
            thread_s: link.latency_s + sent.bytes as f64 / link.bytes_per_s,
            ..TaskTime::default()
        };
        self.start(rank, work)
    }

    fn end_copy(&mut self, rank: usize) {
        let transfer = self.network.end_copied(self.ranks[rank].copying);
        self.end_transfer(&transfer);
    }

    /// Accounts an activity that has ended, and traces it if the rank is recorded.
    fn end_activity(&mut self, rank: usize, activity: Activity) {
        let (now, state) = (self.now, &mut self.ranks[rank]);
        let took = now - state.since;
        match activity {
            Activity::Load => state.time.load_s += took,
            Activity::Prepare => state.time.prepare_s += took,
            Activity::Compute => state.time.compute_s += took,
            Activity::Wait => {}
        }
        if !self.recorded.contains(&rank) {
            return;
        }
        let (round, start) = (state.round, state.since);
        let bytes = |of: &[PeerBytes]| of.iter().map(|peer| peer.bytes).sum::<u64>() as usize;
        let costs = &self.costs[rank];
        let (sent_bytes, received_bytes) = match activity {
            Activity::Wait => (bytes(costs.sends(round)), bytes(costs.receives(round))),
            _ => (0, 0),
        };
        if took > 0.0 || sent_bytes + received_bytes > 0 {
            self.events[rank - self.recorded.start].push(Event {
                rank,
                round,
                activity,
                start: duration(start),
                duration: duration(took),
                sent_bytes,
                received_bytes,
            });
        }
    }

    fn finish(mut self, pass: Pass) -> SimulatedRun {
        let ranks: Vec<RankTime> = self.ranks.iter().map(|rank| rank.time).collect();
        let seconds = ranks.iter().map(|rank| rank.end_s).fold(0.0, f64::max);
        for link in &mut self.links {
            link.busiest_port_s = self.network.busiest_port_s(link.between_nodes);
        }
        let sum = |of: fn(&RankTime) -> f64| ranks.iter().map(of).sum::<f64>();
        let (in_flight, exposed) = (sum(|rank| rank.in_flight_s), sum(|rank| rank.exposed_s));
        let one_device_s: f64 = self.costs.iter().map(|rank| rank.arithmetic_s).sum();
        let devices = self.machine.devices(ranks.len());
        let busiest = ranks.iter().enumerate();
        let slowest = busiest.max_by(|(_, a), (_, b)| a.busy_s().total_cmp(&b.busy_s()));
        SimulatedRun {
            pass,
            seconds,
            flops: self.costs.iter().map(|rank| rank.flops).sum(),
            one_device_s,
            devices,
            efficiency: one_device_s / (devices as f64 * seconds),
            hidden: (in_flight > 0.0).then(|| 1.0 - exposed / in_flight),
            slowest: slowest.map_or(0, |(rank, _)| rank),
            links: self.links.to_vec(),
            trace: Trace {
                events: self.events.concat(),
            },
            transfers: self.transfers,
            ranks,
        }
    }
}
