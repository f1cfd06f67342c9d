//! Going on without the dead: who is left, and how far each has come.
//!
//! Everything here is agreed on twice: that everyone is here, and that everyone has heard everyone.
//! Agreements of ULFM end the same way on all survivors, also when somebody dies during one, so either
//! all go on with the same table or all try again with fewer.

use std::time::{Duration, Instant};

use encke_core::plan::membership::{Agreement, RankProgress};
use encke_core::transport::{HostWireBuffer, Survivors, TransportError};
use encke_ring::collectives::Collectives;

use crate::alarm::FailureListener;
use crate::sys::{PendingAgreement, CallFailure};
use crate::wire::MpiTransport;
use crate::words::{STANDING_BYTES, standing, standing_bytes};

impl MpiTransport {
    /// Waits until every rank that lives has come here; whether all of them are well, and nobody
    /// has died unnoticed. The same answer on all.
    fn gathered(&mut self, well: bool) -> Result<bool, TransportError> {
        self.expect_in_time(self.someone_else());
        let gathered = self.gather_all(well);
        self.watchdog.relax();
        gathered
    }

    fn gather_all(&mut self, well: bool) -> Result<bool, TransportError> {
        let since = Instant::now();
        let failed = |wire: &MpiTransport, fault: CallFailure| wire.broken(fault.words);
        let mut agreeing = match PendingAgreement::new(self.comm, well) {
            Ok(agreeing) => agreeing,
            Err(fault) => return Err(failed(self, fault)),
        };
        loop {
            match agreeing.test() {
                Ok(Some(agreed)) => return Ok(agreed),
                Ok(None) => {}
                Err(fault) => return Err(failed(self, fault)),
            }
            if let Ok(Some(notice)) = self.alarm.heard() {
                return Err(TransportError::PeerFailed {
                    rank: self.rank,
                    peer: notice.about,
                    round: self.round,
                    reason: notice.reason.clone(),
                });
            }
            let (waited, limit) = (since.elapsed(), self.deadline);
            if waited > limit {
                return Err(TransportError::Deadline {
                    rank: self.rank,
                    peer: self.someone_else(),
                    round: self.round,
                    waited,
                    limit,
                });
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Any other rank that is left, for an error that must name one.
    pub(crate) fn someone_else(&self) -> usize {
        let others = self.members();
        others
            .into_iter()
            .find(|rank| *rank != self.rank)
            .unwrap_or(self.rank)
    }

    /// Goes on with those that are left.
    fn leave_the_dead(&mut self) -> Result<(), TransportError> {
        self.expect_in_time(self.someone_else());
        let shrunk = self.comm.shrink().and_then(|left| {
            let places = self.comm.members(left)?;
            Ok((left, places, FailureListener::new(left)?))
        });
        self.watchdog.relax();
        let (left, places, alarm) = shrunk.map_err(|fault| self.broken(fault.words))?;
        let before = self.members();
        let mut survivors = vec![None; self.ranks];
        for (place, was) in places.into_iter().enumerate() {
            survivors[before[was]] = Some(place);
        }
        self.places = survivors;
        self.comm = left;
        self.alarm = alarm;
        self.dead = true;
        Ok(())
    }

    /// Everyone's standing, at everyone; an error where that did not work here.
    fn hear_all(&mut self, own: RankProgress) -> Result<Agreement, TransportError> {
        let members = self.members();
        let (rank, ranks) = (self.rank, self.ranks);
        let mut meeting = Collectives::new(self, rank, &members);
        let said = meeting.gather(standing_bytes(own).to_vec())?;
        let all = meeting.broadcast(said.unwrap_or_default().concat())?;
        let mut standings = vec![None; ranks];
        for (member, bytes) in members.iter().zip(all.chunks(STANDING_BYTES)) {
            standings[*member] = standing(bytes);
        }
        Ok(Agreement {
            progress: standings,
        })
    }

    /// Does something together with all ranks that are left, again with fewer when one of them dies
    /// in the middle of it: either it has worked for all of them, or none has its result.
    pub fn uniformly<R>(
        &mut self,
        mut work: impl FnMut(&mut MpiTransport) -> Result<R, TransportError>,
    ) -> Result<R, TransportError> {
        let mut well = self.failed.is_none();
        loop {
            // Once everyone is here nothing is under way, and shrinking does not wait.
            if !self.gathered(well)? {
                self.leave_the_dead()?;
            }
            self.failed = None;
            self.begin();
            let done = work(self);
            self.begin();
            match &done {
                Ok(_) => well = true,
                Err(TransportError::Gone { .. }) => well = false,
                Err(_) => return done,
            }
            if self.gathered(well)? {
                return done;
            }
            well = false;
        }
    }

    fn broken(&self, reason: String) -> TransportError {
        TransportError::PeerFailed {
            rank: self.rank,
            peer: self.someone_else(),
            round: self.round,
            reason,
        }
    }
}

impl<B: HostWireBuffer> Survivors<B> for MpiTransport {
    fn agree(&mut self, standing: RankProgress) -> Result<Agreement, TransportError> {
        self.uniformly(|wire| wire.hear_all(standing))
    }

    fn give_up(&mut self, reason: &str) {
        MpiTransport::give_up(self, reason);
    }
}
