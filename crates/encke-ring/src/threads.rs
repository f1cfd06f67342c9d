//! Threads of one process as ranks: the transport that needs nothing but memory.
//!
//! A receive is posted by handing the buffer over to the rank's own inbox; the sender finds it
//! there, fills it and marks it full; the receiver takes it back. So a hop is one copy, no memory
//! beside the plan's own is ever needed, and a sender that is ahead waits until its neighbour has
//! posted, as it would on a network card.
//!
//! A rank that is away, being gone or having ended its epoch, posts nothing and fills nothing: what
//! is for it is dropped, and who still waits for it stops.
//!
//! Ranks say for whom they wait: whoever runs out of patience with a rank that waits itself blames
//! the one that nobody keeps waiting.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use encke_core::plan::membership::{Agreement, RankProgress};
use encke_core::transport::{
    Address, Incoming, Moved, Outgoing, Survivors, Transport, TransportError, WireBuffer,
};

use crate::membership::{AgreementError, Membership};

/// Where the ranks of a process meet.
#[derive(Debug)]
pub struct Hub<B> {
    inboxes: Vec<Inbox<B>>,
    failure: Mutex<Option<(usize, String)>>,
    council: Membership,
    /// For whom each rank waits at the moment.
    waits_for: Mutex<Vec<Option<usize>>>,
    deadline: Duration,
}

#[derive(Debug)]
struct Inbox<B> {
    /// Posted receives by (sender, tag).
    slots: Mutex<HashMap<(usize, u64), Slot<B>>>,
    changed: Condvar,
}

#[derive(Debug)]
enum Slot<B> {
    /// Waiting to be filled with so many elements.
    Posted(B, usize),
    /// A sender is at it.
    Filling,
    /// Ready.
    Full(B),
    /// The sender had another number of elements.
    Wrong(B, usize),
}

/// One rank's access to a [`Hub`].
#[derive(Debug)]
pub struct Endpoint<B> {
    rank: usize,
    hub: Arc<Hub<B>>,
}

/// Endpoints for `ranks` ranks; no exchange waits longer than `deadline` for a neighbour.
pub fn endpoints<B: WireBuffer>(ranks: usize, deadline: Duration) -> Vec<Endpoint<B>> {
    let inboxes = (0..ranks).map(|_| Inbox {
        slots: Mutex::new(HashMap::new()),
        changed: Condvar::new(),
    });
    let hub = Arc::new(Hub {
        inboxes: inboxes.collect(),
        failure: Mutex::new(None),
        council: Membership::new(ranks),
        waits_for: Mutex::new(vec![None; ranks]),
        deadline,
    });
    let endpoint = |rank| Endpoint {
        rank,
        hub: Arc::clone(&hub),
    };
    (0..ranks).map(endpoint).collect()
}

/// A poisoned lock still guards good data here: every change under it is a single insert or take.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<B> Hub<B> {
    /// The rank that failed first, and what it said.
    pub fn failure(&self) -> Option<(usize, String)> {
        lock(&self.failure).clone()
    }

    /// Tells every rank that `rank` failed. The first failure is the one that counts.
    pub fn fail(&self, rank: usize, reason: String) {
        lock(&self.failure).get_or_insert((rank, reason));
        self.council.wake();
        self.wake();
    }

    /// Tells every rank that `rank` is gone, where the others can go on without it.
    pub fn bury(&self, rank: usize) {
        self.council.bury(rank);
        self.wake();
    }

    /// Who keeps those waiting that wait for `peer`: itself, or the last of those it waits for.
    fn last_waited_for(&self, peer: usize) -> usize {
        let waits_for = lock(&self.waits_for);
        let next = |rank: &usize| waits_for.get(*rank).copied().flatten();
        // Ranks that wait for one another in a circle have no last one.
        let chain = std::iter::successors(Some(peer), next).take(waits_for.len() + 1);
        chain
            .last()
            .filter(|last| next(last).is_none())
            .unwrap_or(peer)
    }

    /// Wakes every rank that waits at an inbox, to look whether there is any use in it.
    fn wake(&self) {
        for inbox in &self.inboxes {
            // Taking the lock orders this after any check a waiter has just made.
            drop(lock(&inbox.slots));
            inbox.changed.notify_all();
        }
    }
}

