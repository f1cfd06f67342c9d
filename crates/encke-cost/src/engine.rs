//! The clock: ranks that go through their rounds, and the order in which things happen.
//!
//! A rank prepares, posts its hops, computes, and goes on when all hops of the round have come; a
//! hop begins when both of its ends have posted it. Events of equal time happen in the order in
//! which they were foreseen, so two runs are the same to the bit.

use std::collections::VecDeque;
use std::ops::Range;

use encke_core::plan::Pass;
use encke_ring::trace::{Activity, Event, Trace};

use super::cores::{Cores, End, Kind};
use super::cost::{Hop, Program, Work};
use super::event_queue::{EventQueue, What};
use super::machine::{Carrier, Machine};
use super::run::{LinkTime, RankTime, Run, Transfer, duration};
use super::wires::{Arrival, Flight, Wires};

/// What a rank is at.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Stage {
    Load,
    Prepare,
    /// Carrying its own hops whose receivers were ready before its jobs: which one.
    Early(usize),
    Compute,
    /// Carrying those whose receivers were not: which of the late ones, and whether it has begun.
    Deferred(usize, bool),
    Wait,
    Done,
}

#[derive(Debug, Clone)]
struct State {
    stage: Stage,
    round: usize,
    /// Rounds whose hops it has posted.
    posted: usize,
    /// Hops of the round that have not arrived.
    open: usize,
    /// Sends whose receivers had not posted when it looked.
    late: Vec<usize>,
    /// The hop it is carrying itself.
    carrying: usize,
    /// What is to be done in this stage after what is under way.
    rest: Work,
    /// When the stage began.
    since: f64,
    /// Hops of its own under way.
    flying: usize,
    /// The time up to which its time is booked.
    booked: f64,
    time: RankTime,
}

pub(super) struct Engine<'a> {
    programs: &'a [Program],
    machine: &'a Machine,
    recorded: Range<usize>,
    now: f64,
    agenda: EventQueue,
    /// Ranks whose stage may be over.
    ready: VecDeque<usize>,
    ranks: Vec<State>,
    cores: Cores,
    wires: Wires<'a>,
    links: [LinkTime; 2],
    arrivals: Vec<Arrival>,
    events: Vec<Vec<Event>>,
    transfers: Vec<Transfer>,
}

