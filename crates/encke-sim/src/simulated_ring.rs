//! The state of a simulated ring: its ranks, its network and the queue of its events.
//!
//! Only data and scheduling: what events do is in [`fault_run`](crate::fault_run) and, for deaths,
//! in [`recovery`](crate::recovery).

use std::time::Duration;

use encke_core::kernel::Kernel;
use encke_core::plan::program::Message;
use encke_core::transport::Moved;
use encke_cost::EventQueue;
use encke_ring::trace::Recorder;
use encke_ring::{Rank, RankError};

use crate::fault_config::FaultConfig;
use crate::membership::SimulatedMembership;
use crate::network::{Packet, SimulatedNetwork};

/// How one rank ended.
#[derive(Debug, Clone, PartialEq)]
pub struct RankEnd {
    /// The rank.
    pub rank: usize,
    /// When it ended.
    pub at: Duration,
    /// The round it was in; the number of rounds if it finished.
    pub round: usize,
    /// The error that stopped it, if it did not finish.
    pub error: Option<RankError>,
}

/// An event of a simulated ring.
pub(crate) enum RingEvent {
    /// A rank's jobs end.
    Computed(usize),
    /// A message arrives.
    Arrival(Packet),
    /// The deadline of a rank in a round of an epoch.
    Deadline {
        rank: usize,
        epoch: usize,
        round: usize,
    },
    /// All ranks learn that a rank sends nothing more in an epoch.
    Away { rank: usize, epoch: usize },
}

/// A rank of a simulated ring.
pub(crate) struct SimulatedRank<K: Kernel> {
    pub rank: Rank<K>,
    pub recorder: Recorder,
    pub round: usize,
    /// Since when it has been waiting for messages.
    pub waiting: Option<Duration>,
    /// Messages it has yet to receive in this round.
    pub missing: Vec<Message>,
    /// Packets that have arrived and are not received yet.
    pub inbox: Vec<Packet>,
    pub moved: Moved,
    pub end: Option<RankEnd>,
}

impl<K: Kernel> SimulatedRank<K> {
    pub fn new(rank: Rank<K>, recorder: Recorder) -> SimulatedRank<K> {
        SimulatedRank {
            rank,
            recorder,
            round: 0,
            waiting: None,
            missing: Vec::new(),
            inbox: Vec::new(),
            moved: Moved::default(),
            end: None,
        }
    }

    pub fn rounds(&self) -> usize {
        self.rank.plan().rounds.len()
    }

    /// The most events it can cause: in each round its jobs end and its deadline passes, each
    /// message arrives at most twice, and once it is away.
    fn max_events(&self) -> usize {
        let rounds = self.rank.plan().rounds.iter();
        let of_rounds = rounds.map(|round| 2 + 2 * round.sends.len());
        of_rounds.sum::<usize>() + 1
    }
}

/// All ranks of a call, in virtual time.
pub(crate) struct SimulatedRing<'a, K: Kernel> {
    pub kernel: &'a K,
    pub config: &'a FaultConfig,
    pub network: SimulatedNetwork,
    pub ranks: Vec<SimulatedRank<K>>,
    pub membership: SimulatedMembership,
    pub queue: EventQueue<RingEvent, Duration>,
    /// The most events that the epochs so far can cause.
    pub max_events: usize,
    /// The first rank to fail.
    pub first_failed: Option<usize>,
}

impl<K: Kernel> SimulatedRing<'_, K> {
    /// Records the length of an epoch that begins, and the events that its programs can cause.
    pub fn begin_epoch(&mut self) {
        let living = || self.ranks.iter().filter(|rank| rank.end.is_none());
        self.max_events += living().map(SimulatedRank::max_events).sum::<usize>();
        let longest = living().map(SimulatedRank::rounds).max().unwrap_or(0);
        self.membership.rounds.push(longest);
    }
}
