//! Hops in flight, and ports that they share.
//!
//! A hop leaves by one port and arrives by another: those of the two ranks inside a node, those of
//! two network cards between nodes. Hops at a port share its bandwidth equally, and a hop moves at
//! the smaller of its two shares. The decision here: what a hop cannot use of one share, because its
//! other end is busier, is not handed on to its neighbours. That errs on the slow side where ports
//! are unevenly busy, is exact where they are not, and keeps each change local to two ports.

use super::machine::Machine;

/// A hop.
#[derive(Debug, Clone, Copy)]
pub(super) struct Flight {
    pub from: usize,
    pub to: usize,
    pub round: usize,
    pub bytes: u64,
    pub start_s: f64,
    out: usize,
    into: usize,
    left_bytes: f64,
    rate: f64,
    since: f64,
    stamp: u64,
}

#[derive(Debug, Clone)]
struct Port {
    bytes_per_s: f64,
    active: Vec<usize>,
    bytes: u64,
    between: bool,
}

/// All ports, and what is under way through them.
#[derive(Debug)]
pub(super) struct Wires<'a> {
    machine: &'a Machine,
    flights: Vec<Flight>,
    free: Vec<usize>,
    /// Out and in of every rank, then out and in of every network card.
    ports: Vec<Port>,
    first_nic: usize,
    changes: u64,
}

/// An arrival that is foreseen: it counts if `stamp` is still the hop's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Arrival {
    pub flight: usize,
    pub stamp: u64,
    pub at: f64,
}

impl<'a> Wires<'a> {
    pub fn new(machine: &'a Machine, ranks: usize) -> Wires<'a> {
        let port = |bytes_per_s: f64, between: bool| Port {
            bytes_per_s,
            active: Vec::new(),
            bytes: 0,
            between,
        };
        let nics = machine.nic_of(ranks.max(1) - 1) + 1;
        let mut ports = vec![port(machine.inside.bytes_per_s, false); 2 * ranks];
        ports.extend(vec![port(machine.between.bytes_per_s, true); 2 * nics]);
        Wires {
            machine,
            flights: Vec::new(),
            free: Vec::new(),
            ports,
            first_nic: 2 * ranks,
            changes: 0,
        }
    }

    /// A hop that both ends have posted. It moves nothing until [`Wires::depart`].
    pub fn post(&mut self, now: f64, from: usize, to: usize, round: usize, bytes: u64) -> usize {
        let (out, into) = match self.machine.link(from, to).1 {
            false => (2 * from, 2 * to + 1),
            true => {
                let nic = |rank: usize| self.first_nic + 2 * self.machine.nic_of(rank);
                (nic(from), nic(to) + 1)
            }
        };
        for port in [out, into] {
            self.ports[port].bytes += bytes;
        }
        let flight = Flight {
            from,
            to,
            round,
            bytes,
            start_s: now,
            out,
            into,
            left_bytes: bytes as f64,
            rate: 0.0,
            since: now,
            stamp: 0,
        };
        match self.free.pop() {
            Some(at) => {
                self.flights[at] = flight;
                at
            }
            None => {
                self.flights.push(flight);
                self.flights.len() - 1
            }
        }
    }

    /// The first byte moves. Tells when every hop whose speed changes will arrive.
    pub fn depart(&mut self, now: f64, flight: usize, arrivals: &mut Vec<Arrival>) {
        let Flight { out, into, .. } = self.flights[flight];
        self.flights[flight].since = now;
        self.ports[out].active.push(flight);
        self.ports[into].active.push(flight);
        self.share(now, [out, into], arrivals);
    }

    /// The hop that has arrived, if this arrival is not void, with the others' new times.
    pub fn arrive(&mut self, arrival: Arrival, arrivals: &mut Vec<Arrival>) -> Option<Flight> {
        let flight = self.flights[arrival.flight];
        if flight.stamp != arrival.stamp {
            return None;
        }
        for port in [flight.out, flight.into] {
            let active = &mut self.ports[port].active;
            active.retain(|&other| other != arrival.flight);
        }
        self.share(arrival.at, [flight.out, flight.into], arrivals);
        self.retire(arrival.flight);
        Some(flight)
    }

    /// A hop that somebody else has carried.
    pub fn carried(&mut self, flight: usize) -> Flight {
        self.retire(flight);
        self.flights[flight]
    }

    fn retire(&mut self, flight: usize) {
        // No arrival foreseen for this hop can be taken for one of the next that lies here.
        self.flights[flight].stamp = 0;
        self.free.push(flight);
    }

    /// Sets the speed of everything at some ports anew.
    fn share(&mut self, now: f64, ports: [usize; 2], arrivals: &mut Vec<Arrival>) {
        let part = |port: &Port| port.bytes_per_s / port.active.len() as f64;
        for (nth, &port) in ports.iter().enumerate() {
            for i in 0..self.ports[port].active.len() {
                let at = self.ports[port].active[i];
                let Flight { out, into, .. } = self.flights[at];
                if nth == 1 && out == ports[0] {
                    continue; // it was at the first port too
                }
                let rate = part(&self.ports[out]).min(part(&self.ports[into]));
                let flight = &mut self.flights[at];
                if rate == flight.rate {
                    continue;
                }
                let passed = now - flight.since;
                if passed > 0.0 {
                    flight.left_bytes = (flight.left_bytes - passed * flight.rate).max(0.0);
                }
                self.changes += 1;
                (flight.since, flight.rate, flight.stamp) = (now, rate, self.changes);
                arrivals.push(Arrival {
                    flight: at,
                    stamp: self.changes,
                    at: now + flight.left_bytes / rate,
                });
            }
        }
    }

    /// For links inside nodes, or between them: seconds of the fullest port at full speed.
    pub fn busiest_port_s(&self, between: bool) -> f64 {
        let of = self.ports.iter().filter(|port| port.between == between);
        of.map(|port| port.bytes as f64 / port.bytes_per_s)
            .fold(0.0, f64::max)
    }
}
