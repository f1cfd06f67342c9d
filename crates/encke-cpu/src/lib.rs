//! Attention kernels for the CPU, flash-style.
//!
//! Scores exist one tile at a time and the carry is updated in place, so memory beside the
//! operands does not grow with the sequence. Nothing here knows of patterns or ranks: a job says
//! it all.
//!
//! The decision that shaped this crate: lanes of a vector are queries, never channels. A softmax
//! then needs no reduction across lanes, and rows of any dimension fill vectors. The algorithm is
//! written once, over a trait for vectors, and compiled for each instruction set ([`Arm`]).
#![deny(unsafe_op_in_unsafe_fn)]

#[cfg(target_arch = "x86_64")]
mod amx;
mod arm;
mod backward;
mod cells;
mod forward;
mod grid;
#[cfg(target_arch = "x86_64")]
#[doc(hidden)]
pub mod internals;
mod microkernel;
mod pages;
mod panel;
mod peak;
mod real;
mod schedule;
mod scratch;
mod shape;
mod shared;
mod softmax;
mod target;
#[cfg(target_arch = "x86_64")]
mod transpose;
mod vector;

use encke_core::dtype::Slice;
use encke_core::host;
use encke_core::job::{Block, Job};
use encke_core::kernel::{Carry, Gradients, Kernel, KernelError, Result, SoftmaxState, Upstream};
use encke_core::memory::Memory;
use encke_core::plan::Pass;
use encke_core::sharding::Run;
use encke_core::{DType, Data, Tensor, View};
#[cfg(target_arch = "x86_64")]
use half::{bf16, f16};

pub use arm::{Arm, VARIABLE};
pub use peak::peak;
use scratch::{Scratch, ScratchPool};
use target::Target;
use vector::{F32, F64, PortableVector};

/// Calls a function in the precision of some sums.
macro_rules! in_precision {
    ($dtype:expr, $($call:ident)::* ($($argument:expr),*)) => {
        match $dtype {
            DType::F64 => $($call)::*::<f64>($($argument),*),
            _ => $($call)::*::<f32>($($argument),*),
        }
    };
}

/// Calls a function with the vectors of the arm in use and as many rows as fit its registers.
macro_rules! on_arm {
    ($kernel:expr, $a:ty, $vectors:ident, $($call:ident)::+ ($($argument:expr),*)) => {
        match $kernel.arm {
            Arm::Portable => $($call)::+::<_, 4>(PortableVector::<$a>::new(), $($argument),*),
            #[cfg(target_arch = "x86_64")]
            Arm::Avx2 => {
                let simd = pulp::x86::V3::try_new().expect("the arm was checked");
                $($call)::+::<_, 4>($vectors(simd), $($argument),*)
            }
            #[cfg(target_arch = "x86_64")]
            Arm::Avx512 | Arm::Amx => {
                let simd = pulp::x86::V4::try_new().expect("the arm was checked");
                $($call)::+::<_, 8>($vectors(simd), $($argument),*)
            }
            #[cfg(not(target_arch = "x86_64"))]
            Arm::Avx2 | Arm::Avx512 | Arm::Amx => unreachable!("the arm was checked"),
        }
    };
}

/// Does something for every type of numbers that tiles multiply.
#[cfg(target_arch = "x86_64")]
macro_rules! for_each_type {
    ($number:ident => $body:expr) => {{
        for_each_type!(@ $number, [bf16, f16, f32], $body);
    }};
    (@ $number:ident, [$($kind:ty),*], $body:expr) => {
        $({
            type $number = $kind;
            $body
        })*
    };
}

/// Attention on the CPU, on the threads of the rayon pool it is called from.
///
/// Results do not depend on the number of threads. Sums are f64 where any operand is f64 and f32
/// otherwise. Scratch memory is kept for the next call.
#[derive(Debug)]
pub struct CpuKernel {
    arm: Arm,
    narrow: ScratchPool<Scratch<f32>>,
    wide: ScratchPool<Scratch<f64>>,
    #[cfg(target_arch = "x86_64")]
    tiles: amx::PagePool,
}

impl CpuKernel {
    /// A kernel on the fastest instruction set of this machine, or the one that `ENCKE_CPU` names.
    pub fn new() -> Result<CpuKernel> {
        CpuKernel::with(Arm::chosen()?)
    }

    /// A kernel on one instruction set; refused where the machine does not have it.
    pub fn with(arm: Arm) -> Result<CpuKernel> {
        Ok(CpuKernel {
            arm: arm.check()?,
            narrow: ScratchPool::default(),
            wide: ScratchPool::default(),
            #[cfg(target_arch = "x86_64")]
            tiles: amx::PagePool::default(),
        })
    }

    /// The instruction set in use.
    pub fn arm(&self) -> Arm {
        self.arm
    }

