//! Runs one task of a program on the kernel.
//!
//! A translation without decisions: the task names the buffers it reads and writes, the kernel
//! computes; a job on a grid is computed step by step, where the kernel has no order of its own. A
//! task writes buffers that are checked out ([`CheckedOut`]); it reads buffers in the table, or the
//! caller's inputs in place.

use encke_core::job::Job;
use encke_core::kernel::{Gradients, Kernel, KernelError, SoftmaxState, Upstream};
use encke_core::plan::program::{BufferId, Fill, Task};

use crate::buffer_table::{BorrowedInputs, BufferTable, CheckedOut};

/// Runs tasks, none of which reads what another one writes.
pub(crate) fn run_tasks<K: Kernel>(
    kernel: &K,
    borrowed: &BorrowedInputs<'_>,
    tasks: &[Task],
    table: &mut BufferTable<K::Buffer>,
) -> Result<(), KernelError> {
    let mut outputs = CheckedOut::take(table, tasks);
    let mut tasks = tasks.iter();
    let done = tasks.try_for_each(|task| run_task(kernel, borrowed, task, table, &mut outputs));
    outputs.give_back(table);
    done
}

/// A buffer as jobs read it: the caller's where it is borrowed, the rank's own otherwise.
fn read<'x, K: Kernel>(
    kernel: &K,
    borrowed: &BorrowedInputs<'x>,
    table: &'x BufferTable<K::Buffer>,
    id: BufferId,
) -> K::Input<'x> {
    match borrowed.get(id) {
        Some(slice) => {
            let input = kernel.borrow(slice);
            input.expect("inputs are borrowed only where the kernel can read them in place")
        }
        None => kernel.input(table.get(id)),
    }
}

/// Runs one task.
pub(crate) fn run_task<K: Kernel>(
    kernel: &K,
    borrowed: &BorrowedInputs<'_>,
    task: &Task,
    table: &BufferTable<K::Buffer>,
    outputs: &mut CheckedOut<K::Buffer>,
) -> Result<(), KernelError> {
    let read = |id: BufferId| read(kernel, borrowed, table, id);
    match task {
        Task::Fill { buffer, value } => {
            let value = match value {
                Fill::Zero => 0.0,
                Fill::MinusInfinity => f64::NEG_INFINITY,
            };
            kernel.fill(outputs.get(*buffer), value)
        }
        Task::Copy {
            blocks,
            add,
            from,
            to,
        } => blocks
            .iter()
            .try_for_each(|block| kernel.copy(block, *add, read(*from), outputs.get(*to))),
        Task::Pack { blocks, from, to } => kernel.pack(blocks, read(*from), outputs.get(*to)),
        Task::Forward {
            job,
            q,
            k,
            v,
            starts,
            carry,
        } => outputs.with_carry(*carry, |_, carry| {
            let mut attend = |job: &Job, starts: bool| {
                let carry = &mut *carry;
                let state = SoftmaxState::Accumulate { carry, starts };
                kernel.attend(job, read(*q), read(*k), read(*v), state)
            };
            if job.tiles.is_none() || kernel.attends_in_order() {
                return attend(job, *starts);
            }
            let mut steps = job.forward_steps(*starts);
            steps.try_for_each(|(step, starts)| attend(&step, starts))
        }),
        Task::Conclude {
            job,
            q,
            k,
            v,
            carry,
            out,
            lse,
        } => outputs.with_carry(*carry, |outputs, carry| {
            let (q, k, v) = (read(*q), read(*k), read(*v));
            outputs.with_outputs(*out, *lse, |out, lse| {
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
            outputs.with_outputs(*out, *lse, |out, lse| {
                let carry = None;
                kernel.attend(job, q, k, v, SoftmaxState::Finish { carry, out, lse })
            })
        }
        Task::Merge { blocks, from, to } => outputs.with_carry(*from, |outputs, from| {
            outputs.with_carry(*to, |_, to| {
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
        } => outputs.with_carry(*carry, |outputs, carry| {
            outputs.with_outputs(*out, *lse, |out, lse| {
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
            outputs.get(*delta),
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
            let mut gradients = [*dq, *dk, *dv].map(|id| outputs.take_one(id));
            let upstream = Upstream {
                dout: read(*dout),
                lse: read(*lse),
                delta: read(*delta),
            };
            let (q, k, v) = (read(*q), read(*k), read(*v));
            let [to_q, to_k, to_v] = &mut gradients;
            let mut backward = |job: &Job| {
                let into = Gradients {
                    dq: &mut *to_q,
                    dk: &mut *to_k,
                    dv: &mut *to_v,
                };
                kernel.backward(job, q, k, v, upstream, into)
            };
            let done = match kernel.differentiates_in_order() {
                true => backward(job),
                false => job.tile_steps().try_for_each(|step| backward(&step)),
            };
            for (id, buffer) in [*dq, *dk, *dv].into_iter().zip(gradients) {
                *outputs.slot(id) = Some(buffer);
            }
            done
        }
    }
}
