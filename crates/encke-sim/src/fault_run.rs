//! A call under hardship: all ranks on one thread, a virtual clock, and a wire that fails.
//!
//! The ranks are the very ones that threads drive, and messages pass the very checks that a network
//! transport makes ([`PostedReceive`](encke_ring::envelope::PostedReceive)). What this shows: a call returns the right numbers, or every rank
//! ends with a typed error inside its deadline.
//!
//! The protocol is the least that makes this true. Messages are checked and never sent again; a
//! rank waits for what it needs until its deadline and then ends; it tells nobody, since what would
//! carry the news is what failed. Whoever started the ranks closes the call: if any has failed,
//! those that had finished learn it there, because a result of which a part is missing is none.
//! Where deaths are survived, the survivors agree and go on as threads do.
//!
//! It always ends. Each round of a rank brings at most two events, each message at most two, and
//! nothing else makes any; the loop counts them against that bound.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use encke_core::Data;
use encke_core::kernel::Kernel;
use encke_core::plan::Plan;
use encke_core::plan::program::{Message, Role};
use encke_core::tensor::View;
use encke_core::transport::{Moved, TransportError, WireBuffer};
use encke_ring::call::{self, check_inputs, new_rank};
use encke_ring::error::catch_panic;
use encke_ring::rank::BorrowedInputs;
use encke_ring::rank_threads::collect_events;
use encke_ring::trace::Recorder;
use encke_ring::{Outcome, Rank, RankError, RingError};

use crate::fault_config::{Death, FaultConfig, Kind};
use crate::lockstep;
use crate::mail;
use crate::survivors::SimMembership;
use crate::wire::{InjectedFault, Packet, Wire};

/// How a call under hardship went.
#[derive(Debug)]
pub struct FaultRun {
    /// The right numbers, or how every rank ended.
    pub result: Result<Outcome, RingError>,
    /// When each rank ended, and in which round, by itself: before the call was closed.
    pub ends: Vec<End>,
    /// What went wrong, in order.
    pub strikes: Vec<InjectedFault>,
    /// How many events it took.
    pub events: usize,
    /// The longest program of each epoch, in rounds: one epoch, unless deaths were survived.
    pub epochs: Vec<usize>,
}

/// How one rank ended.
#[derive(Debug, Clone, PartialEq)]
pub struct End {
    /// The rank.
    pub rank: usize,
    /// When.
    pub at: Duration,
    /// The round it was in, or how many there are if it finished.
    pub round: usize,
    /// What stopped it, if it did not finish.
    pub error: Option<RankError>,
}

/// What happens at a moment.
pub(crate) enum Event {
    /// A rank's jobs are done.
    Computed(usize),
    /// A message is there.
    Arrival(Packet),
    /// A rank has waited long enough in a round of an epoch.
    Expiry(usize, usize, usize),
    /// Everyone learns that nothing more comes from a rank in an epoch.
    Away(usize, usize),
}

/// A rank in the simulated world.
pub(crate) struct Player<K: Kernel> {
    pub rank: Rank<K>,
    pub recorder: Recorder,
    pub round: usize,
    /// Since when it has waited, if it does.
    pub waiting: Option<Duration>,
    /// What it still has to receive in this round.
    pub missing: Vec<Message>,
    /// What has arrived and was not looked at yet.
    pub mail: Vec<Packet>,
    pub moved: Moved,
    pub end: Option<End>,
}

pub(crate) struct World<'a, K: Kernel> {
    pub kernel: &'a K,
    pub hardship: &'a FaultConfig,
    pub wire: Wire,
    pub players: Vec<Player<K>>,
    pub council: SimMembership,
    /// By time, and by number where the times are the same.
    agenda: BTreeMap<(Duration, u64), Event>,
    booked: u64,
    /// The most events there can be in the epochs so far.
    pub most: usize,
    /// The rank that failed first.
    pub first: Option<usize>,
}

