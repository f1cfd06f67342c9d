//! A kernel with a transport between processes: what a rank of an MPI job computes with.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, anyhow};
use encke::plan::program::Role;
use encke::{CpuKernel, CudaKernel, Kernel, Plan, View};
use encke_core::transport::{Survivors, Transport};
use encke_cuda::Staged;
use encke_ring::threads::endpoints;
use encke_ring::{CallInputs, Outcome, ShardCall};
use encke_sim::lockstep;

use crate::cluster::Cluster;

/// A kernel whose buffers travel between the processes of a job.
pub trait RankKernel: Kernel {
    /// Whether its operations may still run when they have returned.
    const ASYNCHRONOUS: bool;

    /// The transport between the processes.
    fn wire(cluster: &mut Cluster) -> Box<dyn Survivors<Self::Buffer> + '_>;

    /// Waits until everything that was requested is done.
    fn synchronize(&self) -> Result<()>;

    /// The same call in this process alone, in other ways whose bits must be the same.
    fn other_ways(
        &self,
        plan: &Arc<Plan>,
        inputs: &[(Role, View<'_>)],
        deadline: Duration,
    ) -> Result<Vec<(&'static str, Outcome)>>;
}

impl RankKernel for CpuKernel {
    const ASYNCHRONOUS: bool = false;

    fn wire(cluster: &mut Cluster) -> Box<dyn Survivors<Self::Buffer> + '_> {
        Box::new(&mut cluster.wire)
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    fn other_ways(
        &self,
        plan: &Arc<Plan>,
        inputs: &[(Role, View<'_>)],
        deadline: Duration,
    ) -> Result<Vec<(&'static str, Outcome)>> {
        let wires = endpoints(plan.ranks(), deadline);
        let threads = on_threads(self, plan, inputs, wires)?;
        let simulated = lockstep::run(self, plan, inputs)?;
        Ok(vec![("threads", threads), ("the simulator", simulated)])
    }
}

impl RankKernel for CudaKernel {
    const ASYNCHRONOUS: bool = true;

    fn wire(cluster: &mut Cluster) -> Box<dyn Survivors<Self::Buffer> + '_> {
        cluster.gpu_wire()
    }

    fn synchronize(&self) -> Result<()> {
        Ok(self.device().synchronize()?)
    }

    fn other_ways(
        &self,
        plan: &Arc<Plan>,
        inputs: &[(Role, View<'_>)],
        deadline: Duration,
    ) -> Result<Vec<(&'static str, Outcome)>> {
        // Threads that hand over pointers join jobs into chains that processes cannot join.
        let wires = endpoints(plan.ranks(), deadline).into_iter().enumerate();
        let wires = wires.map(|(rank, wire)| Staged::new(wire, self.device(), rank, deadline));
        let threads = on_threads(self, plan, inputs, wires.collect())?;
        Ok(vec![("threads", threads)])
    }
}

/// A call on threads of this process, each with a transport of its own.
fn on_threads<K: Kernel, T: Transport<K::Buffer> + Send>(
    kernel: &K,
    plan: &Arc<Plan>,
    inputs: &[(Role, View<'_>)],
    wires: Vec<T>,
) -> Result<Outcome> {
    let run = |rank: usize, mut wire: T| -> Result<_> {
        let mut shard = ShardCall::new(kernel, plan, rank)?;
        shard.load(&mut CallInputs::Whole(inputs))?;
        shard.run(&mut wire)?;
        Ok(shard.into_parts().0)
    };
    let run = &run;
    let ranks: Result<Vec<_>> = std::thread::scope(|scope| {
        let wires = wires.into_iter().enumerate();
        let threads: Vec<_> = wires
            .map(|(rank, wire)| scope.spawn(move || run(rank, wire)))
            .collect();
        let joined = threads.into_iter().map(|thread| match thread.join() {
            Ok(ended) => ended,
            Err(_) => Err(anyhow!("a rank on a thread panicked")),
        });
        joined.collect()
    });
    let collected = Outcome::collect(kernel, plan, &mut ranks?, Vec::new(), Vec::new());
    Ok(collected?)
}
