//! The transport between processes.
//!
//! While a rank computes, a thread of the exchange is the only one that calls MPI: it computes and
//! checks checksums and polls the messages, because MPI may progress only inside its calls. It
//! polls at intervals, so that the cores are left to the jobs, and ends with the last message.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use encke_core::transport::{
    Address, HostWireBuffer, Incoming, Moved, Outgoing, Transport, TransportError,
};
use encke_ring::envelope::PostedReceive;

use crate::error::MpiError;
use crate::exchange::{Exchange, ExchangeError, LONGEST};
use crate::failure_listener::FailureListener;
use crate::sys::{self, CallFailure, ErrorClass, MpiCommunicator};
use crate::watchdog::Watchdog;
use crate::wire_format::FailureNotice;

/// How long a failed exchange waits for MPI to release its buffers.
const CANCEL_LIMIT: Duration = Duration::from_millis(300);
/// How long a rank whose communicator was revoked waits for a notice with the reason; as a rule it
/// arrives within milliseconds. Shorter than the ranks that have the reason stay alive: the
/// launcher would end this process with them before it has reported anything.
const NOTICE_LIMIT: Duration = Duration::from_secs(1);
/// How long calls that should not block may take beyond the deadline before they count as hung.
pub(crate) const SLACK: Duration = Duration::from_secs(3);
/// Between two polls while the rank computes: messages progress, and the cores are left to the
/// jobs.
const COMPUTE_POLL: Duration = Duration::from_micros(100);
/// Between two polls while the rank waits, after the first [`SPINS`].
const WAIT_POLL: Duration = Duration::from_micros(30);
/// Polls without a pause when a rank begins to wait.
const SPINS: usize = 200;
/// One more for each so many bytes: MPI moves a fragment of a long message in each of its calls
/// where one process cannot read another's memory; pauses between them would be most of the time.
const BYTES_PER_SPIN: usize = 16 << 10;

/// One rank's end of the transport. Ranks keep their numbers when others die.
#[derive(Debug)]
pub struct MpiTransport {
    pub(crate) comm: MpiCommunicator,
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    /// The rank in `comm` of each rank; `None` if it has died.
    pub(crate) comm_ranks: Vec<Option<usize>>,
    pub(crate) deadline: Duration,
    longest: usize,
    call: u64,
    /// The round of the last exchange.
    pub(crate) round: usize,
    pub(crate) listener: FailureListener,
    pub(crate) failed: Option<TransportError>,
    /// Whether a process has died.
    pub(crate) has_deaths: bool,
    /// Whether the remaining ranks continue when one dies.
    survives: bool,
    library: String,
    /// Set when MPI may still use buffers that are freed: it must not run again.
    must_not_finalize: Arc<AtomicBool>,
    pub(crate) watchdog: Arc<Watchdog>,
}

impl MpiTransport {
    pub(crate) fn new(
        comm: MpiCommunicator,
        deadline: Duration,
        library: String,
        must_not_finalize: Arc<AtomicBool>,
        watchdog: Arc<Watchdog>,
    ) -> Result<MpiTransport, MpiError> {
        let failed = |failure: CallFailure| failure.during("opening the transport");
        let ranks = comm.size().map_err(failed)?;
        Ok(MpiTransport {
            comm,
            rank: comm.rank().map_err(failed)?,
            ranks,
            comm_ranks: (0..ranks).map(Some).collect(),
            deadline,
            longest: LONGEST,
            call: 0,
            round: 0,
            listener: FailureListener::new(comm).map_err(failed)?,
            failed: None,
            has_deaths: false,
            survives: false,
            library,
            must_not_finalize,
            watchdog,
        })
    }

    /// The error of an MPI call that blocks on `peer`.
    fn timeout_error(
        &self,
        round: usize,
        peer: usize,
    ) -> impl Fn(Duration) -> MpiError + Clone + use<> {
        let (rank, limit) = (self.rank, self.deadline);
        move |waited| {
            MpiError::Transport(TransportError::Deadline {
                rank,
                peer,
                round,
                waited,
                limit,
            })
        }
    }

    /// Arms the watchdog: the calls that follow must return within the deadline.
    pub(crate) fn watch_until_deadline(&self, peer: usize) {
        let error = self.timeout_error(self.round, peer);
        self.watchdog.arm(self.deadline + SLACK, error);
    }

