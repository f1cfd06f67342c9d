//! All ranks of a call on one thread in lockstep: in each round every rank prepares and computes,
//! then every message is copied from its sender's buffer into its receiver's.
//!
//! The result has the bits of a ring of threads: the plan fixes the order of all floating-point
//! operations. There is no network and no intermediate copy, so the memory of the process is that
//! of the ranks.
//!
//! Memory is accounted as if each rank had the device to itself: the kernel's workspace counts in
//! full for every rank that computed.

use std::sync::Arc;
use std::time::Instant;

use encke_core::kernel::Kernel;
use encke_core::plan::Plan;
use encke_core::plan::program::{Component, Message, Role};
use encke_core::plan::resize::Resize;
use encke_core::tensor::View;
use encke_core::transport::{Moved, WireBuffer};
use encke_ring::call::{self, check_inputs, new_rank};
use encke_ring::error::catch_panic;
use encke_ring::memory::{of_buffers, planned, share_workspace};
use encke_ring::rank::BorrowedInputs;
use encke_ring::trace::{Activity, Event, Recorder, Trace};
use encke_ring::{Outcome, Rank, RankError, RankMemory, Resized, RingError, Sharded, resize};

/// Executes a plan on whole tensors, all ranks on this thread.
pub fn run<K: Kernel>(
    kernel: &K,
    plan: &Arc<Plan>,
    inputs: &[(Role, View<'_>)],
) -> Result<Outcome, RingError> {
    check_inputs(plan, inputs)?;
    let origin = Instant::now();
    let mut ranks = Vec::with_capacity(plan.ranks());
    let mut recorders = Vec::with_capacity(plan.ranks());
    for number in 0..plan.ranks() {
        let mut rank = new_rank(kernel, plan, number)?;
        let mut recorder = Recorder::new(number, origin);
        let loaded = catch_panic(|| call::load_inputs(kernel, &mut rank, inputs, &mut recorder));
        loaded.map_err(|source| failed(number, source))?;
        ranks.push(rank);
        recorders.push(recorder);
    }
    let events = steps(kernel, &[], &mut ranks, recorders)?;
    conclude(kernel, plan, ranks, events)
}

/// Moves sharded tensors from one sharding to another, all ranks on this thread.
pub fn resize<K: Kernel>(
    kernel: &K,
    resize: &Resize,
    tensors: &[&Sharded],
) -> Result<Resized, RingError> {
    resize::check_tensors(resize, tensors)?;
    let origin = Instant::now();
    let mut ranks = resize::idle_ranks(resize, tensors);
    let mut borrowed = Vec::with_capacity(ranks.len());
    for rank in &mut ranks {
        let number = rank.plan().rank;
        let shard = |index: usize| tensors[index].shard(number).view();
        let bound = catch_panic(|| resize::bind_inputs(kernel, rank, shard));
        borrowed.push(bound.map_err(|source| failed(number, source))?);
    }
    let recorders = (0..ranks.len()).map(|rank| Recorder::new(rank, origin));
    let events = steps(kernel, &borrowed, &mut ranks, recorders.collect())?;
    Ok(Resized {
        tensors: resize::collect(kernel, resize, &ranks, tensors)?,
        trace: Trace { events },
        memory: ranks.iter().map(of_buffers).collect(),
    })
}

/// Executes all rounds of all ranks. `borrowed` has the inputs that ranks read in place, if any.
fn steps<K: Kernel>(
    kernel: &K,
    borrowed: &[BorrowedInputs<'_>],
    ranks: &mut [Rank<K>],
    mut recorders: Vec<Recorder>,
) -> Result<Vec<Event>, RingError> {
    let rounds = ranks.iter().map(|rank| rank.plan().rounds.len()).max();
    for round in 0..rounds.unwrap_or(0) {
        step(kernel, round, borrowed, ranks, &mut recorders)?;
    }
    Ok(recorders.into_iter().flat_map(Recorder::finish).collect())
}

/// Collects the outputs of finished ranks, frees the ranks, and reports the memory that they held.
pub(crate) fn conclude<K: Kernel>(
    kernel: &K,
    plan: &Arc<Plan>,
    mut ranks: Vec<Rank<K>>,
    events: Vec<Event>,
) -> Result<Outcome, RingError> {
    let held: Vec<usize> = ranks.iter().map(Rank::allocated_bytes).collect();
    let mut outcome = Outcome::collect(kernel, plan, &mut ranks, events, Vec::new())?;
    let each = ranks.into_iter().zip(held);
    let memory = each.map(|(rank, held)| memory(kernel, plan, rank, held));
    outcome.memory = memory.collect();
    share_workspace(outcome.memory.iter_mut().map(|memory| &mut memory.planned));
    Ok(outcome)
}

/// Executes one round of every rank that has it.
fn step<K: Kernel>(
    kernel: &K,
    round: usize,
    borrowed: &[BorrowedInputs<'_>],
    ranks: &mut [Rank<K>],
    recorders: &mut [Recorder],
) -> Result<(), RingError> {
    let live = |rank: &Rank<K>| round < rank.plan().rounds.len();
    let nothing = BorrowedInputs::default();
    for (rank, recorder) in ranks.iter_mut().zip(&mut *recorders) {
        if !live(rank) {
            continue;
        }
        let number = rank.plan().rank;
        let borrowed = borrowed.get(number).unwrap_or(&nothing);
        let done = catch_panic(|| {
            rank.prepare(kernel, borrowed, round, recorder)?;
            rank.compute(kernel, borrowed, round, recorder)
        });
        done.map_err(|source| failed(number, source))?;
        let used = kernel.scratch_bytes();
        rank.ledger_mut().set(round, Component::Workspace, used);
    }
    let begin = Instant::now();
    let mut moved = vec![Moved::default(); ranks.len()];
    for receiver in (0..ranks.len())
        .filter(|rank| live(&ranks[*rank]))
        .collect::<Vec<_>>()
    {
        for message in ranks[receiver].plan().rounds[round].receives.clone() {
            let bytes = deliver(round, &message, receiver, ranks);
            moved[receiver].received_bytes += bytes;
            moved[message.address.peer].sent_bytes += bytes;
        }
    }
    for ((rank, recorder), moved) in ranks.iter().zip(recorders).zip(moved) {
        let planned = match live(rank) {
            true => rank.plan().moved(round),
            false => Moved::default(),
        };
        assert_eq!(moved, planned, "the bytes moved are those planned");
        if planned != Moved::default() {
            recorder.record(round, Activity::Wait, begin, moved);
        }
    }
    Ok(())
}

/// Copies a message from its sender's buffer into its receiver's; returns its bytes.
fn deliver<K: Kernel>(
    round: usize,
    message: &Message,
    receiver: usize,
    ranks: &mut [Rank<K>],
) -> usize {
    let from = message.address;
    let [sender, receiver] = ranks
        .get_disjoint_mut([from.peer, receiver])
        .expect("a message goes from one rank to another");
    let number = receiver.plan().rank;
    let sent = sender.plan().rounds[round]
        .sends
        .iter()
        .find(|sent| (sent.address.peer, sent.address.tag) == (number, from.tag))
        .expect("a receive has its send in the same round");
    assert_eq!(
        sent.address.elements, from.elements,
        "a send and its receive have the same size"
    );
    let parcel = sender.buffer(sent.buffer);
    receiver.accept(message).copy_from(parcel, from.elements);
    from.elements * parcel.element_bytes()
}

/// Frees a rank and reports the memory it held; its outputs may have been taken before. Nothing may
/// be left in its ledger but the workspace, which the kernel keeps.
fn memory<K: Kernel>(kernel: &K, plan: &Plan, rank: Rank<K>, allocated_bytes: usize) -> RankMemory {
    let planned = planned(kernel, rank.plan(), 1, plan.request());
    let (number, after) = (rank.plan().rank, rank.plan().rounds.len());
    let mut ledger = rank.free();
    ledger.set(after, Component::Workspace, 0);
    let left = ledger.total().held_bytes();
    assert_eq!(left, 0, "rank {number} freed all it allocated");
    RankMemory {
        rank: number,
        planned,
        borrowed_bytes: 0,
        allocated_bytes,
        ledger,
    }
}

fn failed(rank: usize, source: RankError) -> RingError {
    RingError::Rank {
        rank,
        source,
        others: Vec::new(),
    }
}
