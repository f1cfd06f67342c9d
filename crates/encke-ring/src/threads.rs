//! The transport between ranks that are threads of one process.
//!
//! A rank posts a receive by moving the buffer into its own inbox. The sender takes it from there,
//! fills it and puts it back; the receiver takes it back. So a message is one copy, needs no memory
//! beyond the plan's buffers, and a sender that is ahead waits until its peer has posted, as it
//! would on a network card.
//!
//! An inactive rank (dead, or done with its epoch) posts nothing and fills nothing: messages to it
//! are dropped, and a rank that waits for it stops.
//!
//! Each rank records which peer it waits for. A rank whose deadline expires blames the end of the
//! chain of waiting ranks, not the peer that waits itself.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use encke_core::plan::membership::{Agreement, RankProgress};
use encke_core::transport::{
    Address, Incoming, Moved, Outgoing, Survivors, Transport, TransportError, WireBuffer,
};

use crate::membership::{AgreementError, Membership};

/// What the endpoints of all ranks share.
#[derive(Debug)]
pub struct ThreadGroup<B> {
    inboxes: Vec<Inbox<B>>,
    failure: Mutex<Option<(usize, String)>>,
    membership: Membership,
    /// The peer that each rank waits for.
    waits_for: Mutex<Vec<Option<usize>>>,
    deadline: Duration,
}

#[derive(Debug)]
struct Inbox<B> {
    /// Posted receives by (sender, tag).
    slots: Mutex<HashMap<(usize, u64), InboxSlot<B>>>,
    changed: Condvar,
}

#[derive(Debug)]
enum InboxSlot<B> {
    /// Posted, to be filled with this many elements.
    Posted(B, usize),
    /// The sender is copying into it.
    Filling,
    /// Complete.
    Full(B),
    /// The sender had this other number of elements.
    Wrong(B, usize),
}

/// One rank's end of the transport.
#[derive(Debug)]
pub struct Endpoint<B> {
    rank: usize,
    group: Arc<ThreadGroup<B>>,
}

/// Endpoints for `ranks` ranks; no exchange waits longer than `deadline` for a peer.
pub fn endpoints<B: WireBuffer>(ranks: usize, deadline: Duration) -> Vec<Endpoint<B>> {
    let inboxes = (0..ranks).map(|_| Inbox {
        slots: Mutex::new(HashMap::new()),
        changed: Condvar::new(),
    });
    let group = Arc::new(ThreadGroup {
        inboxes: inboxes.collect(),
        failure: Mutex::new(None),
        membership: Membership::new(ranks),
        waits_for: Mutex::new(vec![None; ranks]),
        deadline,
    });
    let endpoint = |rank| Endpoint {
        rank,
        group: Arc::clone(&group),
    };
    (0..ranks).map(endpoint).collect()
}

/// A poisoned lock still guards valid data here: every change under it is a single insert or take.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<B> ThreadGroup<B> {
    /// The rank that failed first, and its error.
    pub fn failure(&self) -> Option<(usize, String)> {
        lock(&self.failure).clone()
    }

    /// Stops every rank because `rank` failed. Only the first failure is kept.
    pub fn fail(&self, rank: usize, reason: String) {
        lock(&self.failure).get_or_insert((rank, reason));
        self.membership.wake();
        self.wake();
    }

    /// Marks a rank as dead, where the others can continue without it.
    pub fn mark_dead(&self, rank: usize) {
        self.membership.mark_dead(rank);
        self.wake();
    }

    /// The end of the chain of waiting ranks that begins with `peer`.
    fn last_waited_for(&self, peer: usize) -> usize {
        let waits_for = lock(&self.waits_for);
        let next = |rank: &usize| waits_for.get(*rank).copied().flatten();
        // A cycle of waiting ranks has no end; then it is `peer`.
        let chain = std::iter::successors(Some(peer), next).take(waits_for.len() + 1);
        chain
            .last()
            .filter(|last| next(last).is_none())
            .unwrap_or(peer)
    }

    /// Wakes every rank that waits at an inbox, so that it checks for failures and deaths.
    fn wake(&self) {
        for inbox in &self.inboxes {
            // Taking the lock orders this after any check that a waiter has just made.
            drop(lock(&inbox.slots));
            inbox.changed.notify_all();
        }
    }
}

impl<B: WireBuffer> Endpoint<B> {
    /// What all endpoints share, to report failures and deaths of this rank.
    pub fn group(&self) -> Arc<ThreadGroup<B>> {
        Arc::clone(&self.group)
    }

    /// Waits for `peer`, at the inbox of `owner`, until `ready` returns a value.
    fn wait<R>(
        &self,
        owner: usize,
        peer: usize,
        round: usize,
        since: Instant,
        ready: impl FnMut(&mut HashMap<(usize, u64), InboxSlot<B>>) -> Option<R>,
    ) -> Result<R, TransportError> {
        lock(&self.group.waits_for)[self.rank] = Some(peer);
        let found = self.wait_at(owner, peer, round, since, ready);
        lock(&self.group.waits_for)[self.rank] = None;
        found
    }

