//! The port for arithmetic: what one device must be able to compute.
//!
//! A kernel runs jobs and accumulates into the carry, so there is no separate merge pass after a
//! ring step. It decides nothing: masks, strides and order come with the job. Buffers
//! ([`Memory`]) are typed at run time: a kernel checks the types and refuses those it does not
//! support.
//!
//! Attention is one operation on a softmax state ([`SoftmaxState`]): a job continues a running
//! softmax, starts one, finishes one, or does all of it at once.

use crate::dtype::DType;
use crate::job::{Block, Job};
pub use crate::kernel_error::{KernelError, Result};
use crate::memory::Memory;
use crate::plan::Pass;

/// The running softmax (spec section 2): for each cell the weighted sum, the row max and the
/// denominator.
#[derive(Debug, Default)]
pub struct Carry<B> {
    /// Weighted sum of values, `dim` elements per cell.
    pub acc: B,
    /// The largest score so far; −inf before the first key.
    pub m: B,
    /// Sum of exponentials relative to `m`.
    pub l: B,
}

/// The softmax of a job's queries before and after the job. Cells of other queries are not touched.
#[derive(Debug)]
pub enum SoftmaxState<'a, B> {
    /// Accumulates into the carry.
    Accumulate {
        /// Where the sums are read and written.
        carry: &'a mut Carry<B>,
        /// True if no job has written these cells yet: what the carry holds for them is not read.
        starts: bool,
    },
    /// Finishes the softmax: writes out (times the job's gain) and lse.
    Finish {
        /// The sums of earlier jobs; None if this job is all its queries see.
        carry: Option<&'a Carry<B>>,
        /// The output.
        out: &'a mut B,
        /// The log-sum-exp.
        lse: &'a mut B,
    },
}

/// What the backward pass reads about the queries of a job, as the forward pass computed it. A
/// kernel may rely on this: if a query has a non-finite element, its lse is not finite, unless the
/// job has a softcap; if dout has one, delta is not finite.
#[derive(Debug, Clone, Copy)]
pub struct Upstream<I> {
    /// Gradient of the output, `dim` elements per cell.
    pub dout: I,
    /// The final lse, one element per cell.
    pub lse: I,
    /// dout·out − dlse, one element per cell.
    pub delta: I,
}

/// Gradients that a job adds to.
#[derive(Debug)]
pub struct Gradients<'a, B> {
    /// Of q.
    pub dq: &'a mut B,
    /// Of k.
    pub dk: &'a mut B,
    /// Of v.
    pub dv: &'a mut B,
}

/// Attention on one device.
pub trait Kernel: Memory {
    /// Attends the queries of the job to its keys, from and into the given softmax state.
    fn attend(
        &self,
        job: &Job,
        q: Self::Input<'_>,
        k: Self::Input<'_>,
        v: Self::Input<'_>,
        state: SoftmaxState<'_, Self::Buffer>,
    ) -> Result<()>;

    /// Merges the cells of one carry into another; `block.width` is the head dimension.
    fn merge(
        &self,
        block: &Block,
        from: &Carry<Self::Buffer>,
        to: &mut Carry<Self::Buffer>,
    ) -> Result<()>;

    /// Finishes the softmax of `cells` cells: out = gain·acc/l (0 if l = 0), lse = m + ln l.
    fn finish(
        &self,
        cells: usize,
        dim: usize,
        gain: f64,
        carry: &Carry<Self::Buffer>,
        out: &mut Self::Buffer,
        lse: &mut Self::Buffer,
    ) -> Result<()>;

    /// delta = dout·out − dlse for `cells` cells.
    fn delta(
        &self,
        cells: usize,
        dim: usize,
        out: Self::Input<'_>,
        dout: Self::Input<'_>,
        dlse: Option<Self::Input<'_>>,
        delta: &mut Self::Buffer,
    ) -> Result<()>;

    /// Adds the job's share of the gradients.
    fn backward(
        &self,
        job: &Job,
        q: Self::Input<'_>,
        k: Self::Input<'_>,
        v: Self::Input<'_>,
        upstream: Upstream<Self::Input<'_>>,
        gradients: Gradients<'_, Self::Buffer>,
    ) -> Result<()>;

    /// Bytes of scratch memory that jobs of this size need in addition to their operands, for as
    /// many of them as the kernel runs at a time.
    fn workspace_bytes(&self, job: &Job, pass: Pass, dtype: DType) -> usize;

    /// The narrowest type that the hardware multiplies faster than f32 with f32 accumulation; f32
    /// if there is none.
    fn fastest_dtype(&self) -> DType {
        DType::F32
    }

    /// The tile size in queries and keys for this type. A partly filled tile takes as long as a
    /// full one.
    fn tile(&self, _dtype: DType) -> [usize; 2] {
        [1, 1]
    }

    /// Whether the bits that a job on a grid, or a step of it, writes for the rows of a segment
    /// depend on nothing else: not on other segments, batch entries or heads of other keys, nor on
    /// the number of threads.
    fn repeats_bits(&self) -> bool {
        false
    }

    /// Whether [`Kernel::attend`] takes jobs on a grid and attends in an order of their tiles that
    /// no ring changes. Other kernels get such a job step by step
    /// ([`Job::tile_steps`](crate::job::Job::tile_steps)).
    fn attends_in_order(&self) -> bool {
        false
    }

    /// The same of [`Kernel::backward`].
    fn differentiates_in_order(&self) -> bool {
        false
    }

    /// Bytes of scratch memory that are currently allocated.
    fn scratch_bytes(&self) -> usize {
        0
    }

    /// Frees scratch memory that is not in use; the next call allocates what it needs.
    fn release_scratch(&self) {}
}
