//! The GPUs of an MPI job: which GPU each process computes on, and how parcels go between them.
//!
//! The decision here: what connects two processes is found by trying. Each process shares a few
//! bytes of its GPU's memory, every other process of the machine reads them, and two processes that
//! can read each other's exchange parcels on the GPU (CUDA IPC). Other pairs use NCCL, where every
//! process has it and a GPU of its own, or else pinned host memory and MPI.

use std::fs;

use anyhow::{Context, Result, anyhow, bail};
use encke::CudaKernel;
use encke_core::agreement::{Agreement, RankProgress};
use encke_core::transport::{Incoming, Moved, Outgoing, Survivors, Transport, TransportError};
use encke_cuda::{Buffer, Device, Nccl, NcclTransport, SharedMemoryProbe, StagedParcels};
use serde::{Deserialize, Serialize};

use crate::cluster::Cluster;
use crate::wire_choice::WireChoice;

/// What a process tells the others about itself and its GPU.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct GpuOffer {
    machine: String,
    gpu: [u8; 16],
    /// The name of its probe, if it can share memory.
    handle: Option<Vec<u8>>,
}

/// One rank's links to the GPUs of the others.
pub(crate) struct GpuLinks {
    parcels: StagedParcels,
    nccl: Option<NcclTransport>,
}

/// What the probe of a rank contains.
fn token(rank: usize) -> u64 {
    0x656e_636b_6500_0000 + rank as u64
}

/// The machine that this process runs on, the same in all containers of it.
fn machine() -> Result<String> {
    let path = "/proc/sys/kernel/random/boot_id";
    let id = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    Ok(id.trim().to_string())
}

impl Cluster {
    /// Opens this process's GPU and finds its links to those of the others. Without an index, the
    /// processes of a machine take its GPUs in turn. NCCL is chosen only if no call has to survive
    /// the loss of a rank. All ranks call it together.
    pub fn open_gpu(
        &mut self,
        index: Option<usize>,
        wire: WireChoice,
        survives: bool,
    ) -> Result<CudaKernel> {
        let own = machine();
        let own = self.agree(own)?;
        let machines = self.all_gather(&own)?;
        let before = machines[..self.rank()].iter();
        let local = before.filter(|machine| **machine == own).count();
        let kernel = (|| {
            let index = match index {
                Some(index) => index,
                None => {
                    let count = Device::count().context("--device cuda")?;
                    local % count.max(1)
                }
            };
            CudaKernel::new(index).with_context(|| format!("--device cuda:{index}"))
        })();
        let kernel = self.agree(kernel)?;
        let (links, text) = self.link(&kernel, own, (wire, survives))?;
        self.library = format!("{}, {text}", self.library);
        self.gpu = Some(links);
        Ok(kernel)
    }

    fn link(
        &mut self,
        kernel: &CudaKernel,
        machine: String,
        (wire, survives): (WireChoice, bool),
    ) -> Result<(GpuLinks, String)> {
        let (rank, ranks, device) = (self.rank(), self.ranks(), kernel.device());
        let gpu = self.agree(device.uuid().map_err(anyhow::Error::from))?;
        let probes = matches!(wire, WireChoice::Auto | WireChoice::Ipc) && ranks > 1;
        let probe = probes.then(|| SharedMemoryProbe::new(device, token(rank)));
        let probe = probe.and_then(Result::ok);
        let handle = probe.as_ref().map(|probe| probe.handle().to_vec());
        let offers = self.all_gather(&GpuOffer {
            machine: machine.clone(),
            gpu,
            handle,
        })?;
        let reads = |(peer, offer): (usize, &GpuOffer)| match (&probe, &offer.handle) {
            (Some(probe), Some(handle)) if peer != rank && offer.machine == machine => {
                probe.reads(handle, token(peer))
            }
            _ => false,
        };
        let own: Vec<bool> = offers.iter().enumerate().map(reads).collect();
        let all = self.all_gather(&own)?;
        probe.into_iter().for_each(SharedMemoryProbe::free);
        let sharing = |a: usize, b: usize| all[a][b] && all[b][a];
        let pairs = (0..ranks).flat_map(|a| (0..a).map(move |b| (b, a)));
        let apart = pairs.clone().find(|&(a, b)| !sharing(a, b));
        if let (WireChoice::Ipc, Some((a, b))) = (wire, apart) {
            return self.agree(Err(anyhow!(
                "--wire ipc: ranks {a} and {b} cannot read each other's GPU memory; use --wire auto"
            )));
        }
        let distinct = pairs.clone().all(|(a, b)| offers[a].gpu != offers[b].gpu);
        let nccl = match (wire, apart) {
            (WireChoice::Nccl, _) => self.join_nccl(kernel, distinct).map(Some),
            (WireChoice::Auto, Some(_)) if distinct && !survives => {
                // Where a process has no NCCL, all use the host.
                self.join_nccl(kernel, distinct).map(Some).or(Ok(None))
            }
            _ => Ok(None),
        };
        let nccl = nccl?;
        let mut parcels = StagedParcels::new(device, rank, self.deadline());
        let peers: Vec<usize> = (0..ranks).filter(|&peer| sharing(rank, peer)).collect();
        let shared = parcels.share_with(peers).map_err(anyhow::Error::from);
        self.agree(shared)?;
        let count = pairs.clone().filter(|&(a, b)| sharing(a, b)).count();
        let text = match (&nccl, count, pairs.count()) {
            (Some(_), ..) => "parcels over NCCL".to_string(),
            (_, _, 0) => "no parcels".to_string(),
            (_, count, all) if count == all => {
                "parcels in GPU memory that both processes read (CUDA IPC)".to_string()
            }
            (_, 0, _) => "parcels through pinned host memory".to_string(),
            (_, count, all) => format!(
                "parcels of {count} pairs of ranks in GPU memory that both read (CUDA IPC), of {} \
                 through pinned host memory",
                all - count
            ),
        };
        Ok((GpuLinks { parcels, nccl }, text))
    }