    fn wait_at<R>(
        &self,
        owner: usize,
        peer: usize,
        round: usize,
        since: Instant,
        mut ready: impl FnMut(&mut HashMap<(usize, u64), InboxSlot<B>>) -> Option<R>,
    ) -> Result<R, TransportError> {
        let inbox = &self.group.inboxes[owner];
        let limit = self.group.deadline;
        let mut slots = lock(&inbox.slots);
        loop {
            if let Some(found) = ready(&mut slots) {
                return Ok(found);
            }
            if let Some((failed, reason)) = self.group.failure() {
                return Err(TransportError::PeerFailed {
                    rank: self.rank,
                    peer: failed,
                    round,
                    reason,
                });
            }
            if self.group.membership.is_inactive(peer) {
                let rank = self.rank;
                return Err(TransportError::Gone { rank, peer, round });
            }
            let waited = since.elapsed();
            let Some(left) = limit.checked_sub(waited).filter(|left| !left.is_zero()) else {
                return Err(TransportError::Deadline {
                    rank: self.rank,
                    peer: self.group.last_waited_for(peer),
                    round,
                    waited,
                    limit,
                });
            };
            let woken = inbox.changed.wait_timeout(slots, left);
            slots = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Fills the buffer that a peer has posted, and counts the bytes.
    fn deliver(&self, parcel: &B, to: Address, (mut buffer, expected): (B, usize)) -> usize {
        let bytes = to.elements * parcel.element_bytes();
        let slot = if to.elements == expected {
            buffer.copy_from(parcel, to.elements);
            InboxSlot::Full(buffer)
        } else {
            InboxSlot::Wrong(buffer, to.elements)
        };
        let inbox = &self.group.inboxes[to.peer];
        lock(&inbox.slots).insert((self.rank, to.tag), slot);
        inbox.changed.notify_all();
        bytes
    }

    /// Takes the buffer that a peer has posted for `rank`, if it has.
    fn posted(
        rank: usize,
        tag: u64,
        slots: &mut HashMap<(usize, u64), InboxSlot<B>>,
    ) -> Option<(B, usize)> {
        let slot = slots.get_mut(&(rank, tag))?;
        if !matches!(slot, InboxSlot::Posted(..)) {
            return None;
        }
        match std::mem::replace(slot, InboxSlot::Filling) {
            InboxSlot::Posted(buffer, expected) => Some((buffer, expected)),
            _ => None,
        }
    }

    /// Takes a buffer that a peer has filled for this rank, if it has.
    fn filled(
        from: Address,
        slots: &mut HashMap<(usize, u64), InboxSlot<B>>,
    ) -> Option<(B, Option<usize>)> {
        let key = (from.peer, from.tag);
        match slots.get(&key)? {
            InboxSlot::Full(_) | InboxSlot::Wrong(..) => {}
            InboxSlot::Posted(..) | InboxSlot::Filling => return None,
        }
        match slots.remove(&key)? {
            InboxSlot::Full(buffer) => Some((buffer, None)),
            InboxSlot::Wrong(buffer, got) => Some((buffer, Some(got))),
            InboxSlot::Posted(..) | InboxSlot::Filling => None,
        }
    }
}

impl<B: WireBuffer> Endpoint<B> {
    /// Takes back the buffers posted for an exchange that will not complete.
    fn reclaim(&self, incoming: &mut [Incoming<'_, B>]) {
        let inbox = &self.group.inboxes[self.rank];
        let mut slots = lock(&inbox.slots);
        for Incoming { from, parcel } in incoming.iter_mut() {
            let key = (from.peer, from.tag);
            // A sender that is copying does not wait for anything.
            while matches!(slots.get(&key), Some(InboxSlot::Filling)) {
                let woken = inbox.changed.wait(slots);
                slots = woken.unwrap_or_else(PoisonError::into_inner);
            }
            match slots.remove(&key) {
                Some(
                    InboxSlot::Posted(buffer, _)
                    | InboxSlot::Full(buffer)
                    | InboxSlot::Wrong(buffer, _),
                ) => {
                    **parcel = buffer;
                }
                Some(InboxSlot::Filling) | None => {}
            }
        }
    }

    fn transfer(
        &mut self,
        round: usize,
        outgoing: &[Outgoing<'_, B>],
        incoming: &mut [Incoming<'_, B>],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Moved, TransportError> {
        let mut moved = Moved::default();
        let own = &self.group.inboxes[self.rank];
        let enqueued = incoming.iter().any(|message| message.parcel.is_enqueued());
        if enqueued {
            meanwhile();
        }
        for Incoming { parcel, .. } in incoming.iter_mut() {
            parcel.vacate(round);
        }
        if !incoming.is_empty() {
            let mut slots = lock(&own.slots);
            for Incoming { from, parcel } in incoming.iter_mut() {
                let posted = InboxSlot::Posted(parcel.take(), from.elements);
                slots.insert((from.peer, from.tag), posted);
            }
            drop(slots);
            // A call of the system, even if no rank waits.
            own.changed.notify_all();
        }

        // Peers that have posted already are served before computing, the others after.
        let mut late: Vec<&Outgoing<'_, B>> = Vec::new();
        for message in outgoing {
            let to = message.to;
            let posted = {
                let mut slots = lock(&self.group.inboxes[to.peer].slots);
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
                // The peer is dead or has left the epoch: the message is dropped.
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
        let moved = self.transfer(round, outgoing, incoming, meanwhile);
        if matches!(moved, Err(TransportError::Gone { .. })) {
            self.reclaim(incoming);
        }
        self.group.membership.record_activity();
        moved
    }
}

impl<B: WireBuffer> Survivors<B> for Endpoint<B> {
    fn agree(&mut self, progress: RankProgress) -> Result<Agreement, TransportError> {
        let (rank, limit, round) = (self.rank, self.group.deadline, progress.done);
        let epoch = self.group.membership.report(rank, progress);
        self.group.wake();
        let failure = || self.group.failure();
        let agreed = self.group.membership.agreement(epoch, limit, failure);
        agreed.map_err(|error| match error {
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
        self.group.fail(self.rank, reason.to_string());
    }
}
