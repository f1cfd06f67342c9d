//! The processes of one launch: MPI's start and end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use encke_core::transport::TransportError;
use mpi::Threading;
use mpi::environment::Universe;

use crate::connect::connect_all;
use crate::error::MpiError;
use crate::sys::{self, CallFailure, MpiCommunicator};
use crate::transport::MpiTransport;

/// MPI, started. There is one for each process.
pub struct MpiWorld {
    universe: Option<Universe>,
    library: String,
    must_not_finalize: Arc<AtomicBool>,
}

impl MpiWorld {
    /// Starts MPI and opens the transport between all processes. No exchange waits longer than
    /// `deadline` for another rank.
    pub fn start(deadline: Duration) -> Result<(MpiWorld, MpiTransport), MpiError> {
        let started = mpi::initialize_with_threading(Threading::Serialized);
        let (universe, threading) = started.ok_or(MpiError::Started)?;
        let library = sys::library();
        let got = match threading {
            Threading::Single => "MPI_THREAD_SINGLE",
            Threading::Funneled => "MPI_THREAD_FUNNELED",
            Threading::Serialized | Threading::Multiple => "",
        };
        if !got.is_empty() {
            return Err(MpiError::Threads { library, got });
        }
        let began = Instant::now();
        let failed = |failure: CallFailure| failure.during("starting MPI");
        let comm = MpiCommunicator::world().map_err(failed)?;
        let comm = comm.duplicate().map_err(failed)?;
        let must_not_finalize = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&must_not_finalize);
        let transport = MpiTransport::new(comm, deadline, library.clone(), flag)?;
        let absent = connect_all(comm, transport.rank(), transport.ranks(), deadline);
        if let Some(peer) = absent.map_err(failed)? {
            return Err(MpiError::Transport(TransportError::Deadline {
                rank: transport.rank(),
                peer,
                round: 0,
                waited: began.elapsed(),
                limit: deadline,
            }));
        }
        let world = MpiWorld {
            universe: Some(universe),
            library,
            must_not_finalize,
        };
        Ok((world, transport))
    }

    /// The name and version of the MPI library.
    pub fn library(&self) -> &str {
        &self.library
    }

    /// Whether deaths of processes are reported and can be survived in this launch (ULFM).
    pub fn survives(&self) -> bool {
        sys::ulfm()
    }

    /// Finalizes MPI, if all ranks have ended without failure.
    pub fn finish(mut self, transport: MpiTransport) {
        let watchdog = Arc::clone(&transport.watchdog);
        transport.watch_until_deadline(transport.any_other_rank());
        let complete = transport.close();
        if !complete {
            // Other ranks may still be in an agreement, which would report this process as dead.
            std::thread::sleep(Duration::from_millis(300));
        }
        if complete && !self.must_not_finalize.load(Ordering::Relaxed) {
            drop(self.universe.take());
        }
        watchdog.disarm();
    }
}

impl Drop for MpiWorld {
    /// Without [`MpiWorld::finish`] a rank has failed. `MPI_Finalize` is collective and would wait
    /// for processes that do not call it, so it is not called.
    fn drop(&mut self) {
        std::mem::forget(self.universe.take());
    }
}
