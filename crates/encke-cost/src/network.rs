//! Transfers in flight and the ports they share.
//!
//! A transfer leaves by one port and arrives by another: ports of the two ranks inside a node,
//! ports of two network cards between nodes. Transfers at a port share its bandwidth equally, and a
//! transfer moves at the smaller of its two shares. The decision here: bandwidth that a transfer
//! cannot use at one port, because its other port is busier, is not given to the other transfers of
//! that port. That overestimates time where ports are unevenly loaded, is exact where they are not,
//! and keeps every change local to two ports.

use crate::machine::Machine;

/// A posted transfer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ActiveTransfer {
    pub from: usize,
    pub to: usize,
    pub round: usize,
    pub bytes: u64,
    pub start_s: f64,
    out_port: usize,
    in_port: usize,
    left_bytes: f64,
    bytes_per_s: f64,
    /// The time at which `left_bytes` was last updated.
    updated: f64,
    /// The number of its last change of speed: a [`PredictedArrival`] with another is void.
    version: u64,
}

#[derive(Debug, Clone)]
struct LinkPort {
    bytes_per_s: f64,
    /// Indices of the transfers that move through it.
    active: Vec<usize>,
    bytes: u64,
    between_nodes: bool,
}

/// All ports, and the transfers in flight.
#[derive(Debug)]
pub(crate) struct Network<'a> {
    machine: &'a Machine,
    transfers: Vec<ActiveTransfer>,
    /// Indices of `transfers` that can be reused.
    free: Vec<usize>,
    /// Out and in of every rank, then out and in of every network card.
    ports: Vec<LinkPort>,
    first_nic: usize,
    /// Changes of speed so far.
    changes: u64,
}

/// The predicted arrival of a transfer; void once the transfer's version has changed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PredictedArrival {
    pub transfer: usize,
    pub version: u64,
    pub at: f64,
}

impl<'a> Network<'a> {
    pub fn new(machine: &'a Machine, ranks: usize) -> Network<'a> {
        let port = |bytes_per_s: f64, between_nodes: bool| LinkPort {
            bytes_per_s,
            active: Vec::new(),
            bytes: 0,
            between_nodes,
        };
        let nics = machine.nic_of(ranks.max(1) - 1) + 1;
        let mut ports = vec![port(machine.intra_node.bytes_per_s, false); 2 * ranks];
        ports.extend(vec![port(machine.inter_node.bytes_per_s, true); 2 * nics]);
        Network {
            machine,
            transfers: Vec::new(),
            free: Vec::new(),
            ports,
            first_nic: 2 * ranks,
            changes: 0,
        }
    }

    /// Adds a transfer that both ends have posted. No byte moves before [`Network::depart`].
    pub fn post(&mut self, now: f64, from: usize, to: usize, round: usize, bytes: u64) -> usize {
        let (out_port, in_port) = match self.machine.link(from, to).1 {
            false => (2 * from, 2 * to + 1),
            true => {
                let nic = |rank: usize| self.first_nic + 2 * self.machine.nic_of(rank);
                (nic(from), nic(to) + 1)
            }
        };
        for port in [out_port, in_port] {
            self.ports[port].bytes += bytes;
        }
        let transfer = ActiveTransfer {
            from,
            to,
            round,
            bytes,
            start_s: now,
            out_port,
            in_port,
            left_bytes: bytes as f64,
            bytes_per_s: 0.0,
            updated: now,
            version: 0,
        };
        match self.free.pop() {
            Some(at) => {
                self.transfers[at] = transfer;
                at
            }
            None => {
                self.transfers.push(transfer);
                self.transfers.len() - 1
            }
        }
    }

    /// Moves the first byte. Appends the new arrival of every transfer whose speed changes.
    pub fn depart(&mut self, now: f64, transfer: usize, arrivals: &mut Vec<PredictedArrival>) {
        let ActiveTransfer {
            out_port, in_port, ..
        } = self.transfers[transfer];
        self.transfers[transfer].updated = now;
        self.ports[out_port].active.push(transfer);
        self.ports[in_port].active.push(transfer);
        self.share_bandwidth(now, [out_port, in_port], arrivals);
    }

    /// Ends the transfer that a prediction is about, and appends the new arrivals of the others.
    /// `None` if the prediction is void.
    pub fn arrive(
        &mut self,
        arrival: PredictedArrival,
        arrivals: &mut Vec<PredictedArrival>,
    ) -> Option<ActiveTransfer> {
        let transfer = self.transfers[arrival.transfer];
        if transfer.version != arrival.version {
            return None;
        }
        let ports = [transfer.out_port, transfer.in_port];
        for port in ports {
            let active = &mut self.ports[port].active;
            active.retain(|&other| other != arrival.transfer);
        }
        self.share_bandwidth(arrival.at, ports, arrivals);
        self.free(arrival.transfer);
        Some(transfer)
    }

    /// Ends a transfer that the sender's thread has copied.
    pub fn end_copied(&mut self, transfer: usize) -> ActiveTransfer {
        self.free(transfer);
        self.transfers[transfer]
    }

    fn free(&mut self, transfer: usize) {
        // Versions in use begin at 1, so no prediction for this transfer matches the next one here.
        self.transfers[transfer].version = 0;
        self.free.push(transfer);
    }

    /// Recomputes the speed of every transfer at two ports.
    fn share_bandwidth(
        &mut self,
        now: f64,
        ports: [usize; 2],
        arrivals: &mut Vec<PredictedArrival>,
    ) {
        let share = |port: &LinkPort| port.bytes_per_s / port.active.len() as f64;
        for (nth, &port) in ports.iter().enumerate() {
            for i in 0..self.ports[port].active.len() {
                let at = self.ports[port].active[i];
                let ActiveTransfer {
                    out_port, in_port, ..
                } = self.transfers[at];
                if nth == 1 && out_port == ports[0] {
                    continue; // done with the first port
                }
                let bytes_per_s = share(&self.ports[out_port]).min(share(&self.ports[in_port]));
                let transfer = &mut self.transfers[at];
                if bytes_per_s == transfer.bytes_per_s {
                    continue;
                }
                let passed = now - transfer.updated;
                if passed > 0.0 {
                    let moved = passed * transfer.bytes_per_s;
                    transfer.left_bytes = (transfer.left_bytes - moved).max(0.0);
                }
                self.changes += 1;
                transfer.updated = now;
                transfer.bytes_per_s = bytes_per_s;
                transfer.version = self.changes;
                arrivals.push(PredictedArrival {
                    transfer: at,
                    version: self.changes,
                    at: now + transfer.left_bytes / bytes_per_s,
                });
            }
        }
    }

    /// Of intra-node or inter-node ports: the seconds the busiest needs at its full bandwidth.
    pub fn busiest_port_s(&self, between_nodes: bool) -> f64 {
        let ports = self.ports.iter();
        let ports = ports.filter(|port| port.between_nodes == between_nodes);
        ports
            .map(|port| port.bytes as f64 / port.bytes_per_s)
            .fold(0.0, f64::max)
    }
}