    /// Joins all ranks with NCCL; an error on all of them if one cannot.
    fn join_nccl(&mut self, kernel: &CudaKernel, distinct: bool) -> Result<NcclTransport> {
        let (rank, ranks, deadline) = (self.rank(), self.ranks(), self.deadline());
        let nccl = self.agree(Nccl::load().map_err(anyhow::Error::from))?;
        let id = self.is_root().then(|| nccl.unique_id()).transpose();
        let id = self.agree(id.map_err(anyhow::Error::from))?;
        let id: Vec<u8> = self.broadcast(id.map(|id| id.to_vec()))?;
        let joined = (|| {
            let Ok(id) = id.try_into() else {
                bail!("the root's NCCL has another kind of identity than this one");
            };
            let joined = NcclTransport::new(&nccl, kernel.device(), &id, rank, ranks, deadline);
            // NCCL refuses ranks that share a GPU unless NCCL_HOSTID differs between them.
            joined.with_context(|| match distinct {
                true => "--wire nccl",
                false => "--wire nccl, with processes that share a GPU",
            })
        })();
        self.agree(joined)
    }

    /// Frees the memory that processes share, when none of them reads it any more.
    pub(crate) fn close_gpu(&mut self) -> Result<()> {
        let Some(mut links) = self.gpu.take() else {
            return Ok(());
        };
        let closed = links.parcels.close_shared();
        self.agree(Ok(()))?;
        closed.free();
        Ok(())
    }

    /// The transport between GPUs.
    pub(crate) fn gpu_wire(&mut self) -> Box<dyn Survivors<Buffer> + '_> {
        let rank = self.rank();
        let links = self.gpu.as_mut().expect("a GPU was opened before");
        match &mut links.nccl {
            Some(wire) => Box::new(NcclWire { wire, rank }),
            None => Box::new(links.parcels.over(&mut self.wire)),
        }
    }
}

/// NCCL between ranks none of which survives the others.
struct NcclWire<'a> {
    wire: &'a mut NcclTransport,
    rank: usize,
}

impl Transport<Buffer> for NcclWire<'_> {
    fn exchange(
        &mut self,
        round: usize,
        outgoing: &[Outgoing<'_, Buffer>],
        incoming: &mut [Incoming<'_, Buffer>],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Moved, TransportError> {
        self.wire.exchange(round, outgoing, incoming, meanwhile)
    }
}

impl Survivors<Buffer> for NcclWire<'_> {
    fn agree(&mut self, _: RankProgress) -> Result<Agreement, TransportError> {
        Err(TransportError::Local {
            rank: self.rank,
            round: 0,
            reason: "NCCL has no agreement of survivors; use --wire auto or host".to_string(),
        })
    }

    fn give_up(&mut self, _: &str) {}
}
