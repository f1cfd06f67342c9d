//! The port for arithmetic: what one device must be able to do.
//!
//! A kernel runs jobs and accumulates into the carry, so there is no separate merge pass after a
//! ring step. It decides nothing: masks, strides and order come with the job. Buffers are typed at
//! run time: a kernel checks the types it is given and refuses those it has no path for.

use crate::dtype::{DType, Data, Slice};
use crate::job::{Block, Job};
use crate::plan::Pass;
use crate::sharding::Run;
use crate::tensor::{Tensor, View};
use crate::transport::WireBuffer;

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

/// Arithmetic on one device.
pub trait Kernel: Send + Sync {
    /// Memory of the device.
    type Buffer: WireBuffer + Sync;

    /// What jobs read: numbers of a buffer, or of the caller where they can be read in place.
    type Input<'a>: Copy;

    /// The name it is known by, for reports and errors.
    fn name(&self) -> &'static str;

    /// A buffer as jobs read it.
    fn input<'a>(&self, buffer: &'a Self::Buffer) -> Self::Input<'a>;

    /// The caller's numbers as jobs read them, if they can be read where they are.
    fn lent<'a>(&self, numbers: Slice<'a>) -> Option<Self::Input<'a>> {
        let _ = numbers;
        None
    }

    /// `elements` zeros.
    fn allocate(&self, dtype: DType, elements: usize) -> Result<Self::Buffer>;

    /// Copies the rows of `runs`, in that order, into a `[b, rows, h, d]` buffer, rounding to the
    /// buffer's type.
    fn upload(&self, from: &View<'_>, runs: &[Run], to: &mut Self::Buffer) -> Result<()>;

    /// The way back: rows of the buffer, in the order of `runs`, to their tokens.
    fn download(&self, from: &Self::Buffer, runs: &[Run], to: &mut Tensor) -> Result<()>;

    /// The same for all rows of a buffer in their order, where all numbers but those of blocks are
    /// zeros on both sides; a kernel may copy them, too.
    fn download_rows(&self, from: &Self::Buffer, blocks: &[Block], to: &mut Tensor) -> Result<()> {
        let _ = blocks;
        let all = Run {
            first: 0,
            stride: 1,
            count: to.dims()[1],
        };
        self.download(from, &[all], to)
    }

    /// All numbers of a buffer that is not needed any more.
    fn hand_over(&self, buffer: Self::Buffer) -> Result<Data>;

    /// The way back: memory of numbers as a buffer, whatever they are; itself where it cannot be one.
    fn adopt(&self, numbers: Data) -> std::result::Result<Self::Buffer, Data> {
        Err(numbers)
    }

    /// Sets every element.
    fn fill(&self, buffer: &mut Self::Buffer, value: f64) -> Result<()>;

    /// Makes the rows of blocks zeros (those they go to); a kernel may do so with all numbers.
    fn clear(&self, blocks: &[Block], buffer: &mut Self::Buffer) -> Result<()> {
        let _ = blocks;
        self.fill(buffer, 0.0)
    }

    /// Copies (or adds) rows from one buffer into another.
    fn copy(
        &self,
        block: &Block,
        add: bool,
        from: Self::Input<'_>,
        to: &mut Self::Buffer,
    ) -> Result<()>;

    /// Copies rows into a buffer that holds nothing else from then on.
    fn pack(&self, blocks: &[Block], from: Self::Input<'_>, to: &mut Self::Buffer) -> Result<()> {
        let mut blocks = blocks.iter();
        blocks.try_for_each(|block| self.copy(block, false, from, to))
    }

    /// Attends the queries of the job to its keys, continuing the carry. Where it `begins`, cells of
    /// the job have seen nothing yet: whatever the carry holds for them is overwritten unread.
    fn forward(
        &self,
        job: &Job,
        q: Self::Input<'_>,
        k: Self::Input<'_>,
        v: Self::Input<'_>,
        begins: bool,
        carry: &mut Carry<Self::Buffer>,
    ) -> Result<()>;

    /// The same for the last job of its queries: what the carry holds is continued to the end, into
    /// out (times the job's gain) and lse of its cells; other cells are left alone.
    #[allow(clippy::too_many_arguments, reason = "a carry, its end, and a job")]
    fn conclude(
        &self,
        job: &Job,
        q: Self::Input<'_>,
        k: Self::Input<'_>,
        v: Self::Input<'_>,
        carry: &Carry<Self::Buffer>,
        out: &mut Self::Buffer,
        lse: &mut Self::Buffer,
    ) -> Result<()>;

    /// The same for a job that is all its queries ever see: no carry, but out (times the job's
    /// gain) and lse of its cells; other cells are left alone.
    fn attend(
        &self,
        job: &Job,
        q: Self::Input<'_>,
        k: Self::Input<'_>,
        v: Self::Input<'_>,
        out: &mut Self::Buffer,
        lse: &mut Self::Buffer,
    ) -> Result<()>;

    /// Merges the cells of one carry into another; `block.width` is the head dimension.
    fn merge(
        &self,
        block: &Block,
        from: &Carry<Self::Buffer>,
        to: &mut Carry<Self::Buffer>,
    ) -> Result<()>;

    /// Ends the softmax of `cells` cells: out = gain·acc/l (0 where l = 0), lse = m + ln l.
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
