//! The command as one of several processes: who speaks, how they come to one answer, how they end.
//!
//! The decision here: whatever can be refused is refused by all together, in one line, before
//! anyone waits for anyone. What fails later fails on each process in its own words, since each may
//! know something else: one line for each, with its rank.

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

use crate::cli::{Cli, Command, one_line};
use crate::terminal::note;
use crate::{PAUSE, Told, Verdict, attend, bench, billion, profile, verify};

/// How long a rank may wait for another one unless told otherwise.
const DEADLINE: Duration = Duration::from_secs(600);
/// How long a process that failed stays, so that the launcher does not end the others before they
/// have said what they know.
const GRACE: Duration = Duration::from_secs(2);

/// The processes of this launch, seen from one of them.
pub struct Cluster {
    /// What moves between them.
    pub wire: MpiTransport,
    /// What the MPI library calls itself.
    pub library: String,
    survives: bool,
}

/// What all processes agreed cannot be done.
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

/// Runs the work of the command `name` as one of several processes. The cluster is shared, so that
/// what outlives a call (a model, say) can hold on to it; who does must have let go in the end.
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
    let said = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&said);
    // A call of MPI that does not return cannot be left otherwise.
    wire.watch(move |error| {
        if !told.swap(true, Ordering::SeqCst) {
            note(&format!("{name}: rank {rank} of {ranks}: {error}"));
        }
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
            // Said before anyone leaves: launchers end all processes when the first one fails.
            if cluster.speaks() {
                note(&format!("{name}: {}", one_line(&error)));
            }
            world.finish(cluster.wire);
            std::thread::sleep(PAUSE);
            Err(Told.into())
        }
        (ended, cluster) => {
            let held = || anyhow!("the wire is still held: a bug in {name}");
            let words = one_line(&ended.err().unwrap_or_else(held));
            if !said.swap(true, Ordering::SeqCst) {
                note(&format!("{name}: rank {rank} of {ranks}: {words}"));
            }
            let cluster = cluster.map_or_else(|held| held, Arc::new);
            locked(&cluster).wire.give_up(&words);
            std::thread::sleep(GRACE);
            Err(Told.into())
        }
    }
}

/// The cluster, for one at a time. A panic elsewhere has been reported already.
pub fn locked(shared: &Mutex<Cluster>) -> MutexGuard<'_, Cluster> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn inner(cluster: Mutex<Cluster>) -> Cluster {
    cluster.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// What `encke` does as one of several processes.
pub(crate) fn command(shared: &Mutex<Cluster>, cli: Cli) -> Result<Verdict> {
    let cluster = &mut *locked(shared);
    match &cli.command {
        Some(Command::Attend(options)) => attend::processes::run(cluster, options),
        Some(Command::Bench(options)) => bench::processes::run(cluster, options),
        Some(Command::Billion(options)) => billion::processes::run(cluster, options),
        Some(Command::Profile(options)) => profile::processes::run(cluster, options),
        Some(Command::Verify(options)) => verify::processes::run(cluster, options),
        _ if cluster.ranks() == 1 => crate::run(cli),
        _ => cluster.agree(Err(anyhow!(
            "this command runs alone; start it without a launcher (attend, bench, billion, \
             profile and verify run as several processes)"
        ))),
    }
}

impl Cluster {
    /// The number of this process.
    pub fn rank(&self) -> usize {
        self.wire.rank()
    }

    /// How many there are.
    pub fn ranks(&self) -> usize {
        self.wire.ranks()
    }

    /// The process that speaks for all: the first of those that are left.
    pub fn speaker(&self) -> usize {
        self.wire.members().first().copied().unwrap_or(0)
    }

    /// Whether this is the process that speaks for all.
    pub fn speaks(&self) -> bool {
        self.rank() == self.speaker()
    }

    /// Lets the others go on when a process dies, from now on.
    pub fn survive(&mut self) -> Result<()> {
        self.wire.survive()?;
        self.survives = true;
        Ok(())
    }

    /// Something that all processes say to one another; again with fewer where one of them dies.
    fn meet<R>(
        &mut self,
        mut talk: impl FnMut(&mut Collectives<'_, MpiTransport>) -> Result<R, TransportError>,
    ) -> Result<R> {
        let mut talk = |wire: &mut MpiTransport| {
            let (rank, members) = (wire.rank(), wire.members());
            talk(&mut Collectives::new(wire, rank, &members))
        };
        let said = match self.survives {
            true => self.wire.uniformly(talk),
            false => {
                self.wire.begin();
                talk(&mut self.wire)
            }
        };
        Ok(said?)
    }

    /// The value, where every process has one; otherwise one error, the same for all.
    pub fn agree<T>(&mut self, own: Result<T>) -> Result<T> {
        let word = match &own {
            Ok(_) => Ok(()),
            // A wire that failed carries no answer; the error is this process's own.
            Err(error) if error.is::<TransportError>() => return own,
            Err(error) => Err(one_line(error)),
        };
        match self.meet(|meeting| meeting.agree(word.clone()))? {
            Ok(()) => own,
            Err(refusal) => Err(Refused(refusal).into()),
        }
    }

    /// Whether all is right everywhere, or what the first process to say so finds wrong.
    pub fn all_right(&mut self, own: Result<()>) -> Result<Result<(), String>> {
        let agreed = self.agree(own);
        match agreed {
            Ok(()) => Ok(Ok(())),
            Err(error) if error.is::<Refused>() => Ok(Err(error.to_string())),
            Err(error) => Err(error),
        }
    }

    /// Every process's value, at the one that speaks; nothing at the others.
    pub fn gather<T: Serialize + DeserializeOwned>(&mut self, own: &T) -> Result<Option<Vec<T>>> {
        let own = serde_json::to_vec(own)?;
        let Some(all) = self.meet(|meeting| meeting.gather(own.clone()))? else {
            return Ok(None);
        };
        let read = |bytes: &Vec<u8>| serde_json::from_slice(bytes).context("a rank's report");
        all.iter().map(read).collect::<Result<Vec<T>>>().map(Some)
    }

    /// The value of the process that speaks, at all of them.
    pub fn broadcast<T: Serialize + DeserializeOwned>(&mut self, own: Option<T>) -> Result<T> {
        let own = match own {
            Some(own) => serde_json::to_vec(&own)?,
            None => Vec::new(),
        };
        let bytes = self.meet(|meeting| meeting.broadcast(own.clone()))?;
        serde_json::from_slice(&bytes).context("what rank 0 said")
    }

    /// The sums of every process's numbers, at all of them: the same bits everywhere.
    pub fn sum(&mut self, own: &[f32]) -> Result<Vec<f32>> {
        self.meet(|meeting| meeting.sum(own))
    }
}