impl<'a> Engine<'a> {
    pub fn new(
        programs: &'a [Program],
        machine: &'a Machine,
        recorded: Range<usize>,
    ) -> Engine<'a> {
        let ranks = programs.len();
        let cores = match machine.device.shared_cores {
            Some(cores) => Cores::new(ranks, machine.node, cores),
            None => Cores::new(ranks, 1, 1),
        };
        let state = State {
            stage: Stage::Load,
            round: 0,
            posted: 0,
            open: 0,
            late: Vec::new(),
            carrying: 0,
            rest: Work::default(),
            since: 0.0,
            flying: 0,
            booked: 0.0,
            time: RankTime::default(),
        };
        let links = [(&machine.inside, false), (&machine.between, true)];
        Engine {
            programs,
            machine,
            now: 0.0,
            agenda: EventQueue::default(),
            ready: VecDeque::new(),
            ranks: vec![state; ranks],
            cores,
            wires: Wires::new(machine, ranks),
            links: links.map(|(link, between_nodes)| LinkTime {
                name: link.name.clone(),
                between_nodes,
                bytes: 0,
                hops: 0,
                busiest_port_s: 0.0,
            }),
            arrivals: Vec::new(),
            events: vec![Vec::new(); recorded.len().min(ranks)],
            transfers: Vec::new(),
            recorded,
        }
    }

    /// Lets everything happen.
    pub fn run(mut self, pass: Pass) -> Run {
        for rank in 0..self.ranks.len() {
            if !self.start(rank, self.programs[rank].load) {
                self.ready.push_back(rank);
            }
        }
        loop {
            while let Some(rank) = self.ready.pop_front() {
                self.proceed(rank);
            }
            let Some((at, what)) = self.agenda.next() else {
                break;
            };
            self.now = at;
            match what {
                What::End(end) => self.ended(end),
                What::Depart(flight) => self.depart(flight),
                What::Arrival(arrival) => self.arrived(arrival),
            }
        }
        let stuck = self.ranks.iter().position(|rank| rank.stage != Stage::Done);
        assert_eq!(stuck, None, "every rank of a plan comes to its end");
        self.finish(pass)
    }

    /// Begins the work of a rank's stage; false if there is none.
    fn start(&mut self, rank: usize, work: Work) -> bool {
        let slow = self.machine.stragglers.get(&rank).copied().unwrap_or(1.0);
        self.ranks[rank].rest = Work {
            delay_s: work.delay_s * slow,
            alone_s: work.alone_s * slow,
            spread_s: work.spread_s * slow,
            least_s: work.least_s * slow,
        };
        self.work_on(rank)
    }

    /// Begins the next part of what a rank has to do; false if there is none.
    fn work_on(&mut self, rank: usize) -> bool {
        let rest = &mut self.ranks[rank].rest;
        let spread = Kind::Spread(rest.share());
        let parts = [
            (&mut rest.delay_s, Kind::Delay),
            (&mut rest.alone_s, Kind::Alone),
            (&mut rest.spread_s, spread),
        ];
        for (left_s, kind) in parts {
            let seconds = std::mem::take(left_s);
            if seconds > 0.0 {
                let end = self.cores.begin(self.now, rank, seconds, kind);
                self.agenda.add(end.at, What::End(end));
                return true;
            }
        }
        false
    }

    fn ended(&mut self, end: End) {
        let Some((rank, next)) = self.cores.end(end) else {
            return;
        };
        if let Some(next) = next {
            self.agenda.add(next.at, What::End(next));
        }
        if !self.work_on(rank) {
            self.proceed(rank);
        }
    }

    /// The rank's stage is over: goes on to the next one that takes time.
    fn proceed(&mut self, rank: usize) {
        loop {
            let busy = match self.ranks[rank].stage {
                Stage::Load => {
                    self.note(rank, Activity::Load);
                    self.prepare(rank)
                }
                Stage::Prepare => {
                    self.note(rank, Activity::Prepare);
                    self.enter(rank, Stage::Early(0));
                    self.post(rank);
                    self.carry_early(rank, 0)
                }
                Stage::Early(at) => {
                    self.carried(rank);
                    self.carry_early(rank, at + 1)
                }
                Stage::Compute => {
                    self.note(rank, Activity::Compute);
                    self.carry_late(rank, 0)
                }
                Stage::Deferred(at, false) => self.carry_late(rank, at),
                Stage::Deferred(at, true) => {
                    self.carried(rank);
                    self.carry_late(rank, at + 1)
                }
                Stage::Wait if self.ranks[rank].open > 0 => return,
                Stage::Wait => {
                    self.note(rank, Activity::Wait);
                    self.ranks[rank].round += 1;
                    self.prepare(rank)
                }
                Stage::Done => return,
            };
            if busy {
                return;
            }
        }
    }

    /// Books the time since the last change: hops fly, hidden or not, or the rank just waits.
    fn book(&mut self, rank: usize) {
        let state = &mut self.ranks[rank];
        let passed = self.now - state.booked;
        state.booked = self.now;
        let waits = matches!(
            state.stage,
            Stage::Early(_) | Stage::Deferred(..) | Stage::Wait
        );
        if state.flying > 0 {
            state.time.flying_s += passed;
        }
        match (waits, state.flying) {
            (true, 0) => state.time.idle_s += passed,
            (true, _) => state.time.exposed_s += passed,
            (false, _) => {}
        }
    }

    fn enter(&mut self, rank: usize, stage: Stage) {
        self.book(rank);
        let from = std::mem::replace(&mut self.ranks[rank].stage, stage);
        // Carrying late hops and waiting for others' is one stretch of time to whoever looks.
        if !matches!(from, Stage::Deferred(..)) {
            self.ranks[rank].since = self.now;
        }
    }

    /// The next round, if there is one: its tasks before the hops.
    fn prepare(&mut self, rank: usize) -> bool {
        let round = self.ranks[rank].round;
        match self.programs[rank].rounds.get(round) {
            Some(cost) => {
                self.enter(rank, Stage::Prepare);
                self.start(rank, cost.before)
            }
            None => {
                self.enter(rank, Stage::Done);
                self.ranks[rank].time.end_s = self.now;
                true
            }
        }
    }

    /// Posts the hops of the round: those whose other end is there begin.
    fn post(&mut self, rank: usize) {
        let programs = self.programs;
        let round = self.ranks[rank].round;
        let (sends, receives) = (programs[rank].sends(round), programs[rank].receives(round));
        self.ranks[rank].posted = round + 1;
        self.ranks[rank].open = sends.len() + receives.len();
        self.ranks[rank].late.clear();
        for hop in sends {
            let peer = hop.peer as usize;
            if self.flies(rank, peer) && self.ranks[peer].posted > round {
                self.launch(rank, peer, hop.bytes);
            }
        }
        for hop in receives {
            let peer = hop.peer as usize;
            if self.ranks[peer].posted <= round {
                continue;
            }
            if self.flies(peer, rank) {
                self.launch(peer, rank, hop.bytes);
            } else if matches!(self.ranks[peer].stage, Stage::Deferred(_, false)) {
                // It may be this rank that the sender is waiting for.
                self.ready.push_back(peer);
            }
        }
    }

    fn flies(&self, from: usize, to: usize) -> bool {
        self.machine.link(from, to).0.carrier == Carrier::Wire
    }

    fn launch(&mut self, from: usize, to: usize, bytes: u64) {
        let flight = self.open_flight(from, to, bytes);
        let latency = self.machine.link(from, to).0.latency_s;
        if latency > 0.0 {
            self.agenda.add(self.now + latency, What::Depart(flight));
        } else {
            self.depart(flight);
        }
    }

    fn open_flight(&mut self, from: usize, to: usize, bytes: u64) -> usize {
        for rank in [from, to] {
            self.book(rank);
            self.ranks[rank].flying += 1;
        }
        let round = self.ranks[from].round;
        self.wires.post(self.now, from, to, round, bytes)
    }

    fn depart(&mut self, flight: usize) {
        self.wires.depart(self.now, flight, &mut self.arrivals);
        self.foresee_arrivals();
    }

    fn arrived(&mut self, arrival: Arrival) {
        let flight = self.wires.arrive(arrival, &mut self.arrivals);
        self.foresee_arrivals();
        if let Some(flight) = flight {
            self.land(&flight);
        }
    }

    fn foresee_arrivals(&mut self) {
        let mut arrivals = std::mem::take(&mut self.arrivals);
        for arrival in arrivals.drain(..) {
            self.agenda.add(arrival.at, What::Arrival(arrival));
        }
        self.arrivals = arrivals;
    }

    /// A hop is complete at both ends.
    fn land(&mut self, flight: &Flight) {
        let &Flight {
            from,
            to,
            round,
            bytes,
            start_s,
            ..
        } = flight;
        for rank in [from, to] {
            self.book(rank);
            let state = &mut self.ranks[rank];
            state.flying -= 1;
            state.open -= 1;
            if state.stage == Stage::Wait && state.open == 0 {
                self.ready.push_back(rank);
            }
        }
        self.ranks[from].time.sent_bytes += bytes;
        self.ranks[to].time.received_bytes += bytes;
        let between_nodes = self.machine.link(from, to).1;
        let link = &mut self.links[usize::from(between_nodes)];
        link.bytes += bytes;
        link.hops += 1;
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

    /// Carries hops of the round from `at` on, as far as receivers are ready; then computes.
    fn carry_early(&mut self, rank: usize, at: usize) -> bool {
        let programs = self.programs;
        let round = self.ranks[rank].round;
        for (i, hop) in programs[rank].sends(round).iter().enumerate().skip(at) {
            let peer = hop.peer as usize;
            if self.flies(rank, peer) {
                continue;
            }
            if self.ranks[peer].posted > round {
                self.enter(rank, Stage::Early(i));
                return self.carry(rank, *hop);
            }
            self.ranks[rank].late.push(i);
        }
        self.enter(rank, Stage::Compute);
        self.start(rank, programs[rank].rounds[round].meanwhile)
    }

    /// Carries the hops that were left, each as soon as its receiver is ready; then waits.
    fn carry_late(&mut self, rank: usize, at: usize) -> bool {
        let round = self.ranks[rank].round;
        let Some(&i) = self.ranks[rank].late.get(at) else {
            self.enter(rank, Stage::Wait);
            return false;
        };
        let hop = self.programs[rank].sends(round)[i];
        let ready = self.ranks[hop.peer as usize].posted > round;
        self.enter(rank, Stage::Deferred(at, ready));
        if ready { self.carry(rank, hop) } else { true }
    }

    /// The rank's own thread moves a hop.
    fn carry(&mut self, rank: usize, hop: Hop) -> bool {
        let peer = hop.peer as usize;
        self.ranks[rank].carrying = self.open_flight(rank, peer, hop.bytes);
        let link = self.machine.link(rank, peer).0;
        let work = Work {
            alone_s: link.latency_s + hop.bytes as f64 / link.bytes_per_s,
            ..Work::default()
        };
        self.start(rank, work)
    }

    fn carried(&mut self, rank: usize) {
        let flight = self.wires.carried(self.ranks[rank].carrying);
        self.land(&flight);
    }

    /// A stage is over: sums it up, and keeps it where it is recorded.
    fn note(&mut self, rank: usize, activity: Activity) {
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
        let bytes = |hops: &[Hop]| hops.iter().map(|hop| hop.bytes).sum::<u64>() as usize;
        let program = &self.programs[rank];
        let (sent_bytes, received_bytes) = match activity {
            Activity::Wait => (bytes(program.sends(round)), bytes(program.receives(round))),
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

    fn finish(mut self, pass: Pass) -> Run {
        let ranks: Vec<RankTime> = self.ranks.iter().map(|rank| rank.time).collect();
        let seconds = ranks.iter().map(|rank| rank.end_s).fold(0.0, f64::max);
        for link in &mut self.links {
            link.busiest_port_s = self.wires.busiest_port_s(link.between_nodes);
        }
        let sum = |of: fn(&RankTime) -> f64| ranks.iter().map(of).sum::<f64>();
        let (flying, exposed) = (sum(|rank| rank.flying_s), sum(|rank| rank.exposed_s));
        let one_device_s: f64 = self.programs.iter().map(|program| program.ideal_s).sum();
        let devices = self.machine.devices(ranks.len());
        let busiest = ranks.iter().enumerate();
        let slowest = busiest.max_by(|(_, a), (_, b)| a.busy_s().total_cmp(&b.busy_s()));
        Run {
            pass,
            seconds,
            flops: self.programs.iter().map(|program| program.flops).sum(),
            one_device_s,
            devices,
            efficiency: one_device_s / (devices as f64 * seconds),
            hidden: (flying > 0.0).then(|| 1.0 - exposed / flying),
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
