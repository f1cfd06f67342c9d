//! The transport between processes.
//!
//! While a rank computes, a thread of this exchange alone calls MPI: it makes and checks checksums
//! and moves messages along, because MPI may move them only inside its calls. It looks now and then
//! rather than all the time, and ends with the last message.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use encke_core::transport::{
    Address, HostWireBuffer, Incoming, Moved, Outgoing, Transport, TransportError,
};
use encke_ring::envelope::PostedReceive;

use crate::alarm::Alarm;
use crate::error::MpiError;
use crate::flight::{Flight, LONGEST, Trouble};
use crate::sys::{self, Class, Comm, Fault};
use crate::watchdog::Watchdog;
use crate::words::Notice;

/// How long MPI is given to let go of the buffers of an exchange that failed.
const CALL_BACK: Duration = Duration::from_millis(300);
/// How long a rank that only learns that something was revoked waits to hear why, at most: as a rule
/// it hears within milliseconds. Shorter than those stay who know it already, or the launcher would end
/// this one before it has said anything.
const HEARSAY: Duration = Duration::from_secs(1);
/// How long calls that do not wait may take, beyond what is waited for, before they hang.
const SLACK: Duration = Duration::from_secs(3);
/// Between two looks while the rank computes: a hop is moved along, the cores are the jobs'.
const GLANCE: Duration = Duration::from_micros(100);
/// Between two looks while the rank waits, after the first [`EAGER`] ones.
const WATCH: Duration = Duration::from_micros(30);
/// Looks without a pause when a rank begins to wait.
const EAGER: usize = 200;

/// One rank's end of the wire. Ranks keep the numbers they were born with.
#[derive(Debug)]
pub struct Wire {
    pub(crate) comm: Comm,
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    /// Where each rank is in `comm`; none where it has died.
    pub(crate) places: Vec<Option<usize>>,
    pub(crate) deadline: Duration,
    longest: usize,
    call: u64,
    /// The round of the last exchange.
    pub(crate) round: usize,
    pub(crate) alarm: Alarm,
    pub(crate) failed: Option<TransportError>,
    /// Whether a process has died.
    pub(crate) dead: bool,
    /// Whether the others go on when one dies.
    survives: bool,
    library: String,
    spoiled: Arc<AtomicBool>,
    pub(crate) watchdog: Arc<Watchdog>,
}

impl Wire {
    pub(crate) fn new(
        comm: Comm,
        deadline: Duration,
        library: String,
        spoiled: Arc<AtomicBool>,
    ) -> Result<Wire, MpiError> {
        let failed = |fault: Fault| fault.during("opening the wire");
        let ranks = comm.size().map_err(failed)?;
        Ok(Wire {
            comm,
            rank: comm.rank().map_err(failed)?,
            ranks,
            places: (0..ranks).map(Some).collect(),
            deadline,
            longest: LONGEST,
            call: 0,
            round: 0,
            alarm: Alarm::new(comm).map_err(failed)?,
            failed: None,
            dead: false,
            survives: false,
            library,
            spoiled,
            watchdog: Arc::default(),
        })
    }

    /// Calls `hung`, on a thread of its own, when a call of MPI that ought to return does not, with
    /// the error that this rank would have ended with. MPI cannot be left then: end the process.
    pub fn watch(&mut self, hung: impl FnOnce(TransportError) + Send + 'static) {
        // Where no thread is to be had, nothing is watched.
        self.watchdog = Arc::new(Watchdog::start(hung).unwrap_or_default());
    }

    /// What it means when MPI does not come back from waiting for `peer`.
    fn late(
        &self,
        round: usize,
        peer: usize,
    ) -> impl Fn(Duration) -> TransportError + Clone + use<> {
        let (rank, limit) = (self.rank, self.deadline);
        move |waited| TransportError::Deadline {
            rank,
            peer,
            round,
            waited,
            limit,
        }
    }

    /// From now on MPI must come back within the deadline.
    pub(crate) fn expect_in_time(&self, peer: usize) {
        let late = self.late(self.round, peer);
        self.watchdog.expect(self.deadline + SLACK, late);
    }

