//! This process as one rank of an MPI job: collectives over all ranks, one error for all, and exit.
//!
//! The decision here: whatever can be refused before the computation is refused by all ranks
//! together, in one line, before any rank waits for another ([`Cluster::agree`]): first of all,
//! ranks that were started with different arguments. Errors during the computation differ from rank
//! to rank, so each rank prints its own line, with its rank.

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

use crate::arguments;
use crate::gpu_links::GpuLinks;
use crate::program::{AlreadyReported, PAUSE, Verdict, one_line};
use crate::terminal::note;

/// How long a rank waits for another one unless the caller gives a deadline.
const DEADLINE: Duration = Duration::from_secs(600);
/// How long MPI may take to start, and to end, unless the caller gives a deadline: shorter, because
/// no rank computes then.
const START: Duration = Duration::from_secs(60);
/// How long it may take at least: on a busy machine processes start seconds apart.
const LEAST_START: Duration = Duration::from_secs(10);
/// How long a process that failed stays alive, so that the launcher does not kill the others before
/// they have printed their errors.
const GRACE: Duration = Duration::from_secs(2);

/// The ranks of this job, as seen from one of them.
pub struct Cluster {
    /// The transport between the ranks.
    pub wire: MpiTransport,
    /// Name and version of the MPI library, and what connects the GPUs, if ranks compute on some.
    pub library: String,
    /// The links between the GPUs.
    pub(crate) gpu: Option<GpuLinks>,
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

/// Starts MPI and runs `work` of the program `name` as one rank, with what `parsed` holds: its
/// arguments, or why they are invalid. `deadline` is the one that the caller gave, if any. The
/// cluster is shared, so that `work` can put it into a value that outlives a call, such as a model;
/// `work` must drop all clones before it returns.
pub fn run<C>(
    (name, place): (&'static str, &LaunchedProcess),
    parsed: Result<C>,
    deadline: Option<Duration>,
    work: impl FnOnce(C, &Arc<Mutex<Cluster>>) -> Result<Verdict>,
) -> Result<Verdict> {
    let reported = Arc::new(AtomicBool::new(false));
    let by_watchdog = Arc::clone(&reported);
    let (rank, ranks) = (place.rank, place.ranks);
    // An MPI call that does not return cannot be cancelled: the watchdog ends the process.
    let hung = move |error| {
        if !by_watchdog.swap(true, Ordering::SeqCst) {
            note(&format!("{name}: rank {rank} of {ranks}: {error}"));
        }
        encke_files::remove_temporaries();
        std::thread::sleep(GRACE);
        encke_mpi::exit_at_once(2);
    };
    // Open MPI calls a null pointer when it learns of a death before a communicator is complete.
    let crashed = format!(
        "{name}: rank {rank} of {ranks}: it crashed, in MPI or in {name} (an invalid memory \
         access); Open MPI does so when another process dies while MPI starts"
    );
    encke_files::exit_on_invalid_access(&crashed, GRACE.as_secs() as u32);
    let start = deadline.unwrap_or(START).max(LEAST_START);
    let started = MpiWorld::start(start, deadline.unwrap_or(DEADLINE), hung);
    let (world, wire) = match started {
        Ok(started) => started,
        Err(error) => {
            // The watchdog may have reported a call of MPI that fails only now.
            if !reported.swap(true, Ordering::SeqCst) {
                note(&format!("{name}: rank {rank} of {ranks}: {error}"));
            }
            std::thread::sleep(GRACE);
            return Err(AlreadyReported.into());
        }
    };
    if wire.ranks() != ranks {
        bail!(
            "{} started {ranks} processes, but {} sees {}: the launcher and the library {name} was \
             built with are not of one MPI",
            place.variable,
            world.library(),
            wire.ranks()
        );
    }
    let rank = wire.rank();
    let cluster = Arc::new(Mutex::new(Cluster {
        library: world.library().to_string(),
        wire,
        gpu: None,
        survives: false,
    }));
    let ended = catch_unwind(AssertUnwindSafe(|| {
        locked(&cluster).check_arguments(name)?;
        let parsed = locked(&cluster).agree(parsed)?;
        let verdict = work(parsed, &cluster)?;
        locked(&cluster).close_gpu()?;
        Ok(verdict)
    }));
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

    /// How long a rank waits for another one.
    pub(crate) fn deadline(&self) -> Duration {
        self.wire.deadline()
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

    /// Refuses ranks that are another program than the root, another version of it, or were started
    /// with other arguments: each would compute its part of another call.
    fn check_arguments(&mut self, name: &str) -> Result<()> {
        let program = format!("{name} {}", env!("CARGO_PKG_VERSION"));
        let own: Vec<String> = std::iter::once(program)
            .chain(arguments::stored().skip(1))
            .collect();
        let all = self.gather(&own)?.unwrap_or_default();
        let different = all.iter().enumerate().find_map(|(rank, other)| {
            let (own, other) = arguments::first_difference(&own, other)?;
            Some(anyhow!(
                "rank {rank} was started with {other}, and rank 0 with {own}; start all processes \
                 with the same arguments"
            ))
        });
        self.agree(different.map_or(Ok(()), Err))
    }

    /// Refuses ranks whose `what`, with this checksum, is not that of the root.
    pub fn check_equal(&mut self, what: &str, checksum: u64) -> Result<()> {
        let root = self.root();
        let expected: u64 = self.broadcast(self.is_root().then_some(checksum))?;
        let equal = match checksum == expected {
            true => Ok(()),
            false => Err(anyhow!(
                "{what} here and on rank {root} are not the same; every process must have the same \
                 options, files and kind of processor"
            )),
        };
        self.agree(equal)
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

    /// Every rank's value, on all ranks.
    pub fn all_gather<T: Serialize + DeserializeOwned>(&mut self, own: &T) -> Result<Vec<T>> {
        let all = self.gather(own)?;
        self.broadcast(all)
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

    /// The same over several terms of each rank, in order.
    pub fn sum_terms(&mut self, own: &[f32], counts: &[usize]) -> Result<Vec<f32>> {
        self.collective(|all| all.sum_terms(own, counts))
    }
}
