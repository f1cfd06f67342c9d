//! Attention kernels for the CPU, flash-style.
//!
//! Scores exist one tile at a time and the carry is updated in place, so memory beside the operands
//! does not grow with the sequence. This crate knows neither patterns nor ranks: a job describes
//! all that a kernel computes.
//!
//! The decision that shaped this crate: lanes of a vector are queries, never channels. The softmax
//! then needs no reduction across lanes, and rows of any dimension fill vectors. The algorithm is
//! written once, over a trait for vectors, and compiled for each instruction set
//! ([`InstructionSet`]).
#![deny(unsafe_op_in_unsafe_fn)]
// Other processors run the portable vectors; those of `pulp` are wired up for x86 only.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code, unused_imports))]

#[cfg(target_arch = "x86_64")]
mod amx;
mod backward;
mod cells;
mod dropout;
mod edges;
mod forward;
mod grid;
mod instruction_set;
#[cfg(target_arch = "x86_64")]
#[doc(hidden)]
pub mod internals;
mod microkernel;
mod pages;
mod panel;
mod peak;
mod philox;
mod pieces;
mod ranges;
mod real;
mod schedule;
mod scratch;
mod shape;
mod shared;
mod softmax;
mod target;
mod transform;
#[cfg(target_arch = "x86_64")]
mod transpose;
mod vector;

use encke_core::dtype::Slice;
use encke_core::host;
use encke_core::job::{Block, Job, Mask};
use encke_core::kernel::{Carry, Gradients, Kernel, KernelError, Result, SoftmaxState, Upstream};
use encke_core::memory::Memory;
use encke_core::plan::Pass;
use encke_core::sharding::Run;
use encke_core::{DType, Data, Tensor, View};
#[cfg(target_arch = "x86_64")]
use half::{bf16, f16};

pub use instruction_set::{ENV_VARIABLE, InstructionSet};
pub use pages::return_freed_memory;
pub use peak::peak;
use scratch::{Scratch, ScratchPool};
use target::Target;
use vector::{F32, F64, PortableVector};

/// Calls a generic function with the type of the sums.
macro_rules! in_precision {
    ($dtype:expr, $($call:ident)::* ($($argument:expr),*)) => {
        match $dtype {
            DType::F64 => $($call)::*::<f64>($($argument),*),
            _ => $($call)::*::<f32>($($argument),*),
        }
    };
}

