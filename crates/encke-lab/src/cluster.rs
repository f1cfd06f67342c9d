//! This process as one rank of an MPI job: collectives over all ranks, one error for all, and exit.
//!
//! The decision here: whatever can be refused before the computation is refused by all ranks
//! together, in one line, before any rank waits for another ([`Cluster::agree`]). Errors during the
//! computation differ from rank to rank, so each rank prints its own line, with its rank.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use encke::TransportError;
use encke_mpi::launcher::LaunchedProcess;
use encke_mpi::{MpiTransport, MpiWorld};
use encke_ring::collectives::{Collectives, Refusal};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::program::{AlreadyReported, PAUSE, Verdict, one_line};
use crate::terminal::note;

/// How long a rank waits for another one unless the program sets another deadline.
const DEADLINE: Duration = Duration::from_secs(600);
/// How long a process that failed stays alive, so that the launcher does not kill the others before
/// they have printed their errors.
const GRACE: Duration = Duration::from_secs(2);

/// The ranks of this job, as seen from one of them.
pub struct Cluster {
    /// The transport between the ranks.
    pub wire: MpiTransport,
    /// Name and version of the MPI library.
    pub library: String,
    survives: bool,
}

/// The error that all ranks return because one of them refused.
#[derive(Debug)]
struct Refused(Refusal);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Refusal { rank, reason } = &self.0;
        match rank {
            0 => f.write_str(reason),
            rank => write!(f, "rank {rank}: {reason}"),
        }
    }
}

impl std::error::Error for Refused {}

/// Starts MPI and runs `work` of the program `name` as one rank. The cluster is shared, so that
/// `work` can put it into a value that outlives a call, such as a model; `work` must drop all
/// clones before it returns.
pub fn run(
    name: &'static str,
    place: &LaunchedProcess,
    work: impl FnOnce(&Arc<Mutex<Cluster>>) -> Result<Verdict>,
) -> Result<Verdict> {
    let started = MpiWorld::start(DEADLINE);
    let (world, mut wire) = started.with_context(|| format!("process {}", place.rank))?;
    let (rank, ranks) = (wire.rank(), wire.ranks());
    if ranks != place.ranks {
        bail!(
            "{} started {} processes, but {} sees {ranks}: the launcher and the library {name} was \
             built with are not of one MPI",
            place.variable,
            place.ranks,
            world.library()
        );
    }
    let reported = Arc::new(AtomicBool::new(false));
    let by_watchdog = Arc::clone(&reported);
    // An MPI call that does not return cannot be cancelled: the watchdog ends the process.
    wire.watch(move |error| {
        if !by_watchdog.swap(true, Ordering::SeqCst) {
            note(&format!("{name}: rank {rank} of {ranks}: {error}"));
        }
        encke_files::remove_temporaries();
        encke_mpi::exit_at_once(2);
    });
    let cluster = Arc::new(Mutex::new(Cluster {
        library: world.library().to_string(),
        wire,
        survives: false,
    }));
    let ended = catch_unwind(AssertUnwindSafe(|| work(&cluster)));
    let ended = ended.unwrap_or_else(|_| Err(anyhow!("it panicked: a bug in {name}")));
    match (ended, Arc::try_unwrap(cluster)) {
        (Ok(verdict), Ok(cluster)) => {
            world.finish(inner(cluster).wire);
            Ok(verdict)
        }
        (Err(error), Ok(cluster)) if error.is::<Refused>() => {
            let cluster = inner(cluster);
            // Before any rank exits: launchers kill all processes when the first one fails.
            if cluster.is_root() {
                note(&format!("{name}: {}", one_line(&error)));
            }
            world.finish(cluster.wire);
            std::thread::sleep(PAUSE);
            Err(AlreadyReported.into())
        }
        (ended, cluster) => {
            let held = || anyhow!("the wire is still in use: a bug in {name}");
            let error = one_line(&ended.err().unwrap_or_else(held));
            if !reported.swap(true, Ordering::SeqCst) {
                note(&format!("{name}: rank {rank} of {ranks}: {error}"));
            }
            let cluster = cluster.map_or_else(|held| held, Arc::new);
            locked(&cluster).wire.give_up(&error);
            std::thread::sleep(GRACE);
            Err(AlreadyReported.into())
        }
    }
}

