//! Attentions that wait for more keys before they are launched.
//!
//! Work on a GPU is only enqueued, so nobody can tell that a job is enqueued later, if only it is
//! before whatever uses its results. The decision here: a job whose softmax goes on after it waits;
//! the next one of the same queries is joined to it, and they are launched as one chain when it is
//! full, when the softmax ends, or when somebody uses what they read or write ([`Deferred`]). On a ring
//! of ranks that share a GPU, whose parcels are pointers, a softmax is therefore carried through
//! memory once or not at all, rather than once a parcel.
//!
//! What waits for what depends on the order of a rank's own jobs, so that its bits are the same
//! from run to run.

use std::cell::Cell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, ThreadId};

use encke_core::job::Job;
use encke_core::kernel::SoftmaxState;

use super::chain::Chain;
use super::{LaunchContext, hopper_forward};
use crate::buffer::Buffer;
use crate::device::{Deferred, Reason};
use crate::error::Result;
use crate::memory::Memory;
use crate::operands::{Operands, Targets};

/// How many may wait to go on from one carry.
const WAITING: usize = 4;

thread_local! {
    /// Whether this thread is launching what has waited: what that enqueues waits for nothing else.
    static LAUNCHING: Cell<bool> = const { Cell::new(false) };
}

/// Where attentions are launched, at once or in chains.
pub(crate) struct Chains {
    pub site: LaunchContext,
    waiting: Mutex<Vec<Waiting>>,
}

/// A chain that goes on from a carry, whose memory it does not keep: nobody can read it any more
/// when its owner lets go.
struct Waiting {
    chain: Chain,
    /// Whether the softmax begins with it: what the carry holds is not read.
    begins: bool,
    carry: Vec<Weak<Memory>>,
    asked_by: ThreadId,
}

impl Waiting {
    fn goes_on_from(&self, targets: &Targets) -> bool {
        let own = self.carry.first().map(Weak::as_ptr);
        own == targets.sums().map(std::ptr::from_ref)
    }

    fn cut(self, chain: &Chain) -> Vec<Waiting> {
        let Waiting {
            begins,
            carry,
            asked_by,
            ..
        } = self;
        let parts = self.chain.cut(chain).into_iter();
        let wait = |chain| Waiting {
            chain,
            begins,
            carry: carry.clone(),
            asked_by,
        };
        parts.map(wait).collect()
    }

    fn writes(&self, memory: &Memory) -> bool {
        self.carry
            .iter()
            .any(|own| std::ptr::eq(own.as_ptr(), memory.whole()))
    }
}

impl Chains {
    pub fn new(site: LaunchContext) -> Arc<Chains> {
        let chains = Arc::new(Chains {
            site,
            waiting: Mutex::default(),
        });
        let own: Arc<dyn Deferred> = chains.clone();
        chains.site.device.set_late(Arc::downgrade(&own));
        chains
    }

    /// Forward on Hopper, now or with what comes next.
    pub fn forward(
        &self,
        job: &Job,
        operands: Operands<'_>,
        state: SoftmaxState<'_, Buffer>,
    ) -> Result<()> {
        let targets = Targets::new(state, operands.dtype())?;
        let chain = Chain::new(job, operands)?;
        if targets.begins && targets.ends {
            return self.launch(&chain, &targets);
        }
        let mut waiting = self.waiting();
        let parts = part(&mut waiting, chain, &targets);
        let mut parts = parts.into_iter();
        parts.try_for_each(|chain| self.go_on(&mut waiting, chain, &targets))
    }

