//! The simulated network: decides when each message arrives, how often, and which byte is
//! corrupted.
//!
//! The decision here: messages are bytes, envelope and contents, as on a real network. Corruption
//! can hit any of them, and only the receiver's checks keep it out of the result.

use encke_core::Data;
use encke_core::conformance::Random;
use encke_core::host::allocate;
use encke_core::kernel::KernelError;
use encke_core::transport::{Address, WireBuffer};
use encke_ring::Envelope;
use serde::Serialize;
use std::collections::HashMap;
use std::time::Duration;

use crate::fault_config::{FaultConfig, FaultKind};

/// A message on the network.
#[derive(Debug, Clone)]
pub struct Packet {
    /// The sender.
    pub from: usize,
    /// The receiver.
    pub to: usize,
    /// Its envelope.
    pub envelope: [u8; Envelope::BYTES],
    /// Its payload.
    pub contents: Data,
}

impl Packet {
    /// The message that `rank` sends in a round of an epoch. It copies the buffer, because the
    /// sender continues to use it.
    pub fn new(
        rank: usize,
        epoch: usize,
        round: usize,
        to: Address,
        parcel: &Data,
    ) -> Result<Packet, KernelError> {
        let dtype = parcel.as_slice().dtype();
        let mut contents = allocate("the simulated wire", dtype, to.elements)?;
        contents.copy_from(parcel, to.elements);
        Ok(Packet {
            from: rank,
            to: to.peer,
            envelope: Envelope::new(rank, epoch as u64, round, to, parcel).to_bytes(),
            contents,
        })
    }

    /// Changes one random byte of the envelope or the contents.
    fn corrupt(&mut self, random: &mut Random) {
        let contents = self.contents.bytes_mut();
        let at = random.below(Envelope::BYTES + contents.len());
        let change = 1 + random.below(255) as u8;
        match at.checked_sub(Envelope::BYTES) {
            Some(at) => contents[at] ^= change,
            None => self.envelope[at] ^= change,
        }
    }
}

/// A fault that was injected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct InjectedFault {
    /// Its kind.
    pub kind: FaultKind,
    /// The rank it hit, or the sender of the message it hit.
    pub rank: usize,
    /// The receiver of the message it hit.
    pub to: Option<usize>,
    /// The round.
    pub round: usize,
}

/// The links between all ranks, with their faults.
#[derive(Debug)]
pub struct SimulatedNetwork {
    config: FaultConfig,
    random: Random,
    /// When the latest message of each link arrives: links keep their order unless a message is
    /// reordered.
    latest: HashMap<(usize, usize), Duration>,
    /// The faults injected so far.
    pub faults: Vec<InjectedFault>,
}

impl SimulatedNetwork {
    /// A network with these faults.
    pub fn new(config: &FaultConfig) -> SimulatedNetwork {
        SimulatedNetwork {
            random: Random::new(config.seed),
            config: config.clone(),
            latest: HashMap::new(),
            faults: Vec::new(),
        }
    }

    /// Draws whether a fault hits a message, and records it.
    fn draw(&mut self, kind: FaultKind, odds: f64, packet: &Packet, round: usize) -> bool {
        const PARTS: usize = 1_000_000;
        // One random number for each kind and message, whatever was drawn before.
        let hit = (self.random.below(PARTS) as f64) < odds * PARTS as f64;
        if hit {
            let (rank, to) = (packet.from, Some(packet.to));
            self.faults.push(InjectedFault {
                kind,
                rank,
                to,
                round,
            });
        }
        hit
    }

    /// A random duration up to `most`.
    fn random_part(&mut self, most: Duration) -> Duration {
        most.mul_f64(self.random.below(1001) as f64 / 1000.0)
    }

    /// Sends a message; returns its arrivals: none, one or two.
    pub fn send(
        &mut self,
        now: Duration,
        round: usize,
        mut packet: Packet,
    ) -> Vec<(Duration, Packet)> {
        let link = (packet.from, packet.to);
        let FaultConfig {
            latency,
            delay,
            longest_delay,
            reordering,
            loss,
            corruption,
            duplication,
            ..
        } = self.config;
        let mut at = now + latency;
        if self.draw(FaultKind::Delay, delay, &packet, round) {
            at += self.random_part(longest_delay);
        }
        if self.draw(FaultKind::Reordering, reordering, &packet, round) {
            // Long enough for messages of later rounds to overtake it.
            at += self.random_part(self.config.compute * 5);
        } else {
            let latest = self.latest.entry(link).or_default();
            *latest = at.max(*latest);
            at = *latest;
        }
        let lost = self.draw(FaultKind::Loss, loss, &packet, round);
        let duplicate = self
            .draw(FaultKind::Duplication, duplication, &packet, round)
            .then(|| packet.clone());
        if self.draw(FaultKind::Corruption, corruption, &packet, round) {
            packet.corrupt(&mut self.random);
        }
        let mut arrivals = Vec::new();
        if !lost {
            arrivals.push((at, packet));
        }
        if let Some(duplicate) = duplicate {
            let late = at + self.random_part(self.config.compute * 5);
            arrivals.push((late, duplicate));
        }
        arrivals
    }
}
