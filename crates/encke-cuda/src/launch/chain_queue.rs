//! Attentions whose launch is delayed so that they can be fused with the next.
//!
//! Launches may be delayed as long as they are issued before any consumer of their results. The
//! decision here: a job whose softmax continues after it is delayed; the next job of the same
//! queries is joined to it, and they are launched as one chain when the chain is full, when the
//! softmax ends, or when memory that they read or write is used ([`Deferred`]). Where ranks share a
//! GPU and parcels are pointers, a ring therefore writes and rereads its softmax state in memory at
//! most once, rather than once per parcel.
//!
//! Which jobs are fused depends only on the order of a rank's own jobs, so results are bitwise
//! repeatable.

use std::cell::Cell;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread::{self, ThreadId};

use encke_core::job::Job;
use encke_core::kernel::{Carry, SoftmaxState};
use encke_core::transport::WireBuffer;

use super::chain::Chain;
use super::{LaunchContext, hopper_forward};
use crate::allocation::DeviceAllocation;
use crate::buffer::Buffer;
use crate::device::{Deferred, FlushReason};
use crate::error::Result;
use crate::lock::lock;
use crate::operands::{DeviceInputs, SoftmaxMemory};

/// Pending chains per carry at most.
const PENDING: usize = 4;

thread_local! {
    /// Whether this thread is launching a chain: operations of that launch flush nothing.
    static LAUNCHING: Cell<bool> = const { Cell::new(false) };
}

/// Launches attentions, at once or in chains.
pub(crate) struct ChainQueue {
    pub context: LaunchContext,
    pending: Mutex<Vec<PendingChain>>,
}

/// A chain whose launch is delayed. Its references to the carry are weak: once the owner has
/// dropped the carry, no one can read the result.
struct PendingChain {
    chain: Chain,
    /// Whether the softmax starts with it: the carry's contents are not read.
    starts: bool,
    carry: Vec<Weak<DeviceAllocation>>,
    thread: ThreadId,
}

impl PendingChain {
    fn has_carry(&self, softmax: &SoftmaxMemory) -> bool {
        let own = self.carry.first().map(Weak::as_ptr);
        own == softmax.acc().map(std::ptr::from_ref)
    }

    fn cut(self, chain: &Chain) -> Vec<PendingChain> {
        let PendingChain {
            starts,
            carry,
            thread,
            ..
        } = self;
        let parts = self.chain.cut(chain).into_iter();
        let pend = |chain| PendingChain {
            chain,
            starts,
            carry: carry.clone(),
            thread,
        };
        parts.map(pend).collect()
    }

    fn writes(&self, memory: &DeviceAllocation) -> bool {
        self.carry
            .iter()
            .any(|own| std::ptr::eq(own.as_ptr(), memory.root()))
    }
}

impl ChainQueue {
    pub fn new(context: LaunchContext) -> Arc<ChainQueue> {
        let queue = Arc::new(ChainQueue {
            context,
            pending: Mutex::default(),
        });
        let own: Arc<dyn Deferred> = queue.clone();
        queue.context.device.set_deferred(Arc::downgrade(&own));
        queue
    }

    /// Forward on Hopper: launched now, or delayed and fused with the next job.
    pub fn forward(
        &self,
        job: &Job,
        inputs: DeviceInputs<'_>,
        state: SoftmaxState<'_, Buffer>,
    ) -> Result<()> {
        let softmax = SoftmaxMemory::new(state, inputs.dtype())?;
        let chain = Chain::new(job, inputs)?;
        if softmax.starts && softmax.finishes {
            return self.launch(&chain, &softmax);
        }
        let mut pending = self.pending();
        if job.tiles.is_some() {
            return self.keep_last(&mut pending, chain, &softmax);
        }
        let parts = split(&mut pending, chain, &softmax);
        let mut parts = parts.into_iter();
        parts.try_for_each(|chain| self.submit(&mut pending, chain, &softmax))
    }

    /// Makes a job on a grid pending, which launches the one before it: a chain might change their
    /// order. The last one can then finish its softmax.
    fn keep_last(
        &self,
        pending: &mut Vec<PendingChain>,
        chain: Chain,
        softmax: &SoftmaxMemory,
    ) -> Result<()> {
        let mut own = pending.iter_mut().filter(|one| one.has_carry(softmax));
        if !softmax.starts && own.any(|one| one.chain.join_on_grid(&chain)) {
            return Ok(());
        }
        let same_carry = |one: &mut PendingChain| one.has_carry(softmax);
        let before: Vec<PendingChain> = pending.extract_if(.., same_carry).collect();
        self.launch_all(before)?;
        pending.push(PendingChain {
            chain,
            starts: softmax.starts,
            carry: softmax.carry().iter().map(Arc::downgrade).collect(),
            thread: thread::current().id(),
        });
        Ok(())
    }

    /// Finishes the softmax of `cells` cells with the pending job on a grid that is the last of all
    /// of them, and returns true; or does nothing.
    pub fn finish_on_grid(
        &self,
        (cells, gain): (usize, f64),
        carry: &Carry<Buffer>,
        out: &mut Buffer,
        lse: &mut Buffer,
    ) -> Result<bool> {
        let memory = carry.acc.memory()?;
        let Some(last) = self.take_last(memory, (cells, gain), out) else {
            return Ok(false);
        };
        let carry = (!last.starts).then_some(carry);
        let state = SoftmaxState::Finish { carry, out, lse };
        let softmax = SoftmaxMemory::new(state, last.chain.dtype)?;
        self.launch(&last.chain, &softmax)?;
        Ok(true)
    }

