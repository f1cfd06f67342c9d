//! Choices that are left to Encke: how many ranks, how cut, who holds the queries, how parcels go
//! round.
//!
//! Weighing them is [`choose`]'s; here it is said what is left open and on which machine, and what was
//! chosen is remembered by shape.
//!
//! The decision here: a choice is made when a shape is first seen, for a pass at a time, because
//! nothing but the shape decides it and whole tensors go to any ring.

use std::sync::{Arc, Mutex, PoisonError};

use encke_core::kernel::Kernel;
use encke_core::plan::{Pass, Queries, Schedule};
use encke_core::sharding::Sharding;
use encke_core::{DType, Shape};
use encke_cost::Machine;
use encke_ring::RingError as Error;

use crate::attention::Attention;
use crate::choose::{Choice, Constraints, Work, choose};
use crate::tune::{Source, TuneError, threads_here};

/// How many choices are remembered.
const CHOICES: usize = 64;

/// What is left open, and what it is decided by.
#[derive(Debug, Clone)]
pub struct Auto {
    /// The machine that alternatives are timed on.
    pub machine: Machine,
    /// Where its description comes from.
    pub source: Source,
    /// Whether the number of ranks is left open.
    pub ranks: bool,
    /// Whether the cut is left open.
    pub cut: bool,
    /// Whether it is left open who holds the queries.
    pub queries: bool,
    /// Whether it is left open how many distances a round takes.
    pub width: bool,
    /// Whether it is left open what travels in the backward pass.
    pub rotate: bool,
    /// The largest ring there can be.
    pub most_ranks: usize,
    /// Bytes that a rank may hold.
    pub memory_limit: Option<usize>,
    /// Below so many tokens only one device is considered.
    pub one_device_below: Option<usize>,
}

impl Auto {
    /// Ranks, cut and schedule left open, on threads of this machine: as measured, or as built in.
    pub fn here() -> Result<Auto, TuneError> {
        let (machine, source) = threads_here()?;
        Ok(Auto::on(machine, source))
    }

    /// The same on a machine that is described: rings of up to a node, of 8 ranks at least; on
    /// threads, of as many ranks as there are cores.
    pub fn on(machine: Machine, source: Source) -> Auto {
        let most_ranks = match machine.device.shared_cores {
            Some(cores) => cores.max(8),
            None => machine.node.clamp(8, 64),
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

/// How a call is done: everything that could be left open.
#[derive(Debug, Clone)]
pub(crate) struct Way {
    pub sharding: Sharding,
    pub queries: Queries,
    pub schedule: Schedule,
}

/// Choices by what they were made for.
#[derive(Debug, Default)]
pub(crate) struct Choices {
    made: Mutex<Vec<(Key, Arc<Choice>)>>,
}

type Key = (Shape, DType, Pass);

impl Choices {
    fn get(
        &self,
        key: Key,
        make: impl FnOnce() -> Result<Choice, Error>,
    ) -> Result<Arc<Choice>, Error> {
        // A choice takes milliseconds; whoever else wants one meanwhile waits for it.
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

impl<K: Kernel> Attention<K> {
    /// What is left open, if anything is.
    pub fn auto(&self) -> Option<&Auto> {
        self.settings.auto.as_ref()
    }

    /// What is chosen for a shape, and from what; none where nothing was left open.
    pub fn choice(
        &self,
        shape: Shape,
        dtype: DType,
        pass: Pass,
    ) -> Result<Option<Arc<Choice>>, Error> {
        let Some(auto) = &self.settings.auto else {
            return Ok(None);
        };
        let dtype = self.compute_dtype(dtype);
        let make = || {
            let settings = &self.settings;
            let wish = Constraints {
                work: match pass {
                    Pass::Forward => Work::Forward,
                    Pass::Backward { .. } => Work::Backward,
                },
                ranks: (!auto.ranks).then_some(settings.ranks),
                cut: (!auto.cut).then(|| settings.cut.clone()),
                queries: (!auto.queries).then_some(settings.queries),
                width: (!auto.width).then_some(settings.schedule.width),
                rotate: (!auto.rotate).then_some(settings.schedule.backward),
                redundancy: settings.redundancy,
                memory_limit: auto.memory_limit,
                one_device_below: auto.one_device_below,
                ..Constraints::new(shape, settings.pattern.clone(), dtype, auto.most_ranks)
            };
            choose(self.kernel(), &wish, &auto.machine).map_err(|error| Error::Undecided {
                reason: error.to_string(),
            })
        };
        self.choices.get((shape, dtype, pass), make).map(Some)
    }

    /// Who owns which tokens of a call, who holds its queries, and how parcels go round.
    pub(crate) fn ring_for(&self, shape: Shape, dtype: DType, pass: Pass) -> Result<Way, Error> {
        Ok(match self.choice(shape, dtype, pass)? {
            None => self.settings.way(&self.sharding),
            Some(choice) => {
                let winner = choice.winner();
                Way {
                    sharding: Sharding::new(winner.ranks, winner.cut.clone())?,
                    queries: winner.queries,
                    schedule: winner.schedule,
                }
            }
        })
    }
}