    /// From now on MPI must come back at once; this is what is wrong already.
    fn expect_at_once(&self, error: &TransportError) {
        let error = error.clone();
        self.watchdog.expect(SLACK, move |_| error);
    }

    /// The number of this rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there were at the beginning.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// How long an exchange may wait for another rank from now on.
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    /// Sends contents in pieces of so many bytes from now on; all ranks must do the same.
    pub fn set_longest_piece(&mut self, bytes: usize) {
        self.longest = bytes.clamp(1, LONGEST);
    }

    /// Begins another call: rounds are counted from 0 again. All ranks must do the same.
    pub fn begin(&mut self) {
        self.call += 1;
    }

    /// Tells all other ranks that this one cannot go on, for a reason that is not the wire's.
    pub fn give_up(&mut self, reason: &str) {
        if self.failed.is_some() || self.spoiled.load(Ordering::Relaxed) {
            return;
        }
        let notice = Notice {
            about: self.rank,
            reason: reason.to_string(),
        };
        let error = TransportError::PeerFailed {
            rank: self.rank,
            peer: self.rank,
            round: 0,
            reason: notice.reason.clone(),
        };
        self.expect_at_once(&error);
        self.tell(&notice);
        self.watchdog.relax();
        self.failed = Some(error);
    }

    /// Lets the others go on when a rank dies, from now on: exchanges then end with
    /// [`TransportError::Gone`]. All ranks must do the same.
    pub fn survive(&mut self) -> Result<(), MpiError> {
        if !sys::ulfm() {
            let library = self.library.clone();
            return Err(MpiError::NoUlfm { library });
        }
        self.survives = true;
        Ok(())
    }

    /// The ranks that are left, rising.
    pub fn members(&self) -> Vec<usize> {
        let left = |rank: &usize| self.places[*rank].is_some();
        (0..self.ranks).filter(left).collect()
    }

    /// Stops listening; whether all ranks are still there to end MPI together.
    pub(crate) fn close(mut self) -> bool {
        if self.failed.is_some() || self.dead {
            return false;
        }
        self.alarm.close();
        true
    }

    /// Sends a notice to every other rank that is left.
    fn tell(&self, notice: &Notice) {
        let others = self.places.iter().enumerate();
        let others = others.filter(|(rank, _)| *rank != self.rank && *rank != notice.about);
        self.alarm
            .raise(notice, others.filter_map(|(_, place)| *place));
    }

    /// The process that has `rank`'s number, or that it is dead.
    fn place(&self, rank: usize, round: usize) -> Result<usize, TransportError> {
        let place = self.places.get(rank).copied().flatten();
        place.ok_or_else(|| self.ended(rank, round))
    }

    fn gone(&self, peer: usize, round: usize) -> TransportError {
        TransportError::Gone {
            rank: self.rank,
            peer,
            round,
        }
    }

    fn ended(&self, peer: usize, round: usize) -> TransportError {
        if self.survives {
            return self.gone(peer, round);
        }
        TransportError::PeerFailed {
            rank: self.rank,
            peer,
            round,
            reason: "its process ended".to_string(),
        }
    }

