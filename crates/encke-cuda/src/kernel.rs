//! The GPU as a kernel: chooses the program for a job, and nothing else.
//!
//! All work is enqueued. Reading results back waits for the operations they depend on; errors on
//! the device are reported by the next call that waits.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys;
use encke_core::host;
use encke_core::job::{Block, Job};
use encke_core::kernel::{Carry, Gradients, Kernel, Result, SoftmaxState, Upstream};
use encke_core::memory::Memory;
use encke_core::plan::Pass;
use encke_core::sharding::Run;
use encke_core::transport::WireBuffer;
use encke_core::{DType, Data, Tensor, View};

use crate::allocation::DeviceAllocation;
use crate::arguments::TableCache;
use crate::buffer::Buffer;
use crate::device::{ATTENTION_STREAMS, Device};
use crate::error::{Error, NAME};
use crate::hops::Hops;
use crate::launch::chain_queue::ChainQueue;
use crate::launch::split_tilings::SplitPlan;
use crate::launch::{
    LaunchContext, cells, copy, grid_backward, grid_jobs, hopper_backward, hopper_forward, mma,
    plain, split,
};
use crate::lock::lock;
use crate::operands::{BackwardOperands, DeviceInputs};

/// Which family of kernels computes attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Path {
    /// The fastest family that the GPU has for the job, always at the job's precision.
    #[default]
    Auto,
    /// Hopper's wgmma and TMA: bf16 and f16 on compute capability 9.0.
    Hopper,
    /// mma.sync, on every GPU since Ampere: bf16 and f16.
    Mma,
    /// No tensor cores: every type.
    Plain,
}

/// How gradients are summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Summation {
    /// In any order: fastest, but the last bits depend on timing.
    Fast,
    /// In a fixed order: bitwise repeatable.
    #[default]
    Deterministic,
}

/// Callers' streams that a kernel serves at most.
const STREAMS: usize = 1024;

/// Attention on one GPU.
pub struct CudaKernel {
    queue: Arc<ChainQueue>,
    path: Path,
    summation: Summation,
    /// `None` in a kernel that runs on a caller's stream itself.
    streams: Option<CallerStreams>,
}

/// The kernels that run on callers' streams, by stream.
struct CallerStreams {
    kernels: Mutex<HashMap<u64, Arc<CudaKernel>>>,
    tables: Arc<TableCache>,
    /// Two counters for each stream.
    counters: Arc<DeviceAllocation>,
}

impl CudaKernel {
    /// Attention on the GPU with this ordinal.
    pub fn new(ordinal: usize) -> crate::Result<CudaKernel> {
        let device = Device::open(ordinal)?;
        let counters = (0..ATTENTION_STREAMS).map(|_| DeviceAllocation::new(&device, 8));
        let counters = counters.collect::<std::result::Result<Vec<_>, _>>()?;
        counters.iter().for_each(DeviceAllocation::zero_fill);
        let of_streams = DeviceAllocation::new(&device, 8 * STREAMS)?;
        of_streams.zero_fill();
        of_streams.flush_fill(device.compute())?;
        device.synchronize()?;
        Ok(CudaKernel {
            queue: ChainQueue::new(LaunchContext {
                device,
                tables: Arc::default(),
                counters,
            }),
            path: Path::default(),
            summation: Summation::default(),
            streams: Some(CallerStreams {
                kernels: Mutex::default(),
                tables: Arc::default(),
                counters: Arc::new(of_streams),
            }),
        })
    }

    /// The same kernel on a caller's stream alone, for calls of one rank: the stream's order is
    /// enough, so the call records and waits for no event, and a CUDA graph can capture it (after
    /// one call outside of it, which loads what the shape needs).
    ///
    /// # Safety
    /// `stream` must be a handle of the driver (`CUstream` or `cudaStream_t`; 0 is the default
    /// stream) of this GPU's primary context, and be valid whenever the kernel is used.
    pub unsafe fn on_stream(&self, stream: u64) -> crate::Result<Arc<CudaKernel>> {
        let Some(streams) = &self.streams else {
            return Err(Error::Unsupported {
                what: "another stream of a kernel that runs on a caller's".into(),
            });
        };
        let mut kernels = lock(&streams.kernels);
        if let Some(kernel) = kernels.get(&stream) {
            return Ok(Arc::clone(kernel));
        }
        let number = kernels.len();
        if number >= STREAMS {
            return Err(Error::Unsupported {
                what: format!("more than {STREAMS} streams of callers in one process"),
            });
        }
        let (base, handle) = (self.device(), stream as usize as sys::CUstream);
        // SAFETY: passed on to the caller. Dropping it does not destroy the stream.
        let owned = unsafe { base.context().wrap_borrowed_stream(handle) };
        let kernel = Arc::new(CudaKernel {
            queue: ChainQueue::new(LaunchContext {
                device: base.on_stream(&owned),
                tables: Arc::clone(&streams.tables),
                counters: vec![streams.counters.slice(8 * number, 8)],
            }),
            path: self.path,
            summation: self.summation,
            streams: None,
        });
        kernels.insert(stream, Arc::clone(&kernel));
        Ok(kernel)
    }

