//! The processes of one launch.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use encke_core::transport::TransportError;
use mpi::Threading;
use mpi::environment::Universe;

use crate::contact;
use crate::error::MpiError;
use crate::sys::{self, Communicator};
use crate::wire::MpiTransport;

/// MPI, started. There is one in a process.
pub struct MpiWorld {
    universe: Option<Universe>,
    library: String,
    spoiled: Arc<AtomicBool>,
}

impl MpiWorld {
    /// Starts MPI and opens the wire between all processes. No exchange over it waits longer than
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
        let failed = |fault: sys::CallFailure| fault.during("starting MPI");
        let comm = Communicator::world().map_err(failed)?;
        let comm = comm.duplicate().map_err(failed)?;
        let spoiled = Arc::new(AtomicBool::new(false));
        let wire = MpiTransport::new(comm, deadline, library.clone(), Arc::clone(&spoiled))?;
        let absent = contact::meet_all(comm, wire.rank(), wire.ranks(), deadline);
        if let Some(peer) = absent.map_err(failed)? {
            let (rank, waited, limit) = (wire.rank(), began.elapsed(), deadline);
            return Err(MpiError::Transport(TransportError::Deadline {
                rank,
                peer,
                round: 0,
                waited,
                limit,
            }));
        }
        let world = MpiWorld {
            universe: Some(universe),
            library,
            spoiled,
        };
        Ok((world, wire))
    }

    /// What the library calls itself.
    pub fn library(&self) -> &str {
        &self.library
    }

    /// Whether deaths are reported and can be survived in this launch.
    pub fn survives(&self) -> bool {
        sys::ulfm()
    }

    /// Ends MPI, when all ranks have ended well.
    pub fn finish(mut self, wire: MpiTransport) {
        let watchdog = Arc::clone(&wire.watchdog);
        wire.expect_in_time(wire.someone_else());
        let whole = wire.close();
        if !whole {
            // Whoever is still asking whether all went well must not see us leave.
            std::thread::sleep(Duration::from_millis(300));
        }
        if whole && !self.spoiled.load(Ordering::Relaxed) {
            drop(self.universe.take());
        }
        watchdog.relax();
    }
}

impl Drop for MpiWorld {
    /// Without [`MpiWorld::finish`] something has gone wrong, and the end of MPI is a meeting of all
    /// processes: it would wait for those that cannot come.
    fn drop(&mut self) {
        std::mem::forget(self.universe.take());
    }
}
