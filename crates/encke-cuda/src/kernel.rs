//! The GPU as a kernel: which of its programs takes a job, and nothing else.
//!
//! Work is only enqueued here. What a caller reads back waits for what it depends on; what fails
//! on the device is told by the next call that waits.

use std::sync::Arc;

use encke_core::host;
use encke_core::job::{Block, Job};
use encke_core::kernel::{Carry, Gradients, Kernel, Result, SoftmaxState, Upstream};
use encke_core::plan::Pass;
use encke_core::sharding::Run;
use encke_core::transport::WireBuffer;
use encke_core::{DType, Data, Tensor, View};

use crate::buffer::Buffer;
use crate::device::{Device, LANES};
use crate::error::{Error, NAME};
use crate::hops::Hops;
use crate::jobs::Tables;
use crate::launch::chains::Chains;
use crate::launch::rows::{self, RowSums};
use crate::launch::{LaunchContext, cells, hopper_backward, hopper_forward, mma, moving, plain};
use crate::memory::Memory;
use crate::operands::{Gradient, Operands};

/// Which family of kernels computes attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Path {
    /// The fastest the GPU has for the job. Never one of another precision.
    #[default]
    Auto,
    /// Hopper's matrix units and copy engine: bf16 and f16 on compute capability 9.0.
    Hopper,
    /// The matrix instructions of every GPU since Ampere: bf16 and f16.
    Mma,
    /// No matrix units: every type.
    Plain,
}

/// How gradients are summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Summation {
    /// As fast as possible: the order of sums depends on timing, and so do the last bits.
    Fast,
    /// In one order: the same bits from run to run.
    #[default]
    Deterministic,
}

/// Attention on one GPU.
pub struct CudaKernel {
    chains: Arc<Chains>,
    path: Path,
    summation: Summation,
}

impl CudaKernel {
    /// On the GPU with this number.
    pub fn new(ordinal: usize) -> crate::Result<CudaKernel> {
        let device = Device::open(ordinal)?;
        let counters = (0..LANES).map(|_| Memory::new(&device, 8));
        let counters = counters.collect::<std::result::Result<Vec<_>, _>>()?;
        counters.iter().try_for_each(Memory::clear)?;
        Ok(CudaKernel {
            chains: Chains::new(LaunchContext {
                device,
                tables: Tables::default(),
                counters,
            }),
            path: Path::default(),
            summation: Summation::default(),
        })
    }

    /// The same with one family of kernels; jobs it has none for are refused.
    pub fn path(mut self, path: Path) -> CudaKernel {
        self.path = path;
        self
    }

    /// The same with another way to sum gradients.
    pub fn summation(mut self, summation: Summation) -> CudaKernel {
        self.summation = summation;
        self
    }

    /// The same with another way for parcels from rank to rank.
    pub fn hops(self, hops: Hops) -> CudaKernel {
        self.site().device.set_hops(hops);
        self
    }

    fn site(&self) -> &LaunchContext {
        &self.chains.site
    }

    /// The GPU.
    pub fn device(&self) -> &Arc<Device> {
        &self.site().device
    }

    /// Makes rows `[tokens, heads, dim]` of a generated sequence at `at` in a buffer. `keys` has one
    /// key for each head: all that a row's own key is mixed from beside its token.
    pub fn generate(
        &self,
        tokens: Run,
        keys: &[u64],
        dim: usize,
        (to, at): (&mut Buffer, usize),
    ) -> crate::Result<()> {
        rows::generate(self.site(), tokens, keys, dim, to, at)
    }

    /// Sums up rows `[tokens, heads, dim]` of a batch entry that lie at `at` in a buffer.
    pub fn sum_rows(
        &self,
        batch: usize,
        tokens: Run,
        heads: &[usize],
        dim: usize,
        (from, at): (&Buffer, usize),
    ) -> crate::Result<RowSums> {
        rows::sum(self.site(), batch, tokens, heads, dim, from, at)
    }

    /// Which family computes a job: the first that takes it, or the one that was asked for.
    /// Forward and backward on Hopper take different jobs, so that is told.
    fn family(&self, job: &Job, dtype: DType, on_hopper: bool) -> crate::Result<Path> {
        let takes = |path: &Path| match path {
            Path::Auto => false,
            Path::Hopper => on_hopper,
            Path::Mma => mma::takes(&self.site().device, job, dtype),
            Path::Plain => true,
        };
        let all = [Path::Hopper, Path::Mma, Path::Plain];
        let wanted = |path: &Path| self.path == Path::Auto || self.path == *path;
        let found = all.into_iter().find(|path| wanted(path) && takes(path));
        found.ok_or_else(|| Error::Unsupported {
            what: format!(
                "{dtype} with a head dimension of {} among those called {:?} on {}; allow another \
                 path",
                job.dim,
                self.path,
                self.device().name()
            ),
        })
    }