    /// Restricts the kernel to one family; jobs that it cannot compute are refused.
    pub fn path(mut self, path: Path) -> CudaKernel {
        self.path = path;
        self
    }

    /// Sets how gradients are summed.
    pub fn summation(mut self, summation: Summation) -> CudaKernel {
        self.summation = summation;
        self
    }

    /// Sets how parcels go from rank to rank.
    pub fn hops(self, hops: Hops) -> CudaKernel {
        self.context().device.set_hops(hops);
        self
    }

    pub(crate) fn context(&self) -> &LaunchContext {
        &self.queue.context
    }

    /// The GPU.
    pub fn device(&self) -> &Arc<Device> {
        &self.context().device
    }

    /// The family that computes a job: the set one, or the first that can. `on_hopper`: whether the
    /// Hopper family can, which differs between forward and backward.
    fn family(&self, job: &Job, dtype: DType, on_hopper: bool) -> crate::Result<Path> {
        let supports = |path: &Path| match path {
            Path::Auto => false,
            Path::Hopper => on_hopper,
            Path::Mma => mma::supports(&self.context().device, job, dtype),
            Path::Plain => true,
        };
        let all = [Path::Hopper, Path::Mma, Path::Plain];
        let allowed = |path: &Path| self.path == Path::Auto || self.path == *path;
        let found = all.into_iter().find(|path| allowed(path) && supports(path));
        found.ok_or_else(|| Error::Unsupported {
            what: format!(
                "{dtype} with a head dimension of {}{} among those called {:?} on {}; allow \
                 another path",
                job.dim,
                match job.is_plain() {
                    true => "",
                    false => " and this mask, score transform, dropout or value width",
                },
                self.path,
                self.device().name()
            ),
        })
    }

    /// The family that computes the jobs of a call on a grid: the same for all of them.
    fn grid_family(&self, job: &Job, dtype: DType, on_hopper: bool) -> crate::Result<Path> {
        // What a job's mask hides differs from ring to ring, what its call has does not.
        let job = Job {
            mask: None,
            ..job.clone()
        };
        self.family(&job, dtype, on_hopper)
    }

    /// Attends in the order of a grid.
    fn attend_on_grid(
        &self,
        job: &Job,
        inputs: DeviceInputs<'_>,
        state: SoftmaxState<'_, Buffer>,
    ) -> crate::Result<()> {
        let SoftmaxState::Accumulate { carry, starts } = state else {
            return Err(Error::Unsupported {
                what: "a job on a grid that finishes its softmax".into(),
            });
        };
        let dtype = inputs.dtype();
        let on_hopper = grid_jobs::on_hopper(self.device(), job, dtype);
        let family = self.grid_family(job, dtype, on_hopper)?;
        if family == Path::Hopper {
            return grid_jobs::aligned_parts(job).iter().try_for_each(|part| {
                let carry = &mut *carry;
                let state = SoftmaxState::Accumulate { carry, starts };
                self.queue.forward(part, inputs, state)
            });
        }
        grid_jobs::steps(job, starts).try_for_each(|(step, starts)| {
            let carry = &mut *carry;
            let state = SoftmaxState::Accumulate { carry, starts };
            match family {
                Path::Mma => mma::forward(self.context(), &step, inputs, state),
                _ => plain::forward(self.context(), &step, inputs, state),
            }
        })
    }