    /// Joins a chain to what waits, or has it wait; or launches it, where it ends or is full.
    fn go_on(&self, waiting: &mut Vec<Waiting>, chain: Chain, targets: &Targets) -> Result<()> {
        let continued =
            |one: &Waiting| !targets.begins && one.goes_on_from(targets) && one.chain.takes(&chain);
        let (chain, begins) = match waiting.iter().position(continued) {
            None => (chain, targets.begins),
            Some(index) => {
                let mut before = waiting.remove(index);
                before.chain.join(chain);
                (before.chain, before.begins)
            }
        };
        self.launch_crossed(waiting, &chain, targets)?;
        if targets.ends || chain.is_full() {
            return self.launch(&chain, &targets.beginning(begins));
        }
        let is_beside = |one: &Waiting| one.goes_on_from(targets);
        let beside = waiting.iter().filter(|one| is_beside(one)).count();
        if let Some(oldest) = waiting.iter().position(is_beside)
            && beside >= WAITING
        {
            let oldest = waiting.remove(oldest);
            self.launch_all([oldest])?;
        }
        waiting.push(Waiting {
            chain,
            begins,
            carry: targets.carry().iter().map(Arc::downgrade).collect(),
            asked_by: thread::current().id(),
        });
        Ok(())
    }

    /// Launches what waits for cells that a chain goes on from, too.
    fn launch_crossed(
        &self,
        waiting: &mut Vec<Waiting>,
        chain: &Chain,
        targets: &Targets,
    ) -> Result<()> {
        let crossed =
            |one: &mut Waiting| one.goes_on_from(targets) && !one.chain.is_apart_from(chain);
        let crossed: Vec<Waiting> = waiting.extract_if(.., crossed).collect();
        self.launch_all(crossed)
    }

    /// What waits, without what nobody can ask for any more.
    fn waiting(&self) -> MutexGuard<'_, Vec<Waiting>> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.retain(|one| one.carry.iter().all(|memory| memory.strong_count() > 0));
        waiting
    }

    /// Launches what has waited, but for what nobody can ask for any more.
    fn launch_all(&self, all: impl IntoIterator<Item = Waiting>) -> Result<()> {
        all.into_iter().try_for_each(|waiting| {
            let carry: Option<Vec<_>> = waiting.carry.iter().map(Weak::upgrade).collect();
            match carry.filter(|_| waiting.chain.is_usable()) {
                Some(carry) => {
                    let targets = Targets::going_on(carry).beginning(waiting.begins);
                    self.launch(&waiting.chain, &targets)
                }
                None => Ok(()),
            }
        })
    }

    fn launch(&self, chain: &Chain, targets: &Targets) -> Result<()> {
        let before = LAUNCHING.replace(true);
        let launched = hopper_forward::forward(&self.site, chain, targets);
        LAUNCHING.set(before);
        launched
    }
}

/// A chain and those that wait to go on from the same carry, all of them cut where the rows of others
/// begin and end: parts are of the same rows or have none in common. The parts of the chain.
fn part(waiting: &mut Vec<Waiting>, chain: Chain, targets: &Targets) -> Vec<Chain> {
    let mut parts = vec![chain];
    for one in waiting.iter().filter(|one| one.goes_on_from(targets)) {
        let all = parts.into_iter();
        parts = all.flat_map(|part| part.cut(&one.chain)).collect();
    }
    for part in &parts {
        let all = std::mem::take(waiting).into_iter();
        waiting.extend(all.flat_map(|one| match one.goes_on_from(targets) {
            true => one.cut(part),
            false => vec![one],
        }));
    }
    parts
}

impl Deferred for Chains {
    fn catch_up(&self, reason: Reason<'_>) -> Result<()> {
        if LAUNCHING.get() {
            return Ok(());
        }
        let own = thread::current().id();
        let concerned = |waiting: &mut Waiting| match reason {
            Reason::Used(memory) => memory.iter().any(|used| waiting.writes(used)),
            Reason::Written(memory) => waiting.chain.reads(memory),
            Reason::Leaving => waiting.asked_by == own,
            Reason::Vacated { memory, round } => {
                waiting.asked_by == own && waiting.chain.leaves(memory, round)
            }
            Reason::Waited => true,
        };
        // Held until they are enqueued, so that nobody comes before them.
        let mut waiting = self.waiting();
        let concerned: Vec<Waiting> = waiting.extract_if(.., concerned).collect();
        self.launch_all(concerned)
    }
}
