//! Attention on tiles as a kernel, so that the suite can run it.

use encke_core::dtype::Slice;
use encke_core::job::{Block, Job};
use encke_core::kernel::{Carry, Gradients, Kernel, Result, SoftmaxState, Upstream};
use encke_core::memory::HostKernel;
use encke_core::naive::NaiveKernel;
use encke_core::plan::Pass;
use encke_core::{DType, Data};
use half::{bf16, f16};
use std::marker::PhantomData;

use crate::amx::tiles::Tiles;
use crate::amx::{self, Number};
use crate::target::Target;

/// Attention on tiles; everything else is left to the oracle.
pub struct TileKernel<T, N> {
    pub pool: amx::Pool,
    tiles: PhantomData<(T, N)>,
}

/// Numbers that the suite can be run with.
pub trait Tested: Number {
    /// How far the lse and the output may be off, relative to the largest number.
    const TOLERANCE: [f64; 2];
}

impl Tested for bf16 {
    const TOLERANCE: [f64; 2] = [4e-6, 4e-3];
}

impl Tested for f16 {
    const TOLERANCE: [f64; 2] = [2e-6, 4e-5];
}

impl Tested for f32 {
    const TOLERANCE: [f64; 2] = [5e-7, 4e-6];
}

impl<T: Tiles, N: Tested> TileKernel<T, N> {
    pub fn new() -> TileKernel<T, N> {
        TileKernel {
            pool: amx::Pool::default(),
            tiles: PhantomData,
        }
    }
}

pub fn of<N: Number>(data: Slice<'_>) -> &[N] {
    N::of(data).expect("numbers of this type")
}

pub fn wide(data: &mut Data) -> &mut [f32] {
    match data {
        Data::F32(numbers) => numbers,
        _ => panic!("sums are f32"),
    }
}

impl<T: Tiles, N: Tested> HostKernel for TileKernel<T, N> {
    fn name(&self) -> &'static str {
        T::NAME
    }
}

impl<T: Tiles, N: Tested> Kernel for TileKernel<T, N> {
    fn attend(
        &self,
        job: &Job,
        q: Slice<'_>,
        k: Slice<'_>,
        v: Slice<'_>,
        state: SoftmaxState<'_, Data>,
    ) -> Result<()> {
        let given = [q, k, v].map(of::<N>);
        amx::forward::<T, N>(&self.pool, job, given, Target::new(state, job.gain));
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
        let given = amx::Given::of([q, k, v], upstream).expect("numbers of this type");
        let (dq, dk, dv) = (wide(gradients.dq), wide(gradients.dk), wide(gradients.dv));
        amx::backward::<T, N>(&self.pool, job, given, dq, dk, dv);
        Ok(())
    }

    fn workspace_bytes(&self, job: &Job, pass: Pass, dtype: DType) -> usize {
        NaiveKernel.workspace_bytes(job, pass, dtype)
    }
}
