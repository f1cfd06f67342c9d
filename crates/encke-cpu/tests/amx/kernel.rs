//! The tile kernels behind the `Kernel` trait, so that the conformance suite can run them.

use encke_core::dtype::Slice;
use encke_core::job::{Block, Job};
use encke_core::kernel::{Carry, Gradients, Kernel, Result, SoftmaxState, Upstream};
use encke_core::memory::HostKernel;
use encke_core::naive::NaiveKernel;
use encke_core::plan::Pass;
use encke_core::{DType, Data};
use encke_cpu::internals::{self as amx, Target, TileElement, TileUnit};
use half::{bf16, f16};
use std::marker::PhantomData;

/// Attention on tiles; [`NaiveKernel`] computes everything else.
pub struct TileKernel<T, N> {
    pub pool: amx::PagePool,
    tiles: PhantomData<(T, N)>,
}

/// An element type that the suite runs with.
pub trait TestedElement: TileElement {
    /// The largest allowed errors of the lse and of the output, relative to the largest element.
    const TOLERANCE: [f64; 2];
}

impl TestedElement for bf16 {
    const TOLERANCE: [f64; 2] = [4e-6, 4e-3];
}

impl TestedElement for f16 {
    const TOLERANCE: [f64; 2] = [2e-6, 4e-5];
}

impl TestedElement for f32 {
    const TOLERANCE: [f64; 2] = [5e-7, 4e-6];
}

impl<T: TileUnit, N: TestedElement> TileKernel<T, N> {
    pub fn new() -> TileKernel<T, N> {
        TileKernel {
            pool: amx::PagePool::default(),
            tiles: PhantomData,
        }
    }
}

/// Whether a test of these tiles can run here; prints a note if it cannot.
pub fn available<T: TileUnit>() -> bool {
    if !T::available() {
        eprintln!("skipped: {} tiles are not available here", T::NAME);
    }
    T::available()
}

pub fn elements<N: TileElement>(data: Slice<'_>) -> &[N] {
    N::of_slice(data).expect("elements of type N")
}

pub fn f32_elements(data: &mut Data) -> &mut [f32] {
    match data {
        Data::F32(elements) => elements,
        _ => panic!("sums are f32"),
    }
}

impl<T: TileUnit, N: TestedElement> HostKernel for TileKernel<T, N> {
    fn name(&self) -> &'static str {
        T::NAME
    }
}

impl<T: TileUnit, N: TestedElement> Kernel for TileKernel<T, N> {
    fn attend(
        &self,
        job: &Job,
        q: Slice<'_>,
        k: Slice<'_>,
        v: Slice<'_>,
        state: SoftmaxState<'_, Data>,
    ) -> Result<()> {
        if !amx::supports(job) {
            return NaiveKernel.attend(job, q, k, v, state);
        }
        let inputs = [q, k, v].map(elements::<N>);
        amx::forward::<T, N>(&self.pool, job, inputs, Target::new(state, job));
        Ok(())
    }

    fn merge(&self, block: &Block, from: &Carry<Data>, to: &mut Carry<Data>) -> Result<()> {
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
        if !amx::supports(job) {
            return NaiveKernel.backward(job, q, k, v, upstream, gradients);
        }
        let inputs = amx::AmxBackwardInputs::of([q, k, v], upstream).expect("elements of type N");
        let [dq, dk, dv] = [gradients.dq, gradients.dk, gradients.dv].map(f32_elements);
        amx::backward::<T, N>(&self.pool, job, inputs, dq, dk, dv);
        Ok(())
    }

    fn workspace_bytes(&self, job: &Job, pass: Pass, dtype: DType) -> usize {
        NaiveKernel.workspace_bytes(job, pass, dtype)
    }
}
