//! The wire of a simulated run: takes messages, and says when each arrives, how often, and changed
//! in what way.
//!
//! The decision here: what travels is bytes, envelope and contents, as on a network. A changed byte
//! can be any of them, and only the receiver's own checks stand between it and the result.

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

/// A message as the wire has it.
#[derive(Debug, Clone)]
pub struct Packet {
    /// Who sent it.
    pub from: usize,
    /// Who is to receive it.
    pub to: usize,
    /// Its envelope.
    pub envelope: [u8; Envelope::BYTES],
    /// What is in it.
    pub contents: Data,
}

impl Packet {
    /// The message that `rank` sends in a round of an epoch: a copy, since the sender goes on.
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

    /// Changes one byte, wherever it is.
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

/// A fault that really happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct InjectedFault {
    /// What kind.
    pub kind: FaultKind,
    /// The rank it began at.
    pub rank: usize,
    /// The rank at the other end, for messages.
    pub to: Option<usize>,
    /// The round.
    pub round: usize,
}

/// The links between all ranks.
#[derive(Debug)]
pub struct SimulatedNetwork {
    hardship: FaultConfig,
    random: Random,
    /// When the latest message of each link arrives: links keep their order unless they are told
    /// otherwise.
    latest: HashMap<(usize, usize), Duration>,
    /// What happened to messages.
    pub strikes: Vec<InjectedFault>,
}

impl SimulatedNetwork {
    /// A wire with the faults of its hardship.
    pub fn new(hardship: &FaultConfig) -> SimulatedNetwork {
        SimulatedNetwork {
            random: Random::new(hardship.seed),
            hardship: hardship.clone(),
            latest: HashMap::new(),
            strikes: Vec::new(),
        }
    }

    fn strikes(&mut self, kind: FaultKind, odds: f64, (rank, to, round): (usize, usize, usize)) -> bool {
        const PARTS: usize = 1_000_000;
        // Asked every time, so that one fault does not move the dice of the others.
        let struck = (self.random.below(PARTS) as f64) < odds * PARTS as f64;
        if struck {
            let to = Some(to);
            self.strikes.push(InjectedFault {
                kind,
                rank,
                to,
                round,
            });
        }
        struck
    }

    fn part_of(&mut self, most: Duration) -> Duration {
        most.mul_f64(self.random.below(1001) as f64 / 1000.0)
    }

    /// Sends a message; returns when it arrives, once or twice or never.
    pub fn send(
        &mut self,
        now: Duration,
        round: usize,
        mut letter: Packet,
    ) -> Vec<(Duration, Packet)> {
        let link = (letter.from, letter.to);
        let place = (letter.from, letter.to, round);
        let FaultConfig {
            latency,
            delay,
            longest_delay,
            reordering,
            loss,
            corruption,
            duplication,
            ..
        } = self.hardship;
        let mut at = now + latency;
        if self.strikes(FaultKind::Delay, delay, place) {
            at += self.part_of(longest_delay);
        }
        if self.strikes(FaultKind::Reordering, reordering, place) {
            // Long enough for the rounds after it to overtake, and out of the link's order.
            at += self.part_of(self.hardship.compute * 5);
        } else {
            let latest = self.latest.entry(link).or_default();
            *latest = at.max(*latest);
            at = *latest;
        }
        let lost = self.strikes(FaultKind::Loss, loss, place);
        let twin = self
            .strikes(FaultKind::Duplication, duplication, place)
            .then(|| letter.clone());
        if self.strikes(FaultKind::Corruption, corruption, place) {
            letter.corrupt(&mut self.random);
        }
        let mut arrivals = Vec::new();
        if !lost {
            arrivals.push((at, letter));
        }
        if let Some(twin) = twin {
            let late = at + self.part_of(self.hardship.compute * 5);
            arrivals.push((late, twin));
        }
        arrivals
    }
}