    /// Refuses a job two of whose queries have one cell.
    fn writable_cells(&self, job: &Job) -> Result<()> {
        let cells = [job.batch, job.segments, job.queries];
        writable("cells", shared::disjoint(&job.cells, cells, 1, false))
    }

    fn forward_wide(&self, job: &Job, given: [Slice<'_>; 3], target: Target<'_, f64>) {
        on_arm!(
            self,
            f64,
            F64,
            forward::forward(&self.wide, job, given, target)
        );
    }

    fn forward_narrow(&self, job: &Job, given: [Slice<'_>; 3], target: Target<'_, f32>) {
        #[cfg(target_arch = "x86_64")]
        if self.arm == Arm::Amx {
            for_each_type!(N => if let [Some(q), Some(k), Some(v)] = given.map(<N as amx::TileElement>::of_slice) {
                return amx::forward::<amx::Hardware, N>(&self.tiles, job, [q, k, v], target);
            });
        }
        on_arm!(
            self,
            f32,
            F32,
            forward::forward(&self.narrow, job, given, target)
        );
    }
}

/// The type that sums are kept in, the same for all of `buffers`.
fn sums_in(buffers: &[&Data]) -> Result<DType> {
    let types = || buffers.iter().map(|buffer| buffer.as_slice().dtype());
    match types().next() {
        Some(dtype @ (DType::F32 | DType::F64)) if types().all(|other| other == dtype) => Ok(dtype),
        _ => Err(unsupported(format!(
            "sums in {}; they are kept in f32 or f64, all in the same",
            types()
                .map(|dtype| dtype.to_string())
                .collect::<Vec<_>>()
                .join(", ")
        ))),
    }
}

fn unsupported(what: String) -> KernelError {
    KernelError::Unsupported {
        kernel: "cpu",
        what,
    }
}

/// Refuses a job whose tasks would write the same numbers.
fn writable(what: &str, disjoint: bool) -> Result<()> {
    match disjoint {
        true => Ok(()),
        false => Err(unsupported(format!("rows of {what} that overlap"))),
    }
}

impl Memory for CpuKernel {
    type Buffer = Data;
    type Input<'a> = Slice<'a>;

    fn name(&self) -> &'static str {
        "cpu"
    }

    fn input<'a>(&self, buffer: &'a Data) -> Slice<'a> {
        buffer.as_slice()
    }

    fn borrow<'a>(&self, elements: Slice<'a>) -> Option<Slice<'a>> {
        Some(elements)
    }

    fn allocate(&self, dtype: DType, elements: usize) -> Result<Data> {
        let mut data = host::allocate(self.name(), dtype, elements)?;
        pages::advise_huge_pages(data.bytes_mut());
        Ok(data)
    }

    fn upload(&self, from: &View<'_>, runs: &[Run], to: &mut Data) -> Result<()> {
        host::upload(from, runs, to);
        Ok(())
    }

    fn download(&self, from: &Data, runs: &[Run], to: &mut Tensor) -> Result<()> {
        pages::advise_huge_pages(to.data_mut().bytes_mut());
        let [batch, tokens, heads, dim] = to.dims();
        match host::whole_run(runs) {
            // Side by side in both: all threads can copy.
            Some((first, count)) if batch == 1 || count == tokens => {
                let row = heads * dim;
                let elements = first * row..(first + batch * count) * row;
                cells::convert(from, to.data_mut(), elements);
            }
            _ => host::download(from, runs, to),
        }
        Ok(())
    }

    fn download_rows(&self, from: &Data, blocks: &[Block], to: &mut Tensor) -> Result<()> {
        cells::convert_rows(from, to.data_mut(), blocks);
        Ok(())
    }

    fn into_host(&self, buffer: Data) -> Result<Data> {
        Ok(buffer)
    }

    fn from_host(&self, elements: Data) -> std::result::Result<Data, Data> {
        Ok(elements)
    }

    fn fill(&self, buffer: &mut Data, value: f64) -> Result<()> {
        cells::fill(buffer, value);
        Ok(())
    }

    fn zero_rows(&self, blocks: &[Block], buffer: &mut Data) -> Result<()> {
        cells::zero_rows(blocks, buffer);
        Ok(())
    }

    fn copy(&self, block: &Block, add: bool, from: Slice<'_>, to: &mut Data) -> Result<()> {
        host::copy(block, add, from, to);
        Ok(())
    }
}