/// Calls a function with vectors of f32 or f64 on the kernel's instruction set, and as many rows as
/// fit its registers.
macro_rules! dispatch {
    ($kernel:expr, $real:tt, $($call:ident)::+ ($($argument:expr),*)) => {
        match $kernel.instruction_set {
            InstructionSet::Portable => {
                $($call)::+::<_, 4>(PortableVector::<$real>::new(), $($argument),*)
            }
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => {
                let simd = pulp::x86::V3::try_new().expect("checked by CpuKernel::with");
                $($call)::+::<_, 4>(dispatch!(@ $real)(simd), $($argument),*)
            }
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 | InstructionSet::Amx => {
                let simd = pulp::x86::V4::try_new().expect("checked by CpuKernel::with");
                $($call)::+::<_, 8>(dispatch!(@ $real)(simd), $($argument),*)
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => unreachable!("checked by CpuKernel::with"),
        }
    };
    (@ f32) => { F32 };
    (@ f64) => { F64 };
}

/// Evaluates an expression for every element type that the tiles multiply.
#[cfg(target_arch = "x86_64")]
macro_rules! for_each_type {
    ($element:ident => $body:expr) => {{
        for_each_type!(@ $element, [bf16, f16, f32], $body);
    }};
    (@ $element:ident, [$($type:ty),*], $body:expr) => {
        $({
            type $element = $type;
            $body
        })*
    };
}

/// Attention on the CPU, on the threads of Encke's own pool. Called from a thread of a smaller
/// rayon pool, it uses no more threads than that has.
///
/// Results do not depend on the number of threads. Sums are f64 if any operand is f64, and f32
/// otherwise. Scratch memory is kept for the next call.
#[derive(Debug)]
pub struct CpuKernel {
    instruction_set: InstructionSet,
    scratch_f32: ScratchPool<Scratch<f32>>,
    scratch_f64: ScratchPool<Scratch<f64>>,
    #[cfg(target_arch = "x86_64")]
    scratch_tiles: amx::PagePool,
}

impl CpuKernel {
    /// A kernel on the fastest instruction set of this machine, or the one that `ENCKE_CPU` names.
    pub fn new() -> Result<CpuKernel> {
        CpuKernel::with(InstructionSet::from_env()?)
    }

    /// A kernel on one instruction set; an error if the machine does not have it.
    pub fn with(instruction_set: InstructionSet) -> Result<CpuKernel> {
        Ok(CpuKernel {
            instruction_set: instruction_set.check()?,
            scratch_f32: ScratchPool::default(),
            scratch_f64: ScratchPool::default(),
            #[cfg(target_arch = "x86_64")]
            scratch_tiles: amx::PagePool::default(),
        })
    }

    /// The instruction set in use.
    pub fn instruction_set(&self) -> InstructionSet {
        self.instruction_set
    }

    /// Whether the tiles compute a job, if they multiply its type.
    #[cfg(target_arch = "x86_64")]
    fn runs_on_tiles(&self, job: &Job) -> bool {
        self.instruction_set == InstructionSet::Amx && amx::supports(job)
    }

    /// Rejects a job in which two queries have the same cell.
    fn writable_cells(&self, job: &Job) -> Result<()> {
        check_job(job)?;
        let cells = [job.batch, job.segments, job.queries];
        writable("cells", job.cells.is_apart(cells, 1, false))
    }

    fn forward_f64(&self, job: &Job, inputs: [Slice<'_>; 3], target: Target<'_, f64>) {
        dispatch!(
            self,
            f64,
            forward::forward(&self.scratch_f64, job, inputs, target)
        );
    }

    fn forward_f32(&self, job: &Job, inputs: [Slice<'_>; 3], target: Target<'_, f32>) {
        #[cfg(target_arch = "x86_64")]
        if self.runs_on_tiles(job) {
            for_each_type!(N => {
                if let [Some(q), Some(k), Some(v)] = inputs.map(<N as amx::TileElement>::of_slice) {
                    let pool = &self.scratch_tiles;
                    return amx::forward::<amx::Hardware, N>(pool, job, [q, k, v], target);
                }
            });
        }
        dispatch!(
            self,
            f32,
            forward::forward(&self.scratch_f32, job, inputs, target)
        );
    }
}

/// The type of the sums, which must be the same for all of `buffers`.
fn sums_in(buffers: &[&Data]) -> Result<DType> {
    let types = || buffers.iter().map(|buffer| buffer.as_slice().dtype());
    match types().next() {
        Some(dtype @ (DType::F32 | DType::F64)) if types().all(|other| other == dtype) => Ok(dtype),
        _ => Err(unsupported(format!(
            "sums in {}; sums must be all f32 or all f64",
            types()
                .map(|dtype| dtype.to_string())
                .collect::<Vec<_>>()
                .join(", ")
        ))),
    }
}

/// Refuses a process that has no threads to compute with.
fn check_threads() -> Result<()> {
    encke_pool::start().map_err(|error| KernelError::Device {
        kernel: "cpu",
        reason: error.to_string(),
    })
}

fn unsupported(what: String) -> KernelError {
    KernelError::Unsupported {
        kernel: "cpu",
        what,
    }
}

/// Rejects a job whose slopes or coins have no positions, or whose values have no addresses.
fn check_job(job: &Job) -> Result<()> {
    if let Some(dropout) = &job.dropout
        && !(matches!(job.mask, Some(Mask::Band(_))) && dropout.heads.len() == job.heads)
    {
        return Err(unsupported(
            "dropout without a band, or of other heads than the job's".into(),
        ));
    }
    let addresses = [job.k.offset, job.k.batch, job.k.segment, job.k.row];
    let mut addresses = addresses.iter().chain(job.k.heads.iter());
    if job.value_dim != job.dim && !addresses.all(|at| at.is_multiple_of(job.dim)) {
        return Err(unsupported(
            "values of another width than keys that do not begin at multiples of theirs".into(),
        ));
    }
    let transform = job.transform.as_ref();
    let Some(slopes) = transform.and_then(|transform| transform.slopes.as_ref()) else {
        return Ok(());
    };
    let positions = match &job.mask {
        None => false,
        Some(Mask::Band(_)) => true,
        Some(Mask::Documents(pieces)) => pieces.iter().all(|piece| piece.band.is_some()),
    };
    match positions && slopes.len() == job.heads {
        true => Ok(()),
        false => Err(unsupported(
            "slopes without positions, or of other heads than the job's".into(),
        )),
    }
}

/// Rejects a job in which several tasks would write the same elements.
fn writable(what: &str, apart: bool) -> Result<()> {
    match apart {
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
        check_threads()?;
        pages::advise_huge_pages(to.data_mut().bytes_mut());
        let [batch, tokens, heads, dim] = to.dims();
        match host::whole_run(runs) {
            // Contiguous in both buffers: all threads can copy.
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
        check_threads()?;
        cells::convert_rows(from, to.data_mut(), blocks);
        Ok(())
    }

    fn move_to_host(&self, buffer: Data) -> Result<Data> {
        Ok(buffer)
    }

    fn move_from_host(&self, elements: Data) -> std::result::Result<Data, Data> {
        Ok(elements)
    }

    fn fill(&self, buffer: &mut Data, value: f64) -> Result<()> {
        check_threads()?;
        cells::fill(buffer, value);
        Ok(())
    }

    fn zero_rows(&self, blocks: &[Block], buffer: &mut Data) -> Result<()> {
        check_threads()?;
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
        check_threads()?;
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
            DType::F64 => self.forward_f64(job, [q, k, v], Target::new(state, job)),
            _ => self.forward_f32(job, [q, k, v], Target::new(state, job)),
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
        check_threads()?;
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
        check_threads()?;
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
        check_threads()?;
        let inputs = backward::BackwardInputs { q, k, v, upstream };
        let dtype = sums_in(&[gradients.dq, gradients.dk, gradients.dv])?;
        check_job(job)?;
        let queries = [job.batch, job.segments, job.queries];
        let dq = job.dq.as_ref().unwrap_or(&job.q);
        writable("dq", dq.is_apart(queries, job.dim, false))?;
        let keys = [job.batch, job.segments, job.keys];
        writable("dk and dv", job.k.is_apart(keys, job.dim, true))?;
        #[cfg(target_arch = "x86_64")]
        if self.runs_on_tiles(job)
            && let Gradients {
                dq: Data::F32(dq),
                dk: Data::F32(dk),
                dv: Data::F32(dv),
            } = gradients
        {
            for_each_type!(N => {
                if let Some(inputs) = amx::AmxBackwardInputs::<N>::of([q, k, v], upstream) {
                    let pool = &self.scratch_tiles;
                    amx::backward::<amx::Hardware, N>(pool, job, inputs, dq, dk, dv);
                    return Ok(());
                }
            });
        }
        match dtype {
            DType::F64 => {
                dispatch!(
                    self,
                    f64,
                    backward::backward(&self.scratch_f64, job, inputs, gradients)
                );
            }
            _ => dispatch!(
                self,
                f32,
                backward::backward(&self.scratch_f32, job, inputs, gradients)
            ),
        }
        Ok(())
    }

    fn workspace_bytes(&self, job: &Job, pass: Pass, dtype: DType) -> usize {
        fn of<X: vector::Vector, const R: usize>(_: X, job: &Job, pass: Pass) -> usize {
            let elements = match pass {
                Pass::Forward => Scratch::<X::A>::elements(&forward::sizes::<X>(job)),
                Pass::Backward { .. } | Pass::BackwardByBranch => {
                    Scratch::<X::A>::elements(&backward::sizes::<X>(job))
                }
            };
            elements * size_of::<X::A>()
        }
        let task = match dtype.sum() {
            DType::F64 => dispatch!(self, f64, of(job, pass)),
            _ => dispatch!(self, f32, of(job, pass)),
        };
        let bytes = task * encke_pool::threads();
        #[cfg(target_arch = "x86_64")]
        if self.runs_on_tiles(job) {
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
        match self.instruction_set {
            InstructionSet::Amx => DType::Bf16,
            InstructionSet::Portable | InstructionSet::Avx2 | InstructionSet::Avx512 => DType::F32,
        }
    }

    fn tile(&self, dtype: DType) -> [usize; 2] {
        match dtype {
            #[cfg(target_arch = "x86_64")]
            DType::Bf16 | DType::F16 | DType::F32
                if self.instruction_set == InstructionSet::Amx =>
            {
                amx::TILE
            }
            DType::F64 => dispatch!(self, f64, shape::tile()),
            DType::F32 | DType::Bf16 | DType::F16 => dispatch!(self, f32, shape::tile()),
        }
    }

    fn repeats_bits(&self) -> bool {
        true
    }

    fn attends_in_order(&self) -> bool {
        true
    }

    fn scratch_bytes(&self) -> usize {
        #[cfg(target_arch = "x86_64")]
        let tiles = self.scratch_tiles.bytes();
        #[cfg(not(target_arch = "x86_64"))]
        let tiles = 0;
        self.scratch_f32.bytes() + self.scratch_f64.bytes() + tiles
    }

    fn release_scratch(&self) {
        self.scratch_f32.clear();
        self.scratch_f64.clear();
        #[cfg(target_arch = "x86_64")]
        self.scratch_tiles.clear();
    }
}