    /// Adds gradients in the order of a grid.
    fn backward_on_grid(
        &self,
        job: &Job,
        inputs: DeviceInputs<'_>,
        operands: BackwardOperands<'_>,
    ) -> crate::Result<()> {
        let (context, dtype) = (self.context(), inputs.dtype());
        let on_hopper = grid_jobs::backward_on_hopper(&context.device, job, dtype);
        let family = self.grid_family(job, dtype, on_hopper)?;
        if family == Path::Hopper {
            return grid_backward::backward(context, job, inputs, operands);
        }
        let BackwardOperands {
            upstream,
            gradients,
        } = operands;
        let Gradients { dq, dk, dv } = gradients;
        grid_jobs::steps(job, false).try_for_each(|(step, _)| {
            let gradients = Gradients {
                dq: &mut *dq,
                dk: &mut *dk,
                dv: &mut *dv,
            };
            let operands = BackwardOperands {
                upstream,
                gradients,
            };
            match family {
                Path::Mma => mma::backward(context, &step, inputs, operands),
                _ => plain::backward(context, &step, inputs, operands),
            }
        })
    }

    /// Whether `backward` of this job can write dk and dv, of so many elements, rounded to `dtype`,
    /// the type of q, k and v: it then overwrites all of both, which must be zero before.
    pub fn rounds_key_gradients(&self, job: &Job, dtype: DType, elements: [usize; 2]) -> bool {
        let device = &self.context().device;
        let (on_hopper, parts) = match job.tiles {
            None => (hopper_backward::plan(device, job, dtype).is_some(), 1),
            Some(_) => (
                grid_jobs::backward_on_hopper(device, job, dtype),
                grid_jobs::aligned_parts(job).len(),
            ),
        };
        let family = self.family(job, dtype, on_hopper);
        let hopper = family.is_ok_and(|family| family == Path::Hopper);
        hopper && parts == 1 && hopper_backward::covers(job, elements)
    }

    /// How the forward pass splits the keys of a job: few queries leave most of the GPU idle
    /// otherwise. None if it does not.
    fn split_plan(&self, job: &Job, dtype: DType) -> Option<SplitPlan> {
        let device = &self.context().device;
        match self.path {
            Path::Auto => {
                let on_hopper = hopper_forward::supports(device, job, dtype);
                split::plan(device, job, dtype, on_hopper)
            }
            Path::Mma => split::plan(device, job, dtype, false),
            Path::Hopper | Path::Plain => None,
        }
    }

    fn attention(
        &self,
        job: &Job,
        inputs: DeviceInputs<'_>,
        state: SoftmaxState<'_, Buffer>,
    ) -> crate::Result<()> {
        let dtype = inputs.dtype();
        if job.tiles.is_some() {
            return self.attend_on_grid(job, inputs, state);
        }
        if let Some(plan) = self.split_plan(job, dtype) {
            return split::forward(self.context(), job, &plan, inputs, state);
        }
        let on_hopper = hopper_forward::supports(&self.context().device, job, dtype);
        match self.family(job, dtype, on_hopper)? {
            Path::Hopper => self.queue.forward(job, inputs, state),
            Path::Mma => mma::forward(self.context(), job, inputs, state),
            _ => plain::forward(self.context(), job, inputs, state),
        }
    }
}

impl Memory for CudaKernel {
    type Buffer = Buffer;
    type Input<'a> = &'a Buffer;

    fn name(&self) -> &'static str {
        NAME
    }

    fn input<'a>(&self, buffer: &'a Buffer) -> &'a Buffer {
        buffer
    }

    fn allocate(&self, dtype: DType, elements: usize) -> Result<Buffer> {
        let buffer = Buffer::new(&self.context().device, dtype, elements)?;
        buffer.memory()?.zero_fill();
        Ok(buffer)
    }

    fn upload(&self, from: &View<'_>, runs: &[Run], to: &mut Buffer) -> Result<()> {
        let [b, _, h, d] = from.dims();
        let rows: usize = runs.iter().map(|run| run.count).sum();
        let elements = b * rows * h * d;
        // Rows that are contiguous and of the right type are read in place.
        if let Some(whole) = host::in_place(from, runs, to.dtype()) {
            return Ok(to.writable()?.write(whole.bytes())?);
        }
        let mut staged = host::allocate(NAME, to.dtype(), elements)?;
        host::upload(from, runs, &mut staged);
        Ok(to.writable()?.write(staged.bytes())?)
    }

    fn download(&self, from: &Buffer, runs: &[Run], to: &mut Tensor) -> Result<()> {
        let [b, _, h, d] = to.dims();
        let rows: usize = runs.iter().map(|run| run.count).sum();
        host::download(&from.read(b * rows * h * d)?, runs, to);
        Ok(())
    }

    fn move_to_host(&self, buffer: Buffer) -> Result<Data> {
        Ok(buffer.read(buffer.elements())?)
    }

    fn fill(&self, buffer: &mut Buffer, value: f64) -> Result<()> {
        Ok(copy::fill(self.context(), buffer, value)?)
    }

    fn copy(&self, block: &Block, add: bool, from: &Buffer, to: &mut Buffer) -> Result<()> {
        Ok(copy::copy(self.context(), block, add, from, to)?)
    }

    fn pack(&self, blocks: &[Block], from: &Buffer, to: &mut Buffer) -> Result<()> {
        Ok(copy::pack(self.context(), blocks, from, to)?)
    }
}