impl Kernel for CpuKernel {
    fn attend(
        &self,
        job: &Job,
        q: Slice<'_>,
        k: Slice<'_>,
        v: Slice<'_>,
        state: SoftmaxState<'_, Data>,
    ) -> Result<()> {
        let dtype = match &state {
            SoftmaxState::Accumulate { carry, .. } => sums_in(&[&carry.acc, &carry.m, &carry.l])?,
            SoftmaxState::Finish {
                carry: Some(carry),
                lse,
                ..
            } => sums_in(&[&carry.acc, &carry.m, &carry.l, lse])?,
            SoftmaxState::Finish { lse, .. } => sums_in(&[lse])?,
        };
        self.writable_cells(job)?;
        match dtype {
            DType::F64 => self.forward_wide(job, [q, k, v], Target::new(state, job.gain)),
            _ => self.forward_narrow(job, [q, k, v], Target::new(state, job.gain)),
        }
        Ok(())
    }

    fn merge(&self, block: &Block, from: &Carry<Data>, to: &mut Carry<Data>) -> Result<()> {
        let dtype = sums_in(&[&from.acc, &from.m, &from.l, &to.acc, &to.m, &to.l])?;
        in_precision!(dtype, cells::merge(block, from, to));
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
        let dtype = sums_in(&[&carry.acc, &carry.m, &carry.l, lse])?;
        in_precision!(dtype, cells::finish(cells, dim, gain, carry, out, lse));
        Ok(())
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
        let dtype = sums_in(&[delta])?;
        in_precision!(dtype, cells::delta(cells, dim, out, dout, dlse, delta));
        Ok(())
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
        let given = backward::BackwardInputs { q, k, v, upstream };
        let dtype = sums_in(&[gradients.dq, gradients.dk, gradients.dv])?;
        let queries = [job.batch, job.segments, job.queries];
        let dq = job.dq.as_ref().unwrap_or(&job.q);
        writable("dq", shared::disjoint(dq, queries, job.dim, false))?;
        let keys = [job.batch, job.segments, job.keys];
        writable("dk and dv", shared::disjoint(&job.k, keys, job.dim, true))?;
        #[cfg(target_arch = "x86_64")]
        if self.arm == Arm::Amx
            && let Gradients {
                dq: Data::F32(dq),
                dk: Data::F32(dk),
                dv: Data::F32(dv),
            } = gradients
        {
            for_each_type!(N => if let Some(given) = amx::AmxBackwardInputs::<N>::of([q, k, v], upstream) {
                amx::backward::<amx::Hardware, N>(&self.tiles, job, given, dq, dk, dv);
                return Ok(());
            });
        }
        match dtype {
            DType::F64 => {
                on_arm!(
                    self,
                    f64,
                    F64,
                    backward::backward(&self.wide, job, given, gradients)
                );
            }
            _ => on_arm!(
                self,
                f32,
                F32,
                backward::backward(&self.narrow, job, given, gradients)
            ),
        }
        Ok(())
    }

    fn workspace_bytes(&self, job: &Job, pass: Pass, dtype: DType) -> usize {
        fn of<X: vector::Vector, const R: usize>(_: X, dim: usize, pass: Pass) -> usize {
            let elements = match pass {
                Pass::Forward => Scratch::<X::A>::elements(&forward::sizes::<X>(dim)),
                Pass::Backward { .. } => Scratch::<X::A>::elements(&backward::sizes::<X>(dim)),
            };
            elements * size_of::<X::A>()
        }
        let task = match dtype.sum() {
            DType::F64 => on_arm!(self, f64, F64, of(job.dim, pass)),
            _ => on_arm!(self, f32, F32, of(job.dim, pass)),
        };
        let bytes = task * rayon::current_num_threads();
        #[cfg(target_arch = "x86_64")]
        if self.arm == Arm::Amx {
            return match dtype {
                DType::Bf16 => amx::workspace_bytes::<bf16>(job, pass),
                DType::F16 => amx::workspace_bytes::<f16>(job, pass),
                DType::F32 => amx::workspace_bytes::<f32>(job, pass),
                DType::F64 => bytes,
            };
        }
        bytes
    }

    fn fastest_dtype(&self) -> DType {
        match self.arm {
            Arm::Amx => DType::Bf16,
            Arm::Portable | Arm::Avx2 | Arm::Avx512 => DType::F32,
        }
    }

    fn tile(&self, dtype: DType) -> [usize; 2] {
        match dtype {
            #[cfg(target_arch = "x86_64")]
            DType::Bf16 | DType::F16 | DType::F32 if self.arm == Arm::Amx => amx::TILE,
            DType::F64 => on_arm!(self, f64, F64, shape::tile()),
            DType::F32 | DType::Bf16 | DType::F16 => on_arm!(self, f32, F32, shape::tile()),
        }
    }

    fn scratch_bytes(&self) -> usize {
        #[cfg(target_arch = "x86_64")]
        let tiles = self.tiles.bytes();
        #[cfg(not(target_arch = "x86_64"))]
        let tiles = 0;
        self.narrow.bytes() + self.wide.bytes() + tiles
    }

    fn release_scratch(&self) {
        self.narrow.clear();
        self.wide.clear();
        #[cfg(target_arch = "x86_64")]
        self.tiles.clear();
    }
}
