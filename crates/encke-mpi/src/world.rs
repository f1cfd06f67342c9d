//! The processes of one launch: MPI's start and end, in which all of them meet.
//!
//! The decision here: both are watched from before MPI's first instruction on, because `MPI_Init`
//! and `MPI_Finalize` wait without end for a process that has died.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use encke_core::transport::TransportError;
use mpi::Threading;

use crate::connect::connect_all;
use crate::error::MpiError;
use crate::sys::{self, CallFailure, MpiCommunicator};
use crate::transport::{MpiTransport, SLACK};
use crate::watchdog::Watchdog;

/// MPI, started. There is one for each process.
pub struct MpiWorld {
    library: String,
    must_not_finalize: Arc<AtomicBool>,
    /// How long the start and the end may each take.
    limit: Duration,
}

impl MpiWorld {
    /// Starts MPI within `limit` and opens the transport between all processes. No exchange waits
    /// longer than `deadline` for another rank.
    ///
    /// Calls `hung`, on a thread of its own, with the error of this process if a call of MPI does
    /// not return in time, now or later. Such a call cannot be interrupted: `hung` should end the
    /// process.
    pub fn start(
        limit: Duration,
        deadline: Duration,
        hung: impl FnOnce(MpiError) + Send + 'static,
    ) -> Result<(MpiWorld, MpiTransport), MpiError> {
        let began = Instant::now();
        // The watchdog reports an aborting call before Open MPI ends the process without our line.
        sys::soften_start_errors(limit + 2 * SLACK);
        let watchdog = Watchdog::start(hung).map_err(|error| MpiError::Call {
            what: "starting a thread",
            message: error.to_string(),
        })?;
        let watchdog = Arc::new(watchdog);
        watch(&watchdog, limit, ("MPI_Init", limit));
        let threading = sys::start().map_err(start_failed)?;
        let threading = threading.ok_or(MpiError::Started)?;
        let world = MpiWorld {
            library: sys::library(),
            must_not_finalize: Arc::default(),
            limit,
        };
        watchdog.disarm();
        let left = limit.saturating_sub(began.elapsed());
        watch(&watchdog, left + SLACK, ("the first MPI_Comm_dup", limit));
        let transport = world.open(threading, deadline, Arc::clone(&watchdog))?;
        let (comm, rank) = (transport.comm, transport.rank());
        let absent = connect_all(comm, rank, transport.ranks(), left);
        if let Some(peer) = absent.map_err(start_failed)? {
            return Err(MpiError::Transport(TransportError::Deadline {
                rank,
                peer,
                round: 0,
                waited: began.elapsed(),
                limit,
            }));
        }
        watchdog.disarm();
        Ok((world, transport))
    }

    /// Opens the transport.
    fn open(
        &self,
        threading: Threading,
        deadline: Duration,
        watchdog: Arc<Watchdog>,
    ) -> Result<MpiTransport, MpiError> {
        let library = self.library.clone();
        let got = match threading {
            Threading::Single => "MPI_THREAD_SINGLE",
            Threading::Funneled => "MPI_THREAD_FUNNELED",
            Threading::Serialized | Threading::Multiple => "",
        };
        if !got.is_empty() {
            return Err(MpiError::Threads { library, got });
        }
        let comm = MpiCommunicator::world().map_err(start_failed)?;
        let comm = comm.duplicate().map_err(start_failed)?;
        let flag = Arc::clone(&self.must_not_finalize);
        MpiTransport::new(comm, deadline, library, flag, watchdog)
    }

    /// The name and version of the MPI library.
    pub fn library(&self) -> &str {
        &self.library
    }

    /// Whether deaths of processes are reported and can be survived in this launch (ULFM).
    pub fn survives(&self) -> bool {
        sys::ulfm()
    }

    /// Finalizes MPI, if all ranks have ended without failure. Otherwise it is left as it is:
    /// `MPI_Finalize` would wait for processes that do not call it.
    pub fn finish(self, transport: MpiTransport) {
        let watchdog = Arc::clone(&transport.watchdog);
        watch(&watchdog, self.limit, ("MPI_Finalize", self.limit));
        let complete = transport.close();
        if !complete {
            // Other ranks may still be in an agreement, which would report this process as dead.
            std::thread::sleep(Duration::from_millis(300));
        }
        if complete && !self.must_not_finalize.load(Ordering::Relaxed) {
            sys::finalize();
        }
        watchdog.disarm();
    }
}

/// Arms the watchdog for a call in which all processes meet.
fn watch(watchdog: &Watchdog, after: Duration, (call, limit): (&'static str, Duration)) {
    watchdog.arm(after, move |_| MpiError::Blocked { call, limit });
}

fn start_failed(failure: CallFailure) -> MpiError {
    failure.during("starting MPI")
}