/// Locks the cluster. A poisoned lock is used as it is: the panic was reported where it happened.
pub fn locked(shared: &Mutex<Cluster>) -> MutexGuard<'_, Cluster> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn inner(cluster: Mutex<Cluster>) -> Cluster {
    cluster.into_inner().unwrap_or_else(PoisonError::into_inner)
}

impl Cluster {
    /// The rank of this process.
    pub fn rank(&self) -> usize {
        self.wire.rank()
    }

    /// The number of ranks the job was started with.
    pub fn ranks(&self) -> usize {
        self.wire.ranks()
    }

    /// The rank that prints and writes for all: the first one alive.
    pub fn root(&self) -> usize {
        self.wire.members().first().copied().unwrap_or(0)
    }

    /// Whether this is the root.
    pub fn is_root(&self) -> bool {
        self.rank() == self.root()
    }

    /// From now on, the other ranks continue when one dies.
    pub fn survive(&mut self) -> Result<()> {
        self.wire.survive()?;
        self.survives = true;
        Ok(())
    }

    /// Runs a collective of all ranks; repeats it with fewer ranks if one dies meanwhile.
    fn collective<R>(
        &mut self,
        mut run: impl FnMut(&mut Collectives<'_, MpiTransport>) -> Result<R, TransportError>,
    ) -> Result<R> {
        let mut run = |wire: &mut MpiTransport| {
            let (rank, members) = (wire.rank(), wire.members());
            run(&mut Collectives::new(wire, rank, &members))
        };
        let result = match self.survives {
            true => self.wire.uniformly(run),
            false => {
                self.wire.begin();
                run(&mut self.wire)
            }
        };
        Ok(result?)
    }

    /// `own` if every rank has a value; otherwise one error, the same on all ranks.
    pub fn agree<T>(&mut self, own: Result<T>) -> Result<T> {
        let status = match &own {
            Ok(_) => Ok(()),
            // A wire that failed cannot carry the error to the others.
            Err(error) if error.is::<TransportError>() => return own,
            Err(error) => Err(one_line(error)),
        };
        match self.collective(|all| all.agree(status.clone()))? {
            Ok(()) => own,
            Err(refusal) => Err(Refused(refusal).into()),
        }
    }

    /// Whether a check passed on every rank, or the error of the first rank on which it failed. The
    /// outer error is the wire's.
    pub fn all_passed(&mut self, own: Result<()>) -> Result<Result<(), String>> {
        let agreed = self.agree(own);
        match agreed {
            Ok(()) => Ok(Ok(())),
            Err(error) if error.is::<Refused>() => Ok(Err(error.to_string())),
            Err(error) => Err(error),
        }
    }

    /// Every rank's value on the root; `None` on the others.
    pub fn gather<T: Serialize + DeserializeOwned>(&mut self, own: &T) -> Result<Option<Vec<T>>> {
        let own = serde_json::to_vec(own)?;
        let Some(all) = self.collective(|all| all.gather(own.clone()))? else {
            return Ok(None);
        };
        let read = |bytes: &Vec<u8>| serde_json::from_slice(bytes).context("a rank's report");
        all.iter().map(read).collect::<Result<Vec<T>>>().map(Some)
    }

    /// The root's value, on all ranks.
    pub fn broadcast<T: Serialize + DeserializeOwned>(&mut self, own: Option<T>) -> Result<T> {
        let own = match own {
            Some(own) => serde_json::to_vec(&own)?,
            None => Vec::new(),
        };
        let bytes = self.collective(|all| all.broadcast(own.clone()))?;
        serde_json::from_slice(&bytes).context("the root's value")
    }

    /// All-reduce: the elementwise sums over all ranks, bitwise equal on all of them.
    pub fn sum(&mut self, own: &[f32]) -> Result<Vec<f32>> {
        self.collective(|all| all.sum(own))
    }
}
