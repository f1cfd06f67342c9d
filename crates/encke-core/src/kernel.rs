//! The port for arithmetic: what one device must be able to compute.
//!
//! A kernel runs jobs and accumulates into the carry, so there is no separate merge pass after a
//! ring step. It decides nothing: masks, strides and order come with the job. Buffers
//! ([`Memory`]) are typed at run time: a kernel checks the types and refuses those it has no path
//! for.
//!
//! Attention is one operation on a softmax state ([`SoftmaxState`]): a job continues a running
//! softmax, starts one, finishes one, or does all of it at once.

use crate::dtype::DType;
use crate::job::{Block, Job};
use crate::memory::Memory;
use crate::plan::Pass;

/// Why a kernel could not do what it was told.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// No memory.
    #[error("{kernel} could not allocate {bytes} bytes; use more ranks or a narrower type")]
    Memory {
        /// The kernel's name.
        kernel: &'static str,
        /// How much was asked for.
        bytes: usize,
    },
    /// Types or sizes it has no path for.
    #[error("{kernel} does not support {what}")]
    Unsupported {
        /// The kernel's name.
        kernel: &'static str,
        /// What was asked for.
        what: String,
    },
    /// A device that did not do what it was told.
    #[error("{kernel}: {reason}")]
    Device {
        /// The kernel's name.
        kernel: &'static str,
        /// What it said.
        reason: String,
    },
}

/// The running softmax of spec 2: for each cell the weighted sum, the maximum and the denominator.
#[derive(Debug, Default)]
pub struct Carry<B> {
    /// Weighted sum of values, `dim` numbers a cell.
    pub acc: B,
    /// Largest score seen, −inf at first.
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

/// What the backward pass knows of the queries of a job, as the forward pass left it: where a query
/// holds something that is not finite, neither is its lse, and where dout does, neither is delta. A
/// kernel may rely on that.
#[derive(Debug, Clone, Copy)]
pub struct Upstream<I> {
    /// Gradient of the output, `dim` numbers a cell.
    pub dout: I,
    /// The final lse, one number a cell.
    pub lse: I,
    /// dout·out − dlse, one number a cell.
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

/// A result of a kernel.
pub type Result<T> = std::result::Result<T, KernelError>;

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

    /// Finishes the softmax of `cells` cells: out = gain·acc/l (0 where l = 0), lse = m + ln l.
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

    /// Bytes of scratch memory that jobs like this one of a pass need beside their operands, for
    /// as many of them as the kernel runs at a time.
    fn workspace_bytes(&self, job: &Job, pass: Pass, dtype: DType) -> usize;

    /// The narrowest type that this hardware multiplies faster than f32, with sums in f32; f32
    /// where there is none.
    fn fastest_dtype(&self) -> DType {
        DType::F32
    }

    /// Queries, and keys, of this type that it computes together: where a job's rows leave the last
    /// ones empty, it takes as long as if they did not.
    fn tile(&self, _dtype: DType) -> [usize; 2] {
        [1, 1]
    }

    /// Bytes of scratch memory it really holds on to at the moment. A kernel that keeps none need
    /// not say so.
    fn scratch_bytes(&self) -> usize {
        0
    }

    /// Gives back the scratch memory that nobody uses at the moment; the next call takes what it
    /// needs.
    fn release_scratch(&self) {}
}