    /// Posts everything: receives first.
    fn post<'a, B: HostWireBuffer>(
        &self,
        round: usize,
        outgoing: &'a [Outgoing<'_, B>],
        incoming: &'a mut [Incoming<'_, B>],
        flight: &mut Flight<'a>,
    ) -> Result<(), Trouble> {
        let (rank, call) = (self.rank, self.call);
        let numbers = indices(incoming.iter().map(|message| message.from));
        for (Incoming { from, parcel }, index) in incoming.iter_mut().zip(numbers) {
            let from = *from;
            let posted = PostedReceive {
                rank,
                call,
                round,
                from,
            };
            let contents = parcel.host_bytes_mut(from.elements);
            let place = self.place(from.peer, round).map_err(Trouble::Message)?;
            flight.await_from(posted, (place, index), contents, self.longest)?;
        }
        let numbers = indices(outgoing.iter().map(|message| message.to));
        for (Outgoing { to, parcel }, index) in outgoing.iter().zip(numbers) {
            let contents = parcel.host_bytes(to.elements);
            let place = self.place(to.peer, round).map_err(Trouble::Message)?;
            flight.send_to(*to, (place, index), contents, self.longest)?;
        }
        Ok(())
    }

    /// Moves the messages of a flight until all have landed. `idle` is when the rank began to
    /// wait for them, once it has.
    fn land(
        &mut self,
        round: usize,
        flight: &mut Flight<'_>,
        idle: &OnceLock<Instant>,
    ) -> Result<Moved, TransportError> {
        let (rank, call) = (self.rank, self.call);
        let lettered = flight.send_letters(rank, call, round);
        lettered.map_err(|trouble| self.explain(round, trouble))?;
        let mut looks = 0;
        loop {
            self.listen(round)?;
            match flight.poll() {
                Ok(true) => return Ok(flight.moved()),
                Ok(false) => {}
                Err(trouble) => return Err(self.explain(round, trouble)),
            }
            let Some(since) = idle.get() else {
                std::thread::sleep(GLANCE);
                continue;
            };
            let (waited, limit) = (since.elapsed(), self.deadline);
            if waited > limit {
                return Err(TransportError::Deadline {
                    rank,
                    peer: flight.awaited().unwrap_or(rank),
                    round,
                    waited,
                    limit,
                });
            }
            looks += 1;
            match looks < EAGER {
                true => std::thread::yield_now(),
                false => std::thread::sleep(WATCH),
            }
        }
    }

    /// Whether another rank has failed.
    fn listen(&mut self, round: usize) -> Result<(), TransportError> {
        let rank = self.rank;
        match self.alarm.heard() {
            Ok(None) => Ok(()),
            Ok(Some(notice)) => Err(TransportError::PeerFailed {
                rank,
                peer: notice.about,
                round,
                reason: notice.reason.clone(),
            }),
            Err(fault) => Err(self.explain(round, Trouble::Fault(rank, fault))),
        }
    }

    /// The transport's error for what MPI said.
    fn explain(&mut self, round: usize, trouble: Trouble) -> TransportError {
        let (peer, fault) = match trouble {
            Trouble::Message(error) => return error,
            Trouble::Fault(peer, fault) => (peer, fault),
        };
        if self.survives && matches!(fault.class, Class::Dead | Class::Revoked) {
            self.dead = true;
            return self.gone(peer, round);
        }
        // Who died, or what somebody said before he revoked the wire, may take a moment to come.
        let (since, limit) = (Instant::now(), HEARSAY.min(self.deadline));
        while matches!(fault.class, Class::Dead | Class::Revoked) && since.elapsed() < limit {
            // What is asked below does not let MPI work once every request has ended.
            sys::let_work();
            let known = self.comm.failed().unwrap_or_default();
            let named = known.iter().find_map(|place| {
                let is = |of: &Option<usize>| *of == Some(*place);
                self.places.iter().position(is)
            });
            if let Some(peer) = named {
                self.dead = true;
                return self.ended(peer, round);
            }
            if let Ok(Some(notice)) = self.alarm.heard() {
                return TransportError::PeerFailed {
                    rank: self.rank,
                    peer: notice.about,
                    round,
                    reason: notice.reason.clone(),
                };
            }
            std::thread::sleep(WATCH);
        }
        let reason = match fault.class {
            Class::Revoked => "somebody ended the call and has not said why".to_string(),
            _ => fault.words,
        };
        TransportError::PeerFailed {
            rank: self.rank,
            peer: if peer == self.rank {
                self.someone_else()
            } else {
                peer
            },
            round,
            reason,
        }
    }

    /// After a failure: others are told, and MPI lets go of the buffers. Those it does not let go
    /// of are named, by their place among the arrivals.
    fn abandon(&mut self, error: &TransportError, flight: &mut Flight<'_>) -> Vec<usize> {
        self.expect_at_once(error);
        let about = match error {
            TransportError::PeerFailed { peer, .. } => *peer,
            _ => self.rank,
        };
        let gone = matches!(error, TransportError::Gone { .. });
        // What was heard from another need not be told again; a death may not have been heard of.
        if !gone && !matches!(self.alarm.heard(), Ok(Some(_))) {
            let reason = match error {
                TransportError::PeerFailed { reason, .. } => reason.clone(),
                other => other.to_string(),
            };
            self.tell(&Notice { about, reason });
        }
        // Revoked, every request of ours ends; without that, a send cannot be called back. What is
        // no death must not look like one to those who would survive it.
        if sys::ulfm() && (gone || !self.survives) {
            let _ = self.comm.revoke();
        }
        let (stuck, read) = flight.call_back(CALL_BACK);
        if read {
            // MPI may read buffers that the caller is free to drop, if it is ever called again.
            self.spoiled.store(true, Ordering::Relaxed);
        }
        self.failed = Some(error.clone());
        stuck
    }
}