    /// Arms the watchdog after a failure: the calls that follow must return at once.
    fn watch_after(&self, error: &TransportError) {
        let error = error.clone();
        self.watchdog.arm(SLACK, move |_| error.into());
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks at the start.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// How long an exchange may wait for another rank.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Sets how long an exchange may wait for another rank.
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    /// Sets the longest piece in which contents are sent; it must be the same on all ranks.
    pub fn set_longest_piece(&mut self, bytes: usize) {
        self.longest = bytes.clamp(1, LONGEST);
    }

    /// Begins another call, whose rounds count from 0. All ranks must do the same.
    pub fn begin(&mut self) {
        self.call += 1;
    }

    /// Notifies all other ranks that this one cannot continue, for a reason other than the
    /// transport.
    pub fn give_up(&mut self, reason: &str) {
        if self.failed.is_some() || self.must_not_finalize.load(Ordering::Relaxed) {
            return;
        }
        let notice = FailureNotice {
            failed: self.rank,
            reason: reason.to_string(),
        };
        let error = self.peer_failed(self.rank, 0, notice.reason.clone());
        self.watch_after(&error);
        self.notify(&notice);
        self.watchdog.disarm();
        self.failed = Some(error);
    }

    /// Makes the call survive deaths: exchanges with a dead rank fail with
    /// [`TransportError::Gone`], and the others can continue. All ranks must do the same.
    pub fn survive(&mut self) -> Result<(), MpiError> {
        if !sys::ulfm() {
            let library = self.library.clone();
            return Err(MpiError::NoUlfm { library });
        }
        self.survives = true;
        Ok(())
    }

    /// The living ranks, ascending.
    pub fn members(&self) -> Vec<usize> {
        let lives = |rank: &usize| self.comm_ranks[*rank].is_some();
        (0..self.ranks).filter(lives).collect()
    }

    /// Stops listening; returns whether all ranks can finalize MPI together.
    pub(crate) fn close(mut self) -> bool {
        if self.failed.is_some() || self.has_deaths {
            return false;
        }
        self.listener.close();
        true
    }

    /// Sends a notice to every other living rank.
    fn notify(&self, notice: &FailureNotice) {
        let others = self.comm_ranks.iter().enumerate();
        let others = others.filter(|(rank, _)| *rank != self.rank && *rank != notice.failed);
        self.listener
            .notify(notice, others.filter_map(|(_, comm_rank)| *comm_rank));
    }

    /// The rank of a peer in `comm`; an error if the peer is dead.
    fn comm_rank(&self, peer: usize, round: usize) -> Result<usize, TransportError> {
        let comm_rank = self.comm_ranks.get(peer).copied().flatten();
        comm_rank.ok_or_else(|| self.death_error(peer, round))
    }

    pub(crate) fn peer_failed(&self, peer: usize, round: usize, reason: String) -> TransportError {
        let rank = self.rank;
        TransportError::PeerFailed {
            rank,
            peer,
            round,
            reason,
        }
    }

    /// The error of a failure notice, if one has arrived.
    pub(crate) fn poll_notice(
        &mut self,
        round: usize,
    ) -> Result<Option<TransportError>, CallFailure> {
        let notice = self.listener.poll()?.cloned();
        Ok(notice.map(|notice| self.peer_failed(notice.failed, round, notice.reason)))
    }

    fn gone(&self, peer: usize, round: usize) -> TransportError {
        TransportError::Gone {
            rank: self.rank,
            peer,
            round,
        }
    }

    /// The error of an exchange with a dead peer.
    fn death_error(&self, peer: usize, round: usize) -> TransportError {
        if self.survives {
            return self.gone(peer, round);
        }
        self.peer_failed(peer, round, "its process ended".to_string())
    }

    /// Posts all messages of an exchange: receives first.
    fn post<'a, B: HostWireBuffer>(
        &self,
        round: usize,
        outgoing: &'a [Outgoing<'_, B>],
        incoming: &'a mut [Incoming<'_, B>],
        exchange: &mut Exchange<'a>,
    ) -> Result<(), ExchangeError> {
        let (rank, call) = (self.rank, self.call);
        let indices_from = indices(incoming.iter().map(|message| message.from));
        for (Incoming { from, parcel }, index) in incoming.iter_mut().zip(indices_from) {
            let from = *from;
            let posted = PostedReceive {
                rank,
                call,
                round,
                from,
            };
            let contents = parcel.host_bytes_mut(from.elements);
            let comm_rank = self.comm_rank(from.peer, round);
            let comm_rank = comm_rank.map_err(ExchangeError::Message)?;
            exchange.receive(posted, (comm_rank, index), contents, self.longest)?;
        }
        let indices_to = indices(outgoing.iter().map(|message| message.to));
        for (Outgoing { to, parcel }, index) in outgoing.iter().zip(indices_to) {
            let contents = parcel.host_bytes(to.elements);
            let comm_rank = self.comm_rank(to.peer, round);
            let comm_rank = comm_rank.map_err(ExchangeError::Message)?;
            exchange.send(*to, (comm_rank, index), contents, self.longest)?;
        }
        Ok(())
    }

    /// Polls the messages of an exchange until all are complete. `idle` is the time at which the
    /// rank began to wait for them, once it has.
    fn complete(
        &mut self,
        round: usize,
        exchange: &mut Exchange<'_>,
        idle: &OnceLock<Instant>,
    ) -> Result<Moved, TransportError> {
        let (rank, call) = (self.rank, self.call);
        let sent = exchange.send_envelopes(rank, call, round);
        sent.map_err(|error| self.transport_error(round, error))?;
        let mut polls = 0;
        let spins = SPINS + exchange.bytes() / BYTES_PER_SPIN;
        loop {
            self.check_notices(round)?;
            match exchange.poll() {
                Ok(true) => return Ok(exchange.moved()),
                Ok(false) => {}
                Err(error) => return Err(self.transport_error(round, error)),
            }
            let Some(since) = idle.get() else {
                std::thread::sleep(COMPUTE_POLL);
                continue;
            };
            let (waited, limit) = (since.elapsed(), self.deadline);
            if waited > limit {
                return Err(TransportError::Deadline {
                    rank,
                    peer: exchange.pending_peer().unwrap_or(rank),
                    round,
                    waited,
                    limit,
                });
            }
            polls += 1;
            match polls < spins {
                true => std::thread::yield_now(),
                false => std::thread::sleep(WAIT_POLL),
            }
        }
    }

    /// Fails if another rank has failed.
    fn check_notices(&mut self, round: usize) -> Result<(), TransportError> {
        match self.poll_notice(round) {
            Ok(None) => Ok(()),
            Ok(Some(error)) => Err(error),
            Err(failure) => {
                Err(self.transport_error(round, ExchangeError::Call(self.rank, failure)))
            }
        }
    }

    /// The transport's error for a failed exchange; finds out which rank died or why the
    /// communicator was revoked.
    fn transport_error(&mut self, round: usize, error: ExchangeError) -> TransportError {
        let (peer, failure) = match error {
            ExchangeError::Message(error) => return error,
            ExchangeError::Call(peer, failure) => (peer, failure),
        };
        let dead_or_revoked = matches!(failure.class, ErrorClass::Dead | ErrorClass::Revoked);
        if self.survives && dead_or_revoked {
            self.has_deaths = true;
            return self.gone(peer, round);
        }
        // Which rank died, or the notice of the rank that revoked, may take a moment to arrive.
        let (start, limit) = (Instant::now(), NOTICE_LIMIT.min(self.deadline));
        while dead_or_revoked && start.elapsed() < limit {
            // The calls below make no progress once every request has ended.
            sys::progress();
            let dead = self.comm.failed().unwrap_or_default();
            let named = dead.iter().find_map(|comm_rank| {
                let is = |of: &Option<usize>| *of == Some(*comm_rank);
                self.comm_ranks.iter().position(is)
            });
            if let Some(peer) = named {
                self.has_deaths = true;
                return self.death_error(peer, round);
            }
            if let Ok(Some(error)) = self.poll_notice(round) {
                return error;
            }
            std::thread::sleep(WAIT_POLL);
        }
        let reason = match failure.class {
            ErrorClass::Revoked => "a rank ended the call without giving a reason".to_string(),
            _ => failure.message,
        };
        let other = if peer == self.rank {
            self.any_other_rank()
        } else {
            peer
        };
        self.peer_failed(other, round, reason)
    }

    /// Cleans up after a failure: notifies the others and cancels the messages. Returns the indices
    /// of the receives whose buffers MPI does not release.
    fn abandon(&mut self, error: &TransportError, exchange: &mut Exchange<'_>) -> Vec<usize> {
        self.watch_after(error);
        let failed = match error {
            TransportError::PeerFailed { peer, .. } => *peer,
            _ => self.rank,
        };
        let gone = matches!(error, TransportError::Gone { .. });
        // A notice from another rank is not repeated.
        if !gone && !matches!(self.listener.poll(), Ok(Some(_))) {
            let reason = match error {
                TransportError::PeerFailed { reason, .. } => reason.clone(),
                other => other.to_string(),
            };
            self.notify(&FailureNotice { failed, reason });
        }
        // Revoking ends every request; without it a send cannot be cancelled. Where deaths are
        // survived, an error that is no death must not look like one.
        if sys::ulfm() && (gone || !self.survives) {
            let _ = self.comm.revoke();
        }
        let (stuck, read) = exchange.cancel(CANCEL_LIMIT);
        if read {
            // If MPI ran again, it might read buffers that the caller has freed.
            self.must_not_finalize.store(true, Ordering::Relaxed);
        }
        self.failed = Some(error.clone());
        stuck
    }
}

