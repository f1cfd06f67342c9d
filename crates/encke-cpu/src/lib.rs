//! Attention kernels for the CPU: portable, safe, flash-style.
//!
//! Scores exist one tile at a time and the carry is updated in place, so memory beside the
//! operands does not grow with the sequence. Nothing here knows of patterns or ranks: a job says
//! it all.
//!
//! The decision that shaped this crate: lanes of a vector are queries (keys, for dk and dv), never
//! channels. A softmax then needs no reduction across lanes, rows of any dimension fill vectors,
//! and plain loops over arrays of 32 numbers are all the SIMD there is.
#![forbid(unsafe_code)]

mod backward;
mod cells;
mod forward;
mod real;
mod scratch;
mod tile;
mod wave;

use encke_core::host;
use encke_core::job::{Block, Job};
use encke_core::kernel::{Carry, Gradients, Kernel, Result, Upstream};
use encke_core::sharding::Run;
use encke_core::{DType, Data, Tensor, View};

use scratch::Pool;

/// Attention on the CPU, on the threads of the rayon pool it is called from.
///
/// Results do not depend on the number of threads. Sums are f64 where any operand is f64 and f32
/// otherwise. Scratch memory is kept for the next call.
#[derive(Debug, Default)]
pub struct CpuKernel {
    narrow: Pool<f32>,
    wide: Pool<f64>,
}

impl CpuKernel {
    /// A kernel without scratch memory: that comes with the first job.
    pub fn new() -> CpuKernel {
        CpuKernel::default()
    }

    /// Bytes of scratch memory held for the next call.
    pub fn scratch_bytes(&self) -> usize {
        self.narrow.bytes() + self.wide.bytes()
    }
}

/// Calls a function with the pool of the precision that the given operands are summed in.
macro_rules! in_precision {
    ($kernel:expr, [$($operand:expr),*], $($call:ident)::* ($($argument:expr),*)) => {
        if [$(&$operand),*].iter().any(|data| data.as_slice().dtype() == DType::F64) {
            $($call)::*::<f64>(&$kernel.wide, $($argument),*)
        } else {
            $($call)::*::<f32>(&$kernel.narrow, $($argument),*)
        }
    };
}

impl Kernel for CpuKernel {
    type Buffer = Data;

    fn name(&self) -> &'static str {
        "cpu"
    }

    fn allocate(&self, dtype: DType, elements: usize) -> Result<Data> {
        host::allocate(self.name(), dtype, elements)
    }

    fn upload(&self, from: &View<'_>, runs: &[Run], to: &mut Data) -> Result<()> {
        host::upload(from, runs, to);
        Ok(())
    }

    fn download(&self, from: &Data, runs: &[Run], to: &mut Tensor) -> Result<()> {
        host::download(from, runs, to);
        Ok(())
    }

    fn fill(&self, buffer: &mut Data, value: f64) -> Result<()> {
        host::fill(buffer, value);
        Ok(())
    }

    fn copy(&self, block: &Block, add: bool, from: &Data, to: &mut Data) -> Result<()> {
        host::copy(block, add, from, to);
        Ok(())
    }

    fn forward(
        &self,
        job: &Job,
        q: &Data,
        k: &Data,
        v: &Data,
        carry: &mut Carry<Data>,
    ) -> Result<()> {
        in_precision!(
            self,
            [*q, *k, *v, carry.acc],
            forward::forward(job, q, k, v, carry)
        );
        Ok(())
    }

    fn merge(&self, block: &Block, from: &Carry<Data>, to: &mut Carry<Data>) -> Result<()> {
        in_precision!(self, [from.acc, to.acc], cells::merge(block, from, to));
        Ok(())
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
        in_precision!(
            self,
            [carry.acc],
            cells::finish(cells, dim, gain, carry, out, lse)
        );
        Ok(())
    }

    fn delta(
        &self,
        cells: usize,
        dim: usize,
        out: &Data,
        dout: &Data,
        dlse: Option<&Data>,
        delta: &mut Data,
    ) -> Result<()> {
        in_precision!(
            self,
            [*out, *dout, *delta],
            cells::delta(cells, dim, out, dout, dlse, delta)
        );
        Ok(())
    }

    fn backward(
        &self,
        job: &Job,
        q: &Data,
        k: &Data,
        v: &Data,
        upstream: Upstream<'_, Data>,
        gradients: Gradients<'_, Data>,
    ) -> Result<()> {
        let given = backward::Given { q, k, v, upstream };
        in_precision!(
            self,
            [*q, *k, *v, *gradients.dq],
            backward::backward(job, &given, gradients)
        );
        Ok(())
    }

    fn workspace_bytes(&self, job: &Job, dtype: DType) -> usize {
        match dtype.sum() {
            DType::F64 => wave::bytes::<f64>(job.dim),
            _ => wave::bytes::<f32>(job.dim),
        }
    }
}
