//! An instrumented kernel: a closure sees every call first, and may count, wait, fail, panic, or
//! change the job. The naive kernel computes.

use encke_core::dtype::Slice;
use encke_core::job::{Block, Job};
use encke_core::kernel::{Carry, Gradients, Kernel, Result, SoftmaxState, Upstream};
use encke_core::memory::Memory;
use encke_core::naive::NaiveKernel;
use encke_core::plan::Pass;
use encke_core::sharding::Run;
use encke_core::{DType, Data, Tensor, View};

/// A call to the kernel.
pub enum KernelCall<'a> {
    Allocate,
    Attend {
        job: &'a mut Job,
        q: Slice<'a>,
        k: Slice<'a>,
    },
    Other,
}

pub struct InstrumentedKernel<F>(pub F);

/// The rank that is calling, from the name of its thread.
pub fn caller() -> usize {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or_default().to_string();
    let rank = name.strip_prefix("encke-rank-").map(str::parse);
    rank.expect("kernels are called by ranks")
        .expect("ranks are numbered")
}

impl<F: Fn(KernelCall<'_>) -> Result<()> + Send + Sync> Memory for InstrumentedKernel<F> {
    type Buffer = Data;
    type Input<'a> = Slice<'a>;

    fn name(&self) -> &'static str {
        "watched"
    }

    fn input<'a>(&self, buffer: &'a Data) -> Slice<'a> {
        buffer.as_slice()
    }

    fn borrow<'a>(&self, elements: Slice<'a>) -> Option<Slice<'a>> {
        Some(elements)
    }

    fn allocate(&self, dtype: DType, elements: usize) -> Result<Data> {
        (self.0)(KernelCall::Allocate)?;
        NaiveKernel.allocate(dtype, elements)
    }

    fn upload(&self, from: &View<'_>, runs: &[Run], to: &mut Data) -> Result<()> {
        (self.0)(KernelCall::Other)?;
        NaiveKernel.upload(from, runs, to)
    }

    fn download(&self, from: &Data, runs: &[Run], to: &mut Tensor) -> Result<()> {
        NaiveKernel.download(from, runs, to)
    }

    fn move_to_host(&self, buffer: Data) -> Result<Data> {
        Ok(buffer)
    }

    fn fill(&self, buffer: &mut Data, value: f64) -> Result<()> {
        NaiveKernel.fill(buffer, value)
    }

    fn copy(&self, block: &Block, add: bool, from: Slice<'_>, to: &mut Data) -> Result<()> {
        (self.0)(KernelCall::Other)?;
        NaiveKernel.copy(block, add, from, to)
    }
}

impl<F: Fn(KernelCall<'_>) -> Result<()> + Send + Sync> Kernel for InstrumentedKernel<F> {
    fn attend(
        &self,
        job: &Job,
        q: Slice<'_>,
        k: Slice<'_>,
        v: Slice<'_>,
        state: SoftmaxState<'_, Data>,
    ) -> Result<()> {
        let mut job = job.clone();
        let seen = &mut job;
        (self.0)(KernelCall::Attend { job: seen, q, k })?;
        NaiveKernel.attend(&job, q, k, v, state)
    }

    fn merge(&self, block: &Block, from: &Carry<Data>, to: &mut Carry<Data>) -> Result<()> {
        (self.0)(KernelCall::Other)?;
        NaiveKernel.merge(block, from, to)
    }

    fn finish(
        &self,
        cells: usize,
        dim: usize,
        gain: f64,
        carry: &Carry<Data>,
        out: &mut Data,
        lse: &mut Data,
    ) -> Result<()> {
        (self.0)(KernelCall::Other)?;
        NaiveKernel.finish(cells, dim, gain, carry, out, lse)
    }

    fn delta(
        &self,
        cells: usize,
        dim: usize,
        out: Slice<'_>,
        dout: Slice<'_>,
        dlse: Option<Slice<'_>>,
        delta: &mut Data,
    ) -> Result<()> {
        NaiveKernel.delta(cells, dim, out, dout, dlse, delta)
    }

    fn backward(
        &self,
        job: &Job,
        q: Slice<'_>,
        k: Slice<'_>,
        v: Slice<'_>,
        upstream: Upstream<Slice<'_>>,
        gradients: Gradients<'_, Data>,
    ) -> Result<()> {
        let mut job = job.clone();
        let seen = &mut job;
        (self.0)(KernelCall::Attend { job: seen, q, k })?;
        NaiveKernel.backward(&job, q, k, v, upstream, gradients)
    }

    fn workspace_bytes(&self, job: &Job, pass: Pass, dtype: DType) -> usize {
        NaiveKernel.workspace_bytes(job, pass, dtype)
    }
}
