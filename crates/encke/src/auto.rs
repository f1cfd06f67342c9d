//! Which settings Encke chooses by itself, on which machine, and the choices already made.
//!
//! [`choose`](crate::choose) makes the choice. The decision here: it is made when a shape is first
//! seen, separately for each pass: it depends on nothing but the shape, and whole tensors can be
//! given to any ring.

use std::sync::{Arc, Mutex, PoisonError};

use encke_core::plan::Pass;
use encke_core::{DType, Shape};
use encke_cost::Machine;
use encke_ring::RingError as Error;

use crate::choose::{Choice, MOST_RANKS};
use crate::tune::{MachineSource, TuneError, threads_here};

/// How many choices the cache holds.
const CHOICES: usize = 64;

/// Which settings are chosen automatically, for which machine and within which limits.
#[derive(Debug, Clone)]
pub struct Auto {
    /// The machine that alternatives are timed on.
    pub machine: Machine,
    /// Where its description comes from.
    pub source: MachineSource,
    /// Chooses the number of ranks.
    pub ranks: bool,
    /// Chooses how tokens are divided.
    pub cut: bool,
    /// Chooses whether queries are sharded or replicated.
    pub queries: bool,
    /// Chooses how many ring distances a round covers.
    pub width: bool,
    /// Chooses what rotates in the backward pass.
    pub rotate: bool,
    /// The largest number of ranks considered.
    pub most_ranks: usize,
    /// Bytes that a rank may hold.
    pub memory_limit: Option<usize>,
    /// Below this many tokens only one device is considered.
    pub one_device_below: Option<usize>,
}

impl Auto {
    /// Chooses ranks, cut and schedule on threads of this machine, by its measured profile or else
    /// by built-in figures.
    pub fn here() -> Result<Auto, TuneError> {
        let (machine, source) = threads_here()?;
        Ok(Auto::on(machine, source))
    }

    /// The same on a described machine: rings of up to one node, of at least 8 ranks; on threads,
    /// of as many ranks as there are cores, up to [`MOST_RANKS`].
    pub fn on(machine: Machine, source: MachineSource) -> Auto {
        let most_ranks = match machine.device.shared_cores {
            Some(cores) => cores.clamp(8, MOST_RANKS),
            None => machine.ranks_per_node.clamp(8, 64),
        };
        Auto {
            machine,
            source,
            ranks: true,
            cut: true,
            queries: false,
            width: true,
            rotate: true,
            most_ranks,
            memory_limit: None,
            one_device_below: None,
        }
    }
}

/// The choices made so far.
#[derive(Debug, Default)]
pub(crate) struct ChoiceCache {
    made: Mutex<Vec<(ChoiceKey, Arc<Choice>)>>,
}

type ChoiceKey = (Shape, DType, Pass);

impl ChoiceCache {
    pub(crate) fn get(
        &self,
        key: ChoiceKey,
        make: impl FnOnce() -> Result<Choice, Error>,
    ) -> Result<Arc<Choice>, Error> {
        // The lock is held while a choice is made: that takes milliseconds.
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, choice)) = made.iter().find(|(of, _)| *of == key) {
            return Ok(Arc::clone(choice));
        }
        let choice = Arc::new(make()?);
        made.insert(0, (key, Arc::clone(&choice)));
        made.truncate(CHOICES);
        Ok(choice)
    }
}