impl<B: WireBuffer> Endpoint<B> {
    /// Where this rank meets the others, for whoever watches over the call.
    pub fn observer(&self) -> Arc<Hub<B>> {
        Arc::clone(&self.hub)
    }

    /// Waits for `peer`, at the inbox of `owner`, until `ready` finds what it wants there.
    fn wait<R>(
        &self,
        owner: usize,
        peer: usize,
        round: usize,
        since: Instant,
        ready: impl FnMut(&mut HashMap<(usize, u64), Slot<B>>) -> Option<R>,
    ) -> Result<R, TransportError> {
        lock(&self.hub.waits_for)[self.rank] = Some(peer);
        let found = self.watch(owner, peer, round, since, ready);
        lock(&self.hub.waits_for)[self.rank] = None;
        found
    }

    fn watch<R>(
        &self,
        owner: usize,
        peer: usize,
        round: usize,
        since: Instant,
        mut ready: impl FnMut(&mut HashMap<(usize, u64), Slot<B>>) -> Option<R>,
    ) -> Result<R, TransportError> {
        let inbox = &self.hub.inboxes[owner];
        let limit = self.hub.deadline;
        let mut slots = lock(&inbox.slots);
        loop {
            if let Some(found) = ready(&mut slots) {
                return Ok(found);
            }
            if let Some((failed, reason)) = self.hub.failure() {
                return Err(TransportError::PeerFailed {
                    rank: self.rank,
                    peer: failed,
                    round,
                    reason,
                });
            }
            if self.hub.council.is_away(peer) {
                let rank = self.rank;
                return Err(TransportError::Gone { rank, peer, round });
            }
            let waited = since.elapsed();
            let Some(left) = limit.checked_sub(waited).filter(|left| !left.is_zero()) else {
                return Err(TransportError::Deadline {
                    rank: self.rank,
                    peer: self.hub.last_waited_for(peer),
                    round,
                    waited,
                    limit,
                });
            };
            let woken = inbox.changed.wait_timeout(slots, left);
            slots = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Fills the slot that a neighbour has posted, and counts the bytes.
    fn deliver(&self, parcel: &B, to: Address, (mut buffer, expected): (B, usize)) -> usize {
        let bytes = to.elements * parcel.element_bytes();
        let slot = if to.elements == expected {
            buffer.copy_from(parcel, to.elements);
            Slot::Full(buffer)
        } else {
            Slot::Wrong(buffer, to.elements)
        };
        let inbox = &self.hub.inboxes[to.peer];
        lock(&inbox.slots).insert((self.rank, to.tag), slot);
        inbox.changed.notify_all();
        bytes
    }

    /// What `to` has posted for us, if it has.
    fn posted(
        rank: usize,
        tag: u64,
        slots: &mut HashMap<(usize, u64), Slot<B>>,
    ) -> Option<(B, usize)> {
        let slot = slots.get_mut(&(rank, tag))?;
        if !matches!(slot, Slot::Posted(..)) {
            return None;
        }
        match std::mem::replace(slot, Slot::Filling) {
            Slot::Posted(buffer, expected) => Some((buffer, expected)),
            _ => None,
        }
    }

    /// What a neighbour has filled for us, if it has.
    fn filled(
        from: Address,
        slots: &mut HashMap<(usize, u64), Slot<B>>,
    ) -> Option<(B, Option<usize>)> {
        let key = (from.peer, from.tag);
        match slots.get(&key)? {
            Slot::Full(_) | Slot::Wrong(..) => {}
            Slot::Posted(..) | Slot::Filling => return None,
        }
        match slots.remove(&key)? {
            Slot::Full(buffer) => Some((buffer, None)),
            Slot::Wrong(buffer, got) => Some((buffer, Some(got))),
            Slot::Posted(..) | Slot::Filling => None,
        }
    }
}

impl<B: WireBuffer> Endpoint<B> {
    /// Takes back what was posted for an exchange that will not complete.
    fn reclaim(&self, incoming: &mut [Incoming<'_, B>]) {
        let inbox = &self.hub.inboxes[self.rank];
        let mut slots = lock(&inbox.slots);
        for Incoming { from, parcel } in incoming.iter_mut() {
            let key = (from.peer, from.tag);
            // Whoever is at it copies, and waits for nobody.
            while matches!(slots.get(&key), Some(Slot::Filling)) {
                let woken = inbox.changed.wait(slots);
                slots = woken.unwrap_or_else(PoisonError::into_inner);
            }
            match slots.remove(&key) {
                Some(Slot::Posted(buffer, _) | Slot::Full(buffer) | Slot::Wrong(buffer, _)) => {
                    **parcel = buffer;
                }
                Some(Slot::Filling) | None => {}
            }
        }
    }

    fn hop(
        &mut self,
        round: usize,
        outgoing: &[Outgoing<'_, B>],
        incoming: &mut [Incoming<'_, B>],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Moved, TransportError> {
        let mut moved = Moved::default();
        let own = &self.hub.inboxes[self.rank];
        let enqueued = incoming.iter().any(|message| message.parcel.is_enqueued());
        if enqueued {
            meanwhile();
        }
        for Incoming { parcel, .. } in incoming.iter_mut() {
            parcel.vacate(round);
        }
        let mut slots = lock(&own.slots);
        for Incoming { from, parcel } in incoming.iter_mut() {
            let posted = Slot::Posted(parcel.take(), from.elements);
            slots.insert((from.peer, from.tag), posted);
        }
        drop(slots);
        own.changed.notify_all();

        // Whoever has posted already is served before we compute, the others after.
        let mut late: Vec<&Outgoing<'_, B>> = Vec::new();
        for message in outgoing {
            let to = message.to;
            let posted = {
                let mut slots = lock(&self.hub.inboxes[to.peer].slots);
                Self::posted(self.rank, to.tag, &mut slots)
            };
            match posted {
                Some(slot) => moved.sent_bytes += self.deliver(message.parcel, to, slot),
                None => late.push(message),
            }
        }
        if !enqueued {
            meanwhile();
        }
        let since = Instant::now();
        for message in late {
            let to = message.to;
            let slot = self.wait(to.peer, to.peer, round, since, |slots| {
                Self::posted(self.rank, to.tag, slots)
            });
            moved.sent_bytes += match slot {
                Ok(slot) => self.deliver(message.parcel, to, slot),
                // There is nobody to send it to.
                Err(TransportError::Gone { .. }) => to.elements * message.parcel.element_bytes(),
                Err(error) => return Err(error),
            };
        }
        for Incoming { from, parcel } in incoming.iter_mut() {
            let (buffer, wrong) = self.wait(self.rank, from.peer, round, since, |slots| {
                Self::filled(*from, slots)
            })?;
            **parcel = buffer;
            if let Some(got) = wrong {
                return Err(TransportError::Size {
                    rank: self.rank,
                    peer: from.peer,
                    round,
                    got,
                    expected: from.elements,
                });
            }
            moved.received_bytes += from.elements * parcel.element_bytes();
        }
        Ok(moved)
    }
}

impl<B: WireBuffer> Transport<B> for Endpoint<B> {
    fn exchange(
        &mut self,
        round: usize,
        outgoing: &[Outgoing<'_, B>],
        incoming: &mut [Incoming<'_, B>],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Moved, TransportError> {
        let moved = self.hop(round, outgoing, incoming, meanwhile);
        if matches!(moved, Err(TransportError::Gone { .. })) {
            self.reclaim(incoming);
        }
        self.hub.council.sign();
        moved
    }
}

impl<B: WireBuffer> Survivors<B> for Endpoint<B> {
    fn agree(&mut self, standing: RankProgress) -> Result<Agreement, TransportError> {
        let (rank, limit, round) = (self.rank, self.hub.deadline, standing.done);
        let epoch = self.hub.council.come(rank, standing);
        self.hub.wake();
        let failure = || self.hub.failure();
        let agreed = self.hub.council.agreement(epoch, limit, failure);
        agreed.map_err(|discord| match discord {
            AgreementError::Silence { peer, waited } => TransportError::Deadline {
                rank,
                peer,
                round,
                waited,
                limit,
            },
            AgreementError::Failed { peer, reason } => TransportError::PeerFailed {
                rank,
                peer,
                round,
                reason,
            },
        })
    }

    fn give_up(&mut self, reason: &str) {
        self.hub.fail(self.rank, reason.to_string());
    }
}
