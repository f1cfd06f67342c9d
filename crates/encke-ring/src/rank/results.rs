//! What a rank returns, and the memory it lies in.
//!
//! The decision here: zeros that nobody has written since are not written again. A rank knows which
//! rows of its gradients it adds to, of each buffer whether all others are zeros, and by its mark
//! which memory it has left so elsewhere.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::tensor_pool::{PooledStorage, TensorPool};
use encke_core::dtype::Data;
use encke_core::host;
use encke_core::job::Block;
use encke_core::kernel::{Kernel, KernelError};
use encke_core::plan::program::{BufferId, BufferPlan, Fill, RankPlan, Role, Task};
use encke_core::tensor::{StorageSink, Tensor};
use encke_core::transport::WireBuffer;

use super::Rank;

/// Marks of ranks, none of which is given twice.
static MARKS: AtomicU64 = AtomicU64::new(0);

/// What is known of zeros.
pub(super) struct Zeros {
    mark: u64,
    /// Gradients that are mostly zeros, and the rows that are not.
    sparse: Vec<(BufferId, Vec<Block>)>,
    /// Of every buffer, whether all its other numbers are known to be zeros.
    clean: Vec<bool>,
}

impl Zeros {
    pub fn new(plan: &RankPlan) -> Zeros {
        Zeros {
            mark: MARKS.fetch_add(1, Ordering::Relaxed),
            sparse: plan.sparse_gradients(),
            clean: vec![false; plan.buffers.len()],
        }
    }

    /// Notes whether all numbers of a buffer are zeros but those that its rank writes.
    pub fn know(&mut self, id: BufferId, clean: bool) {
        self.clean[id.0] = clean;
    }

    /// The rows of a buffer that is mostly zeros.
    fn rows(&self, id: BufferId) -> Option<&[Block]> {
        let of = self.sparse.iter().find(|(sparse, _)| *sparse == id);
        of.map(|(_, rows)| &rows[..])
    }

    /// Where a task makes all of a buffer zeros and all but some rows are: those.
    pub fn rows_to_clear(&mut self, task: &Task) -> Option<(BufferId, &[Block])> {
        let Task::Fill {
            buffer,
            value: Fill::Zero,
        } = task
        else {
            return None;
        };
        let clean = std::mem::replace(&mut self.clean[buffer.0], true);
        let rows = self.rows(*buffer).filter(|_| clean)?;
        Some((*buffer, rows))
    }
}

impl<K: Kernel> Rank<K> {
    /// Takes memory of earlier outputs for those that were given away. Numbers that are to be zeros
    /// are made so, unless all they have been since is outputs of this very rank.
    pub fn refit(&mut self, kernel: &K, spare: &TensorPool) -> Result<(), KernelError> {
        let sparse = self.plan.sparse_outputs();
        for port in &self.plan.outputs {
            let BufferPlan {
                dtype, elements, ..
            } = self.plan.buffers[port.buffer.0];
            if self.shelf.buffers[port.buffer.0].is_some() {
                continue;
            }
            let own = Some(self.mark(port.role));
            let Some(PooledStorage { data, mark }) = spare.take(dtype, elements, own) else {
                continue;
            };
            match kernel.adopt(data) {
                Ok(mut buffer) => {
                    if sparse.contains(&port.buffer) && mark != own {
                        kernel.fill(&mut buffer, 0.0)?;
                    }
                    self.shelf.put(port.buffer, buffer);
                    self.zeros.know(port.buffer, mark == own);
                }
                Err(data) => spare.recycle(data, mark),
            }
        }
        Ok(())
    }

    /// What memory of an output of this rank is known by ([`PooledStorage`]).
    pub fn mark(&self, role: Role) -> u64 {
        self.zeros.mark << 8 | role as u64
    }

    /// How many rows of an output it has, those it has adopted included.
    pub fn rows_of(&self, role: Role) -> usize {
        let ports = self.plan.outputs.iter().filter(|port| port.role == role);
        let runs = ports.flat_map(|port| &port.runs);
        runs.map(|run| run.count).sum()
    }

    /// Copies this rank's rows of an output out.
    pub fn store(&self, kernel: &K, role: Role, to: &mut Tensor) -> Result<(), KernelError> {
        for port in self.plan.outputs.iter().filter(|port| port.role == role) {
            kernel.download(self.shelf.get(port.buffer), &port.runs, to)?;
        }
        Ok(())
    }

    /// The same where this rank has all of the output and its `mark` is on the memory: numbers that
    /// are always zeros are left as they are.
    pub fn store_again(&self, kernel: &K, role: Role, to: &mut Tensor) -> Result<(), KernelError> {
        let port = self.plan.outputs.iter().find(|port| port.role == role);
        let whole = port.filter(|port| host::whole_run(&port.runs).is_some());
        let rows = whole.and_then(|port| Some((port.buffer, self.zeros.rows(port.buffer)?)));
        match rows {
            Some((id, rows)) => kernel.download_rows(self.shelf.get(id), rows, to),
            None => self.store(kernel, role, to),
        }
    }

    /// Takes an output that this rank has all of, in the order of its tokens; the buffer that held
    /// it is not copied but given away.
    pub fn take_output(&mut self, kernel: &K, role: Role) -> Result<Option<Data>, KernelError> {
        let of = self.plan.outputs.iter().find(|port| port.role == role);
        let Some(port) = of.filter(|port| host::whole_run(&port.runs).is_some()) else {
            return Ok(None);
        };
        let Some(buffer) = self.shelf.buffers[port.buffer.0].take() else {
            return Ok(None);
        };
        let (after, planned) = (self.plan.rounds.len(), &self.plan.buffers[port.buffer.0]);
        let bytes = buffer.allocated_bytes();
        self.ledger.give_back(after, planned.component, bytes);
        kernel.hand_over(buffer).map(Some)
    }
}
