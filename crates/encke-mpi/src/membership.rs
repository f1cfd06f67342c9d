//! Recovery from deaths: who is left, and how far each rank has come.
//!
//! Every step is agreed on twice: that all ranks are here, and that all have received the result.
//! ULFM's agreements end the same way on all survivors, even if a rank dies during one, so either
//! all continue with the same table or all try again with fewer ranks.

use std::time::{Duration, Instant};

use encke_core::plan::membership::{Agreement, RankProgress};
use encke_core::transport::{HostWireBuffer, Survivors, TransportError};
use encke_ring::collectives::Collectives;

use crate::failure_listener::FailureListener;
use crate::sys::{CallFailure, PendingAgreement};
use crate::transport::MpiTransport;
use crate::wire_format::{PROGRESS_BYTES, decode_progress, encode_progress};

impl MpiTransport {
    /// Waits until every living rank is here. Returns, the same on all, whether all pass `ok` and
    /// no unacknowledged death is known.
    fn agree_all_ok(&mut self, ok: bool) -> Result<bool, TransportError> {
        self.watch_until_deadline(self.any_other_rank());
        let agreed = self.poll_agreement(ok);
        self.watchdog.disarm();
        agreed
    }

    fn poll_agreement(&mut self, ok: bool) -> Result<bool, TransportError> {
        let start = Instant::now();
        let agreement = PendingAgreement::new(self.comm, ok);
        let mut agreement = agreement.map_err(|failure| self.call_failed(failure))?;
        loop {
            match agreement.test() {
                Ok(Some(agreed)) => return Ok(agreed),
                Ok(None) => {}
                Err(failure) => return Err(self.call_failed(failure)),
            }
            if let Ok(Some(error)) = self.poll_notice(self.round) {
                return Err(error);
            }
            let (waited, limit) = (start.elapsed(), self.deadline);
            if waited > limit {
                return Err(TransportError::Deadline {
                    rank: self.rank,
                    peer: self.any_other_rank(),
                    round: self.round,
                    waited,
                    limit,
                });
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Another living rank, for errors that must name a peer; this rank if there is none.
    pub(crate) fn any_other_rank(&self) -> usize {
        let members = self.members();
        members
            .into_iter()
            .find(|rank| *rank != self.rank)
            .unwrap_or(self.rank)
    }

    /// Shrinks the communicator to the living processes.
    fn shrink(&mut self) -> Result<(), TransportError> {
        self.watch_until_deadline(self.any_other_rank());
        let shrunk = self.comm.shrink().and_then(|comm| {
            let old_indices = self.comm.ranks_of(comm)?;
            Ok((comm, old_indices, FailureListener::new(comm)?))
        });
        self.watchdog.disarm();
        let (comm, old_indices, listener) = shrunk.map_err(|failure| self.call_failed(failure))?;
        let before = self.members();
        let mut comm_ranks = vec![None; self.ranks];
        for (new, old) in old_indices.into_iter().enumerate() {
            comm_ranks[before[old]] = Some(new);
        }
        self.comm_ranks = comm_ranks;
        self.comm = comm;
        self.listener = listener;
        self.has_deaths = true;
        Ok(())
    }

    /// All-gathers the progress of all living ranks.
    fn gather_progress(&mut self, own: RankProgress) -> Result<Agreement, TransportError> {
        let members = self.members();
        let (rank, ranks) = (self.rank, self.ranks);
        let mut collectives = Collectives::new(self, rank, &members);
        let gathered = collectives.gather(encode_progress(own).to_vec())?;
        let all = collectives.broadcast(gathered.unwrap_or_default().concat())?;
        let mut progress = vec![None; ranks];
        for (member, bytes) in members.iter().zip(all.chunks(PROGRESS_BYTES)) {
            progress[*member] = decode_progress(bytes);
        }
        Ok(Agreement { progress })
    }

    /// Runs `work` together with all living ranks, and again with fewer if one dies during it:
    /// either it has succeeded on all of them, or no rank returns its result.
    pub fn uniformly<R>(
        &mut self,
        mut work: impl FnMut(&mut MpiTransport) -> Result<R, TransportError>,
    ) -> Result<R, TransportError> {
        let mut ok = self.failed.is_none();
        loop {
            // Once all ranks are here no message is in flight, and shrinking does not block.
            if !self.agree_all_ok(ok)? {
                self.shrink()?;
            }
            self.failed = None;
            self.begin();
            let result = work(self);
            self.begin();
            match &result {
                Ok(_) => ok = true,
                Err(TransportError::Gone { .. }) => ok = false,
                Err(_) => return result,
            }
            if self.agree_all_ok(ok)? {
                return result;
            }
            ok = false;
        }
    }

    /// The error of a failed MPI call; it blames any other rank.
    fn call_failed(&self, failure: CallFailure) -> TransportError {
        self.peer_failed(self.any_other_rank(), self.round, failure.message)
    }
}

impl<B: HostWireBuffer> Survivors<B> for MpiTransport {
    fn agree(&mut self, progress: RankProgress) -> Result<Agreement, TransportError> {
        self.uniformly(|transport| transport.gather_progress(progress))
    }

    fn give_up(&mut self, reason: &str) {
        MpiTransport::give_up(self, reason);
    }
}
