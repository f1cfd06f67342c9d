//! Extra terms of finished rows and deltas of branches, on tensors of another library.
//!
//! The decision here: these are operations between calls, not parts of a plan: a plan is given the
//! deltas ([`Pass::BackwardByBranch`](encke_core::plan::Pass::BackwardByBranch)) and knows of no
//! extra terms.

use encke_core::{Pattern, Shape};

use crate::buffer::Buffer;
use crate::device_view::DeviceView;
use crate::error::{Error, Result};
use crate::foreign_stream::ForeignStream;
use crate::kernel::CudaKernel;
use crate::launch::branches::{self, DeltaBuffers};

/// The tensors with which the deltas of branches are computed, all of them contiguous.
pub struct BranchDeltas<'a> {
    /// The upstream gradient, `[b, n, heads, d]`.
    pub dout: DeviceView<'a>,
    /// That of the lse, if there is one, `[b, n, heads, 1]` like all that follow but delta.
    pub dlse: Option<DeviceView<'a>>,
    /// The lse of all branches.
    pub lse: DeviceView<'a>,
    /// The deltas, `[b, n, slots, 1]` (see [`Pattern::delta_slots`]).
    pub delta: DeviceView<'a>,
    /// What the whole output's delta is beyond those of the branches so far, by their weights.
    pub rest: DeviceView<'a>,
    /// The weight of the branches that are left.
    pub weight: DeviceView<'a>,
}

/// What a branch alone computes: its out and lse, and the terms that its softmax has beside its
/// keys.
pub type BranchResults<'v, 'a> = (
    &'v DeviceView<'a>,
    &'v DeviceView<'a>,
    Option<&'v DeviceView<'a>>,
);

impl CudaKernel {
    /// Adds terms to finished rows: `terms` are their logarithms, for each cell of a batch entry,
    /// `[1, n, heads, 1]`, or for each head, `[1, 1, heads, 1]`.
    pub fn add_terms(
        &self,
        stream: &ForeignStream,
        [out, lse, terms]: [&DeviceView<'_>; 3],
    ) -> Result<()> {
        let [_, n, heads, _] = lse.dims();
        let sizes = terms.dims();
        if sizes[0] != 1 || (sizes[1] != n && sizes[1] != 1) || sizes[2] != heads {
            return Err(other_size("extra terms", terms));
        }
        let mut targets = [
            rows(stream, "out", out, lse, out.dims()[3])?,
            whole(stream, "lse", lse)?,
        ];
        let terms = whole(stream, "extra terms", terms)?;
        let [of_out, of_lse] = &mut targets;
        branches::add_terms(self.context(), out.dims()[3], of_out, of_lse, &terms)
    }

    /// Begins the deltas of a backward pass: `rest` becomes the delta of the whole `out`, and
    /// `weight` 1.
    pub fn start_deltas(
        &self,
        stream: &ForeignStream,
        deltas: &BranchDeltas<'_>,
        out: &DeviceView<'_>,
    ) -> Result<()> {
        let dim = deltas.dout.dims()[3];
        let out = rows(stream, "out", out, &deltas.lse, dim)?;
        deltas.buffers(stream)?.start(self.context(), dim, &out)
    }

    /// Computes the delta of a branch of `pattern`, from what it alone computes or, without, from
    /// what all other branches have left.
    pub fn add_delta(
        &self,
        stream: &ForeignStream,
        deltas: &BranchDeltas<'_>,
        (pattern, branch): (&Pattern, usize),
        own: Option<BranchResults<'_, '_>>,
    ) -> Result<()> {
        let [batch, tokens, heads, dim] = deltas.dout.dims();
        let shape = Shape::new(batch, tokens, heads, heads, dim);
        let shape = shape.map_err(|error| Error::Unsupported {
            what: error.to_string(),
        })?;
        let slots = pattern.delta_slots(heads);
        let slots = slots.iter().flatten().map(|(_, slot)| slot + 1).max();
        if deltas.delta.dims() != [batch, tokens, slots.unwrap_or(0), 1] {
            return Err(other_size("delta", &deltas.delta));
        }
        if branch >= pattern.branches().len() {
            let what = format!("branch {branch} of {}", pattern.branches().len());
            return Err(Error::Unsupported { what });
        }
        let own = own.map(|(out, lse, terms)| {
            if terms.is_some_and(|of| of.dims() != [1, tokens, heads, 1]) {
                return Err(other_size("extra terms", terms.unwrap_or(lse)));
            }
            let out = rows(stream, "the out of a branch", out, &deltas.lse, dim)?;
            let lse = rows(stream, "the lse of a branch", lse, &deltas.lse, 1)?;
            let terms = terms.map(|of| whole(stream, "extra terms", of));
            Ok((out, lse, terms.transpose()?))
        });
        let own = own.transpose()?;
        let own = own.as_ref();
        let own = own.map(|(out, lse, terms)| (out, lse, terms.as_ref()));
        let mut buffers = deltas.buffers(stream)?;
        buffers.add(self.context(), (pattern, &shape), branch, own)
    }
}

impl BranchDeltas<'_> {
    fn buffers(&self, stream: &ForeignStream) -> Result<DeltaBuffers> {
        let dim = self.dout.dims()[3];
        let cells = |what, view| rows(stream, what, view, &self.lse, 1);
        Ok(DeltaBuffers {
            dout: rows(stream, "dout", &self.dout, &self.lse, dim)?,
            dlse: self.dlse.as_ref().map(|of| cells("dlse", of)).transpose()?,
            lse: cells("lse", &self.lse)?,
            delta: whole(stream, "delta", &self.delta)?,
            rest: cells("the rest of delta", &self.rest)?,
            weight: cells("the weight that is left", &self.weight)?,
        })
    }
}

fn other_size(what: &str, view: &DeviceView<'_>) -> Error {
    let (dims, strides) = (view.dims(), view.strides());
    Error::Unsupported {
        what: format!("{what} of {dims:?} with strides {strides:?} here"),
    }
}

/// A contiguous tensor with rows of `dim` elements for the cells of `lse`.
fn rows(
    stream: &ForeignStream,
    what: &str,
    view: &DeviceView<'_>,
    lse: &DeviceView<'_>,
    dim: usize,
) -> Result<Buffer> {
    let [batch, n, heads, _] = lse.dims();
    match view.dims() == [batch, n, heads, dim] {
        true => whole(stream, what, view),
        false => Err(other_size(what, view)),
    }
}

/// A contiguous tensor.
fn whole(stream: &ForeignStream, what: &str, view: &DeviceView<'_>) -> Result<Buffer> {
    let [_, n, heads, dim] = view.dims();
    let dense = [n * heads * dim, heads * dim, dim, 1];
    let mut strides = view.strides().into_iter().zip(dense).zip(view.dims());
    match strides.all(|((stride, dense), size)| size <= 1 || stride == dense) {
        true => stream.buffer(view, 0, view.extent()),
        false => Err(other_size(what, view)),
    }
}