    fn attention(
        &self,
        job: &Job,
        operands: Operands<'_>,
        state: SoftmaxState<'_, Buffer>,
    ) -> crate::Result<()> {
        let dtype = operands.dtype();
        let on_hopper = hopper_forward::takes(&self.site().device, job, dtype);
        match self.family(job, dtype, on_hopper)? {
            Path::Hopper => self.chains.forward(job, operands, state),
            Path::Mma => mma::forward(self.site(), job, operands, state),
            _ => plain::forward(self.site(), job, operands, state),
        }
    }
}

impl encke_core::memory::Memory for CudaKernel {
    type Buffer = Buffer;
    type Input<'a> = &'a Buffer;

    fn name(&self) -> &'static str {
        NAME
    }

    fn input<'a>(&self, buffer: &'a Buffer) -> &'a Buffer {
        buffer
    }

    fn allocate(&self, dtype: DType, elements: usize) -> Result<Buffer> {
        let buffer = Buffer::new(&self.site().device, dtype, elements)?;
        buffer.memory()?.clear()?;
        Ok(buffer)
    }

    fn upload(&self, from: &View<'_>, runs: &[Run], to: &mut Buffer) -> Result<()> {
        let [b, _, h, d] = from.dims();
        let rows: usize = runs.iter().map(|run| run.count).sum();
        let elements = b * rows * h * d;
        // Rows that lie right are read where they are.
        if let Some(whole) = host::in_place(from, runs, to.dtype()) {
            return Ok(to.own()?.write(whole.bytes())?);
        }
        let mut staged = host::allocate(NAME, to.dtype(), elements)?;
        host::upload(from, runs, &mut staged);
        Ok(to.own()?.write(staged.bytes())?)
    }

    fn download(&self, from: &Buffer, runs: &[Run], to: &mut Tensor) -> Result<()> {
        let [b, _, h, d] = to.dims();
        let rows: usize = runs.iter().map(|run| run.count).sum();
        host::download(&from.read(b * rows * h * d)?, runs, to);
        Ok(())
    }

    fn into_host(&self, buffer: Buffer) -> Result<Data> {
        Ok(buffer.read(buffer.elements())?)
    }

    fn fill(&self, buffer: &mut Buffer, value: f64) -> Result<()> {
        Ok(moving::fill(self.site(), buffer, value)?)
    }

    fn copy(&self, block: &Block, add: bool, from: &Buffer, to: &mut Buffer) -> Result<()> {
        Ok(moving::copy(self.site(), block, add, from, to)?)
    }

    fn pack(&self, blocks: &[Block], from: &Buffer, to: &mut Buffer) -> Result<()> {
        Ok(moving::pack(self.site(), blocks, from, to)?)
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
        Ok(self.attention(job, Operands::new(q, k, v)?, state)?)
    }

    fn merge(&self, block: &Block, from: &Carry<Buffer>, to: &mut Carry<Buffer>) -> Result<()> {
        Ok(cells::merge(self.site(), block, from, to)?)
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
        Ok(cells::finish(
            self.site(),
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
            self.site(),
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
        let gradient = Gradient {
            upstream,
            gradients,
        };
        let operands = Operands::new(q, k, v)?;
        let (site, dtype) = (self.site(), operands.dtype());
        let choice = hopper_backward::choice(&site.device, job, dtype);
        let fixed_order = self.summation == Summation::Deterministic;
        match (self.family(job, dtype, choice.is_some())?, choice) {
            (Path::Hopper, Some(choice)) => {
                hopper_backward::backward(site, job, &choice, fixed_order, operands, gradient)?
            }
            (Path::Mma, _) => mma::backward(site, job, operands, gradient)?,
            _ => plain::backward(site, job, operands, gradient)?,
        }
        Ok(())
    }

    fn workspace_bytes(&self, job: &Job, pass: Pass, dtype: DType) -> usize {
        match pass {
            Pass::Forward => 0, // tiles live in shared memory and registers
            Pass::Backward { .. } => {
                hopper_backward::workspace_bytes(&self.site().device, job, dtype)
            }
        }
    }

    fn fastest_dtype(&self) -> DType {
        // Matrix instructions take bf16 since Ampere, and f16 since Volta.
        match self.device().capability() {
            (major, _) if major >= 8 => DType::Bf16,
            (7, _) => DType::F16,
            _ => DType::F32,
        }
    }
}