impl Kernel for CudaKernel {
    fn attend(
        &self,
        job: &Job,
        q: &Buffer,
        k: &Buffer,
        v: &Buffer,
        state: SoftmaxState<'_, Buffer>,
    ) -> Result<()> {
        Ok(self.attention(job, DeviceInputs::new(q, k, v)?, state)?)
    }

    fn merge(&self, block: &Block, from: &Carry<Buffer>, to: &mut Carry<Buffer>) -> Result<()> {
        Ok(cells::merge(self.context(), block, from, to)?)
    }

    fn finish(
        &self,
        cells: usize,
        dim: usize,
        gain: f64,
        carry: &Carry<Buffer>,
        out: &mut Buffer,
        lse: &mut Buffer,
    ) -> Result<()> {
        if (self.queue).finish_on_grid((cells, gain), carry, out, lse)? {
            return Ok(());
        }
        Ok(cells::finish(
            self.context(),
            cells,
            dim,
            gain,
            carry,
            out,
            lse,
        )?)
    }

    fn delta(
        &self,
        cells: usize,
        dim: usize,
        out: &Buffer,
        dout: &Buffer,
        dlse: Option<&Buffer>,
        delta: &mut Buffer,
    ) -> Result<()> {
        Ok(cells::delta(
            self.context(),
            cells,
            dim,
            out,
            dout,
            dlse,
            delta,
        )?)
    }

    fn backward(
        &self,
        job: &Job,
        q: &Buffer,
        k: &Buffer,
        v: &Buffer,
        upstream: Upstream<&Buffer>,
        gradients: Gradients<'_, Buffer>,
    ) -> Result<()> {
        let gradients = BackwardOperands {
            upstream,
            gradients,
        };
        let inputs = DeviceInputs::new(q, k, v)?;
        if job.tiles.is_some() {
            return Ok(self.backward_on_grid(job, inputs, gradients)?);
        }
        let (context, dtype) = (self.context(), inputs.dtype());
        let launch = hopper_backward::plan(&context.device, job, dtype);
        let fixed_order = self.summation == Summation::Deterministic;
        match (self.family(job, dtype, launch.is_some())?, launch) {
            (Path::Hopper, Some(launch)) => {
                hopper_backward::backward(context, job, &launch, fixed_order, inputs, gradients)?
            }
            (Path::Mma, _) => mma::backward(context, job, inputs, gradients)?,
            _ => plain::backward(context, job, inputs, gradients)?,
        }
        Ok(())
    }

    fn workspace_bytes(&self, job: &Job, pass: Pass, dtype: DType) -> usize {
        match pass {
            // Tiles live in shared memory and registers, but for the states of splits.
            Pass::Forward => {
                let plan = self.split_plan(job, dtype);
                plan.map_or(0, |plan| plan.workspace_bytes(job.value_dim))
            }
            Pass::Backward { .. } | Pass::BackwardByBranch => {
                hopper_backward::workspace_bytes(&self.context().device, job, dtype)
            }
        }
    }

    fn repeats_bits(&self) -> bool {
        true
    }

    fn attends_in_order(&self) -> bool {
        true
    }

    fn differentiates_in_order(&self) -> bool {
        true
    }

    fn fastest_dtype(&self) -> DType {
        // Tensor cores support bf16 since Ampere, and f16 since Volta.
        match self.device().capability() {
            (major, _) if major >= 8 => DType::Bf16,
            (7, _) => DType::F16,
            _ => DType::F32,
        }
    }
}
