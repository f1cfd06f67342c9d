//! The outputs of a rank, and the memory they lie in.
//!
//! The decision here: elements that are zeros already are not zeroed again. A rank knows which rows
//! of its gradients it adds to, and tracks for each buffer whether all other elements are zeros.
//! Its mark identifies memory elsewhere that it has left in that condition.

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

/// The next rank's mark; each is used once.
static MARKS: AtomicU64 = AtomicU64::new(0);

/// Which elements of a rank's buffers are known to be zeros.
pub(super) struct ZeroTracker {
    mark: u64,
    /// Gradients that are mostly zeros, and the rows that are not.
    sparse: Vec<(BufferId, Vec<Block>)>,
    /// For each buffer: true if all elements outside those rows are zeros.
    zeroed: Vec<bool>,
}

impl ZeroTracker {
    pub fn new(plan: &RankPlan) -> ZeroTracker {
        ZeroTracker {
            mark: MARKS.fetch_add(1, Ordering::Relaxed),
            sparse: plan.sparse_gradients(),
            zeroed: vec![false; plan.buffers.len()],
        }
    }

    /// Sets whether all elements of a buffer are zeros except those that its rank writes.
    pub fn set(&mut self, id: BufferId, zeroed: bool) {
        self.zeroed[id.0] = zeroed;
    }

    /// The nonzero rows of a buffer that is mostly zeros.
    fn rows(&self, id: BufferId) -> Option<&[Block]> {
        let of = self.sparse.iter().find(|(sparse, _)| *sparse == id);
        of.map(|(_, rows)| &rows[..])
    }

    /// The rows that a task still has to zero, if it zeroes a whole buffer that is zero elsewhere.
    pub fn rows_to_zero(&mut self, task: &Task) -> Option<(BufferId, &[Block])> {
        let Task::Fill {
            buffer,
            value: Fill::Zero,
        } = task
        else {
            return None;
        };
        let zeroed = std::mem::replace(&mut self.zeroed[buffer.0], true);
        let rows = self.rows(*buffer).filter(|_| zeroed)?;
        Some((*buffer, rows))
    }
}

impl<K: Kernel> Rank<K> {
    /// Takes pooled memory for outputs whose buffers were given away. Zeroes the elements that must
    /// be zeros, unless this rank was the last to write the memory.
    pub fn reuse_outputs(&mut self, kernel: &K, pool: &TensorPool) -> Result<(), KernelError> {
        let sparse = self.plan.sparse_outputs();
        for port in &self.plan.outputs {
            let BufferPlan {
                dtype, elements, ..
            } = self.plan.buffers[port.buffer.0];
            if self.table.buffers[port.buffer.0].is_some() {
                continue;
            }
            let own = Some(self.mark(port.role));
            let Some(PooledStorage { data, mark }) = pool.take(dtype, elements, own) else {
                continue;
            };
            match kernel.move_from_host(data) {
                Ok(mut buffer) => {
                    if sparse.contains(&port.buffer) && mark != own {
                        kernel.fill(&mut buffer, 0.0)?;
                    }
                    self.table.put(port.buffer, buffer);
                    self.zeros.set(port.buffer, mark == own);
                }
                Err(data) => pool.recycle(data, mark),
            }
        }
        Ok(())
    }

    /// The mark on pooled memory that this rank wrote an output to ([`PooledStorage`]).
    pub fn mark(&self, role: Role) -> u64 {
        self.zeros.mark << 8 | role as u64
    }

    /// How many rows of an output it holds, including those of adopted shards.
    pub fn rows_of(&self, role: Role) -> usize {
        let ports = self.plan.outputs.iter().filter(|port| port.role == role);
        let runs = ports.flat_map(|port| &port.runs);
        runs.map(|run| run.count).sum()
    }

    /// Copies this rank's rows of an output out.
    pub fn store(&self, kernel: &K, role: Role, to: &mut Tensor) -> Result<(), KernelError> {
        for port in self.plan.outputs.iter().filter(|port| port.role == role) {
            kernel.download(self.table.get(port.buffer), &port.runs, to)?;
        }
        Ok(())
    }

    /// The same where this rank holds all of the output and its `mark` is on the memory: elements
    /// that are always zeros are not written.
    pub fn store_nonzero(
        &self,
        kernel: &K,
        role: Role,
        to: &mut Tensor,
    ) -> Result<(), KernelError> {
        let port = self.plan.outputs.iter().find(|port| port.role == role);
        let whole = port.filter(|port| host::whole_run(&port.runs).is_some());
        let rows = whole.and_then(|port| Some((port.buffer, self.zeros.rows(port.buffer)?)));
        match rows {
            Some((id, rows)) => kernel.download_rows(self.table.get(id), rows, to),
            None => self.store(kernel, role, to),
        }
    }

    /// Takes an output that this rank holds completely, in token order. The buffer is given away,
    /// not copied.
    pub fn take_output(&mut self, kernel: &K, role: Role) -> Result<Option<Data>, KernelError> {
        let of = self.plan.outputs.iter().find(|port| port.role == role);
        let Some(port) = of.filter(|port| host::whole_run(&port.runs).is_some()) else {
            return Ok(None);
        };
        let Some(buffer) = self.table.buffers[port.buffer.0].take() else {
            return Ok(None);
        };
        let (after, planned) = (self.plan.rounds.len(), &self.plan.buffers[port.buffer.0]);
        let bytes = buffer.allocated_bytes();
        self.ledger.free(after, planned.component, bytes);
        kernel.move_to_host(buffer).map(Some)
    }
}
