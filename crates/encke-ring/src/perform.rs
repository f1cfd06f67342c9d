//! One task of a program, said to the kernel.
//!
//! A translation without decisions: which buffers a task reads and writes is in the task, what is
//! done with them is the kernel's. What a task writes is held ([`CheckedOut`]), what it reads is borrowed
//! from the shelf or from the caller.

use encke_core::kernel::{Gradients, Kernel, KernelError, SoftmaxState, Upstream};
use encke_core::plan::program::{BufferId, Fill, Task};

use crate::buffer_table::{BorrowedInputs, BufferTable, CheckedOut};

/// Carries out tasks, none of which reads what another one writes.
pub(crate) fn perform_all<K: Kernel>(
    kernel: &K,
    loans: &BorrowedInputs<'_>,
    tasks: &[Task],
    shelf: &mut BufferTable<K::Buffer>,
) -> Result<(), KernelError> {
    let mut held = CheckedOut::take(shelf, tasks);
    let mut tasks = tasks.iter();
    let done = tasks.try_for_each(|task| perform(kernel, loans, task, shelf, &mut held));
    held.give_back(shelf);
    done
}

/// A buffer as jobs read it: the caller's where it was lent, the rank's own otherwise.
fn read<'x, K: Kernel>(
    kernel: &K,
    loans: &BorrowedInputs<'x>,
    shelf: &'x BufferTable<K::Buffer>,
    id: BufferId,
) -> K::Input<'x> {
    match loans.get(id) {
        Some(slice) => {
            let input = kernel.borrow(slice);
            input.expect("only what the kernel can read in place is lent")
        }
        None => kernel.input(shelf.get(id)),
    }
}

/// Tells the kernel what a task says.
pub(crate) fn perform<K: Kernel>(
    kernel: &K,
    loans: &BorrowedInputs<'_>,
    task: &Task,
    shelf: &BufferTable<K::Buffer>,
    held: &mut CheckedOut<K::Buffer>,
) -> Result<(), KernelError> {
    let read = |id: BufferId| read(kernel, loans, shelf, id);
    match task {
        Task::Fill { buffer, value } => {
            let value = match value {
                Fill::Zero => 0.0,
                Fill::MinusInfinity => f64::NEG_INFINITY,
            };
            kernel.fill(held.get(*buffer), value)
        }
        Task::Copy {
            blocks,
            add,
            from,
            to,
        } => blocks
            .iter()
            .try_for_each(|block| kernel.copy(block, *add, read(*from), held.get(*to))),
        Task::Pack { blocks, from, to } => kernel.pack(blocks, read(*from), held.get(*to)),
        Task::Forward {
            job,
            q,
            k,
            v,
            begins,
            carry,
        } => held.with_carry(*carry, |_, carry| {
            let state = SoftmaxState::Accumulate {
                carry,
                starts: *begins,
            };
            kernel.attend(job, read(*q), read(*k), read(*v), state)
        }),
        Task::Conclude {
            job,
            q,
            k,
            v,
            carry,
            out,
            lse,
        } => held.with_carry(*carry, |held, carry| {
            let (q, k, v) = (read(*q), read(*k), read(*v));
            held.with_ends(*out, *lse, |out, lse| {
                let carry = Some(&*carry);
                kernel.attend(job, q, k, v, SoftmaxState::Finish { carry, out, lse })
            })
        }),
        Task::Attend {
            job,
            q,
            k,
            v,
            out,
            lse,
        } => {
            let (q, k, v) = (read(*q), read(*k), read(*v));
            held.with_ends(*out, *lse, |out, lse| {
                let carry = None;
                kernel.attend(job, q, k, v, SoftmaxState::Finish { carry, out, lse })
            })
        }
        Task::Merge { blocks, from, to } => held.with_carry(*from, |held, from| {
            held.with_carry(*to, |_, to| {
                let mut blocks = blocks.iter();
                blocks.try_for_each(|block| kernel.merge(block, from, to))
            })
        }),
        Task::Finish {
            cells,
            dim,
            gain,
            carry,
            out,
            lse,
        } => held.with_carry(*carry, |held, carry| {
            held.with_ends(*out, *lse, |out, lse| {
                kernel.finish(*cells, *dim, *gain, carry, out, lse)
            })
        }),
        Task::Delta {
            cells,
            dim,
            out,
            dout,
            dlse,
            delta,
        } => kernel.delta(
            *cells,
            *dim,
            read(*out),
            read(*dout),
            dlse.map(read),
            held.get(*delta),
        ),
        Task::Backward {
            job,
            q,
            k,
            v,
            dout,
            lse,
            delta,
            dq,
            dk,
            dv,
        } => {
            let mut gradients = [*dq, *dk, *dv].map(|id| held.take_one(id));
            let upstream = Upstream {
                dout: read(*dout),
                lse: read(*lse),
                delta: read(*delta),
            };
            let (q, k, v) = (read(*q), read(*k), read(*v));
            let [to_q, to_k, to_v] = &mut gradients;
            let into = Gradients {
                dq: to_q,
                dk: to_k,
                dv: to_v,
            };
            let done = kernel.backward(job, q, k, v, upstream, into);
            for (id, buffer) in [*dq, *dk, *dv].into_iter().zip(gradients) {
                *held.slot(id) = Some(buffer);
            }
            done
        }
    }
}