    /// Removes the pending job on a grid that is the last of all cells of a carry.
    fn take_last(
        &self,
        carry: &Arc<DeviceAllocation>,
        (cells, gain): (usize, f64),
        out: &Buffer,
    ) -> Option<PendingChain> {
        let mut pending = self.pending();
        let own = |one: &PendingChain| {
            let acc = one.carry.first().map(Weak::as_ptr);
            acc == Some(Arc::as_ptr(carry))
        };
        let mut all = pending.iter().enumerate().filter(|(_, one)| own(one));
        let (Some((index, last)), None) = (all.next(), all.next()) else {
            return None;
        };
        let job = &last.chain.first().job;
        let in_job = job.batch * job.segments * job.queries * job.heads;
        let finishes = job.tiles.is_some()
            && (in_job, job.gain) == (cells, gain)
            && out.dtype() == last.chain.dtype
            && out.elements() == cells * job.dim;
        finishes.then(|| pending.remove(index))
    }

    /// Joins a chain to a pending one or makes it pending; launches it if it ends or is full.
    fn submit(
        &self,
        pending: &mut Vec<PendingChain>,
        chain: Chain,
        softmax: &SoftmaxMemory,
    ) -> Result<()> {
        let joinable = |one: &PendingChain| {
            !softmax.starts && one.has_carry(softmax) && one.chain.can_join(&chain)
        };
        let (chain, starts) = match pending.iter().position(joinable) {
            None => (chain, softmax.starts),
            Some(index) => {
                let mut before = pending.remove(index);
                before.chain.join(chain);
                (before.chain, before.starts)
            }
        };
        self.launch_overlapping(pending, &chain, softmax)?;
        if softmax.finishes || chain.is_full() {
            return self.launch(&chain, &softmax.starting(starts));
        }
        let same_carry = |one: &PendingChain| one.has_carry(softmax);
        let count = pending.iter().filter(|one| same_carry(one)).count();
        if let Some(oldest) = pending.iter().position(same_carry)
            && count >= PENDING
        {
            let oldest = pending.remove(oldest);
            self.launch_all([oldest])?;
        }
        pending.push(PendingChain {
            chain,
            starts,
            carry: softmax.carry().iter().map(Arc::downgrade).collect(),
            thread: thread::current().id(),
        });
        Ok(())
    }

    /// Launches the pending chains whose cells overlap those of `chain`.
    fn launch_overlapping(
        &self,
        pending: &mut Vec<PendingChain>,
        chain: &Chain,
        softmax: &SoftmaxMemory,
    ) -> Result<()> {
        let overlapping =
            |one: &mut PendingChain| one.has_carry(softmax) && !one.chain.is_disjoint_from(chain);
        let overlapping: Vec<PendingChain> = pending.extract_if(.., overlapping).collect();
        self.launch_all(overlapping)
    }

    /// The pending chains, without those whose carry was dropped.
    fn pending(&self) -> MutexGuard<'_, Vec<PendingChain>> {
        let mut pending = lock(&self.pending);
        pending.retain(|one| one.carry.iter().all(|memory| memory.strong_count() > 0));
        pending
    }

    /// Launches pending chains, except those whose carry was dropped or whose inputs expired.
    fn launch_all(&self, all: impl IntoIterator<Item = PendingChain>) -> Result<()> {
        all.into_iter().try_for_each(|pending| {
            let carry: Option<Vec<_>> = pending.carry.iter().map(Weak::upgrade).collect();
            match carry.filter(|_| pending.chain.is_usable()) {
                Some(carry) => {
                    let softmax = SoftmaxMemory::continuing(carry).starting(pending.starts);
                    self.launch(&pending.chain, &softmax)
                }
                None => Ok(()),
            }
        })
    }

    fn launch(&self, chain: &Chain, softmax: &SoftmaxMemory) -> Result<()> {
        let before = LAUNCHING.replace(true);
        let launched = hopper_forward::forward(&self.context, chain, softmax);
        LAUNCHING.set(before);
        launched
    }
}

/// Cuts a chain and the pending chains of the same carry at each other's row boundaries, so that
/// any two parts have the same rows or none in common. Returns the parts of the chain.
fn split(pending: &mut Vec<PendingChain>, chain: Chain, softmax: &SoftmaxMemory) -> Vec<Chain> {
    let mut parts = vec![chain];
    for one in pending.iter().filter(|one| one.has_carry(softmax)) {
        let all = parts.into_iter();
        parts = all.flat_map(|part| part.cut(&one.chain)).collect();
    }
    for part in &parts {
        let all = std::mem::take(pending).into_iter();
        pending.extend(all.flat_map(|one| match one.has_carry(softmax) {
            true => one.cut(part),
            false => vec![one],
        }));
    }
    parts
}

impl Deferred for ChainQueue {
    fn flush(&self, reason: FlushReason<'_>) -> Result<()> {
        if LAUNCHING.get() {
            return Ok(());
        }
        let own = thread::current().id();
        let due = |pending: &mut PendingChain| match reason {
            FlushReason::BeforeUse(memory) => memory.iter().any(|used| pending.writes(used)),
            FlushReason::BeforeWrite(memory) => pending.chain.reads(memory),
            FlushReason::BeforeWait => pending.thread == own,
            FlushReason::BeforeReceive { memory, round } => {
                pending.thread == own && pending.chain.must_launch_before(memory, round)
            }
            FlushReason::Synchronize => true,
        };
        // Held until the launches are enqueued, so that no other use comes before them.
        let mut pending = self.pending();
        let due: Vec<PendingChain> = pending.extract_if(.., due).collect();
        self.launch_all(due)
    }
}