/// Carries out a plan on whole tensors under hardship. An error here says that the call could not
/// begin; how it ended is in the [`FaultRun`].
pub fn run<K: Kernel<Buffer = Data>>(
    kernel: &K,
    plan: &Arc<Plan>,
    inputs: &[(Role, View<'_>)],
    hardship: &FaultConfig,
) -> Result<FaultRun, RingError> {
    check_inputs(plan, inputs)?;
    let mut world = World {
        kernel,
        hardship,
        wire: Wire::new(hardship),
        players: Vec::with_capacity(plan.ranks()),
        council: SimMembership::new(plan),
        agenda: BTreeMap::new(),
        booked: 0,
        most: 0,
        first: None,
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
        world.players.push(Player::new(rank, recorder));
    }
    let events = world.live();
    world.close(plan, events)
}

impl<K: Kernel> Player<K> {
    fn new(rank: Rank<K>, recorder: Recorder) -> Player<K> {
        Player {
            rank,
            recorder,
            round: 0,
            waiting: None,
            missing: Vec::new(),
            mail: Vec::new(),
            moved: Moved::default(),
            end: None,
        }
    }

    pub fn rounds(&self) -> usize {
        self.rank.plan().rounds.len()
    }
}

impl<K: Kernel<Buffer = Data>> World<'_, K> {
    pub(crate) fn at(&mut self, time: Duration, event: Event) {
        self.agenda.insert((time, self.booked), event);
        self.booked += 1;
    }

    /// Lets everything happen; returns how many events it was.
    fn live(&mut self) -> usize {
        self.allow();
        for rank in 0..self.players.len() {
            self.begin(rank, Duration::ZERO);
        }
        let mut events = 0;
        while let Some(((now, _), event)) = self.agenda.pop_first() {
            events += 1;
            let most = self.most;
            assert!(events <= most, "a run has at most {most} events");
            match event {
                Event::Computed(rank) => self.wait(rank, now),
                Event::Arrival(letter) => {
                    let rank = letter.to;
                    self.players[rank].mail.push(letter);
                    self.receive(rank, now);
                }
                Event::Expiry(rank, epoch, round) => self.expire(rank, (epoch, round), now),
                Event::Away(rank, epoch) => self.learn(rank, epoch, now),
            }
        }
        events
    }

    /// Adds the most events that the programs of this epoch can bring about, and notes how long it
    /// can be.
    pub(crate) fn allow(&mut self) {
        let living = || self.players.iter().filter(|player| player.end.is_none());
        self.most += living().map(most_events).sum::<usize>();
        let longest = living().map(Player::rounds).max().unwrap_or(0);
        self.council.rounds.push(longest);
    }

    pub(crate) fn end(&mut self, rank: usize, now: Duration, error: Option<RankError>) {
        if error.is_some() {
            self.first.get_or_insert(rank);
        }
        let died = error.as_ref().is_some_and(RankError::is_death);
        let to_blame = error.as_ref().is_some_and(RankError::ends_call);
        let player = &mut self.players[rank];
        player.waiting = None;
        player.end = Some(End {
            rank,
            at: now,
            round: player.round,
            error,
        });
        if died {
            self.leave(rank, now);
        } else if to_blame {
            self.dissolve(now);
        }
    }

    /// Begins the round a rank has come to, if there is one and it lives.
    pub(crate) fn begin(&mut self, rank: usize, now: Duration) {
        let round = self.players[rank].round;
        if round == self.players[rank].rounds() {
            return match self.council.survives() {
                true => self.come(rank, true, now),
                false => self.end(rank, now, None),
            };
        }
        let epoch = self.council.epoch.number();
        if self.hardship.deaths.contains(&Death { rank, epoch, round }) {
            return self.die(rank, round, now);
        }
        if let Err(error) = self.work(rank, round, now) {
            return self.end(rank, now, Some(error));
        }
        if round == 0 && self.hardship.compute_on(rank) != self.hardship.compute {
            self.strike(Kind::Slowness, rank, round);
        }
        let done = now + self.hardship.compute_on(rank);
        self.at(done, Event::Computed(rank));
    }

    /// A rank is gone.
    pub(crate) fn die(&mut self, rank: usize, round: usize, now: Duration) {
        self.strike(Kind::Death, rank, round);
        self.end(rank, now, Some(RankError::Died { rank, round }));
    }

    fn strike(&mut self, kind: Kind, rank: usize, round: usize) {
        let to = None;
        self.wire.strikes.push(InjectedFault {
            kind,
            rank,
            to,
            round,
        });
    }

    /// Prepares, sends and computes. What is sent is not written by the jobs, so their order does
    /// not matter.
    fn work(&mut self, rank: usize, round: usize, now: Duration) -> Result<(), RankError> {
        let (kernel, epoch) = (self.kernel, self.council.epoch.number());
        let Player {
            rank: player,
            recorder,
            moved,
            ..
        } = &mut self.players[rank];
        catch_panic(|| {
            player.prepare(kernel, &BorrowedInputs::default(), round, recorder)?;
            player.compute(kernel, &BorrowedInputs::default(), round, recorder)
        })?;
        *moved = Moved::default();
        let mut letters = Vec::new();
        for message in &player.plan().rounds[round].sends {
            let parcel = player.buffer(message.buffer);
            let letter = Packet::new(rank, epoch, round, message.address, parcel);
            letters.push(letter.map_err(|source| RankError::Kernel { round, source })?);
            moved.sent_bytes += message.address.elements * parcel.element_bytes();
        }
        for letter in letters {
            for (time, letter) in self.wire.send(now, round, letter) {
                self.at(time, Event::Arrival(letter));
            }
        }
        Ok(())
    }

    /// A rank's jobs are done: it waits for what is missing, until its deadline.
    fn wait(&mut self, rank: usize, now: Duration) {
        let player = &mut self.players[rank];
        let round = player.round;
        player
            .missing
            .clone_from(&player.rank.plan().rounds[round].receives);
        player.waiting = Some(now);
        self.receive(rank, now);
        let player = &self.players[rank];
        if player.round == round && player.waiting.is_some() {
            let epoch = self.council.epoch.number();
            let expiry = Event::Expiry(rank, epoch, round);
            self.at(now + self.hardship.deadline, expiry);
            self.stop_if_stuck(rank, now);
        }
    }

    /// Takes what has arrived for a rank that waits; goes on when nothing is missing.
    fn receive(&mut self, rank: usize, now: Duration) {
        let (checks, epoch) = (self.hardship.checks, self.council.epoch.number());
        let player = &mut self.players[rank];
        if player.waiting.is_none() {
            return;
        }
        if let Err(error) = mail::take(player, epoch, checks) {
            return self.end(rank, now, Some(error.into()));
        }
        if !player.missing.is_empty() {
            return;
        }
        let planned = player.rank.plan().moved(player.round);
        assert_eq!(player.moved, planned, "what moved is what was planned");
        player.waiting = None;
        player.round += 1;
        self.begin(rank, now);
    }

    fn expire(&mut self, rank: usize, (epoch, round): (usize, usize), now: Duration) {
        let player = &self.players[rank];
        let (Some(since), Some(missing)) = (player.waiting, player.missing.first()) else {
            return;
        };
        if (self.council.epoch.number(), player.round) != (epoch, round) {
            return;
        }
        let error = TransportError::Deadline {
            rank,
            peer: missing.address.peer,
            round,
            waited: now - since,
            limit: self.hardship.deadline,
        };
        self.end(rank, now, Some(error.into()));
    }

    /// Closes the call: the outputs if every rank finished, otherwise an error for every rank.
    fn close(self, plan: &Arc<Plan>, events: usize) -> Result<FaultRun, RingError> {
        let World {
            kernel,
            wire,
            players,
            council,
            first,
            ..
        } = self;
        let ends: Vec<End> = players
            .iter()
            .map(|player| {
                player
                    .end
                    .clone()
                    .expect("when nothing happens any more, all have ended")
            })
            .collect();
        let survived = council.survives() && council.is_over;
        let reason = first.and_then(|first| ends[first].error.clone());
        let (mut ranks, mut ended) = (Vec::new(), Vec::new());
        let (mut deaths, mut pairs) = (Vec::new(), 0);
        for (player, end) in players.into_iter().zip(&ends) {
            if let (true, Some(death)) = (survived, &end.error) {
                deaths.push((end.rank, death.clone()));
                pairs += player.rank.pairs();
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
            ended.push(match error {
                None => Ok(player.recorder.finish()),
                Some(error) => Err(error),
            });
            ranks.push(player.rank);
        }
        let result = collect_events(ended, first)
            .and_then(|noted| lockstep::conclude(kernel, plan, ranks, noted));
        let result = result.map(|mut outcome| {
            outcome.record_deaths(deaths, pairs);
            outcome
        });
        Ok(FaultRun {
            result,
            ends,
            strikes: wire.strikes,
            events,
            epochs: council.rounds,
        })
    }
}

/// The most events a rank can bring about: each round its jobs end and its deadline strikes, each
/// message arrives at most twice, and once it is away.
fn most_events<K: Kernel>(player: &Player<K>) -> usize {
    let rounds = player.rank.plan().rounds.iter();
    let of_rounds = rounds.map(|round| 2 + 2 * round.sends.len());
    of_rounds.sum::<usize>() + 1
}