/// Somebody an exchange is with: rather one who owes us something.
fn first_peer<B>(outgoing: &[Outgoing<'_, B>], incoming: &[Incoming<'_, B>]) -> Option<usize> {
    let owing = incoming.first().map(|message| message.from.peer);
    owing.or(outgoing.first().map(|message| message.to.peer))
}

/// The number of each message among those with the same peer, in the order of their tags. Both
/// ends come to the same numbers, whatever order they post in.
fn indices(addresses: impl Iterator<Item = Address>) -> Vec<usize> {
    let addresses: Vec<Address> = addresses.collect();
    let mut order: Vec<usize> = (0..addresses.len()).collect();
    order.sort_by_key(|&at| (addresses[at].peer, addresses[at].tag));
    let mut next: HashMap<usize, usize> = HashMap::new();
    let mut numbers = vec![0; addresses.len()];
    for at in order {
        let number = next.entry(addresses[at].peer).or_default();
        numbers[at] = *number;
        *number += 1;
    }
    numbers
}

impl<B: HostWireBuffer> Transport<B> for Wire {
    fn exchange(
        &mut self,
        round: usize,
        outgoing: &[Outgoing<'_, B>],
        incoming: &mut [Incoming<'_, B>],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Moved, TransportError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.round = round;
        if outgoing.is_empty() && incoming.is_empty() {
            meanwhile();
            return Ok(Moved::default());
        }
        let peer = first_peer(outgoing, incoming).unwrap_or(self.rank);
        self.expect_in_time(peer);
        let idle = OnceLock::new();
        let mut flight = Flight::new(self.comm);
        let posted = self.post(round, outgoing, incoming, &mut flight);
        let mut computed = Ok(());
        let (watchdog, limit) = (Arc::clone(&self.watchdog), self.deadline + SLACK);
        let late = self.late(round, peer);
        let mut compute = || {
            watchdog.relax();
            computed = catch_unwind(AssertUnwindSafe(&mut *meanwhile));
            let _ = idle.set(Instant::now());
            watchdog.expect(limit, late.clone());
        };
        let landed = match posted {
            Err(trouble) => {
                compute();
                Err(self.explain(round, trouble))
            }
            Ok(()) => {
                let (wire, flown) = (&mut *self, &mut flight);
                let beside = std::thread::scope(|scope| {
                    let hops = std::thread::Builder::new().name("encke-hops".to_string());
                    let land = || wire.land(round, flown, &idle);
                    let thread = hops.spawn_scoped(scope, land).ok()?;
                    compute();
                    Some(thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
                });
                // Where no thread is to be had, messages move when the rank has computed.
                beside.unwrap_or_else(|| {
                    compute();
                    self.land(round, &mut flight, &idle)
                })
            }
        };
        let stuck = match &landed {
            Ok(_) => Vec::new(),
            Err(error) => self.abandon(error, &mut flight),
        };
        drop(flight);
        self.watchdog.relax();
        for at in stuck {
            std::mem::forget(incoming[at].parcel.take());
        }
        // A panic of the computation is the caller's, once MPI has let go of his buffers.
        if let Err(panic) = computed {
            resume_unwind(panic);
        }
        landed
    }
}