/// A peer of an exchange: of a receive if there is one, otherwise of a send.
fn first_peer<B>(outgoing: &[Outgoing<'_, B>], incoming: &[Incoming<'_, B>]) -> Option<usize> {
    let receive = incoming.first().map(|message| message.from.peer);
    receive.or(outgoing.first().map(|message| message.to.peer))
}

/// The index of each message among those with the same peer, in the order of their tags. Both ends
/// compute the same indices, in whatever order they post.
fn indices(addresses: impl Iterator<Item = Address>) -> Vec<usize> {
    let addresses: Vec<Address> = addresses.collect();
    let mut order: Vec<usize> = (0..addresses.len()).collect();
    order.sort_by_key(|&at| (addresses[at].peer, addresses[at].tag));
    let mut next: HashMap<usize, usize> = HashMap::new();
    let mut indices = vec![0; addresses.len()];
    for at in order {
        let index = next.entry(addresses[at].peer).or_default();
        indices[at] = *index;
        *index += 1;
    }
    indices
}

impl<B: HostWireBuffer> Transport<B> for MpiTransport {
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
        self.watch_until_deadline(peer);
        let idle = OnceLock::new();
        let mut exchange = Exchange::new(self.comm);
        let posted = self.post(round, outgoing, incoming, &mut exchange);
        let mut computed = Ok(());
        let (watchdog, limit) = (Arc::clone(&self.watchdog), self.deadline + SLACK);
        let timeout_error = self.timeout_error(round, peer);
        let mut compute = || {
            watchdog.disarm();
            computed = catch_unwind(AssertUnwindSafe(&mut *meanwhile));
            let _ = idle.set(Instant::now());
            watchdog.arm(limit, timeout_error.clone());
        };
        let completed = match posted {
            Err(error) => {
                compute();
                Err(self.transport_error(round, error))
            }
            Ok(()) => {
                let (transport, messages) = (&mut *self, &mut exchange);
                let overlapped = std::thread::scope(|scope| {
                    let thread = std::thread::Builder::new().name("encke-hops".to_string());
                    let complete = || transport.complete(round, messages, &idle);
                    let thread = thread.spawn_scoped(scope, complete).ok()?;
                    compute();
                    Some(thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
                });
                // If no thread can be started, messages progress after the computation.
                overlapped.unwrap_or_else(|| {
                    compute();
                    self.complete(round, &mut exchange, &idle)
                })
            }
        };
        let stuck = match &completed {
            Ok(_) => Vec::new(),
            Err(error) => self.abandon(error, &mut exchange),
        };
        drop(exchange);
        self.watchdog.disarm();
        for at in stuck {
            std::mem::forget(incoming[at].parcel.take());
        }
        // A panic of the computation continues once MPI has released the caller's buffers.
        if let Err(panic) = computed {
            resume_unwind(panic);
        }
        completed
    }
}
