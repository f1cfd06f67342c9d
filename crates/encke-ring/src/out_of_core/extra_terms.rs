//! Extra terms of the denominators of rows that are not in memory: sinks and phantom keys are added
//! to the rows of out and lse that a rank has written, and the gradient of the sinks is a sum over
//! these rows (spec section 10).
//!
//! The decision here: both work on finished rows of files, chunk by chunk, so neither a rank nor a
//! plan knows of extra terms. A rank that survives others stores its rows and adds their terms in
//! one step ([`WithExtraTerms`]): each repetition, on any rank, begins with rows without them.

use encke_core::denominator::Denominator;
use encke_core::kernel::Kernel;
use encke_core::plan::program::Role;
use encke_core::plan::{Pass, Request};
use encke_core::sharding::Run;
use encke_core::{Tensor, sinks};

use crate::error::RingError;
use crate::rank::Rank;
use crate::shard_call::ShardOutput;

use super::error::StreamError;
use super::host_row_io::ToSink;
use super::rows::{row_width, stored_runs};
use super::source::{RowRange, TensorSink, TensorSource};

/// Elements of a chunk, unless one row has more.
const CHUNK: usize = 1 << 16;

/// The extra terms of a call, for some of its query rows (runs of indices in q).
#[derive(Debug, Clone, Copy)]
pub struct ExtraTermRows<'a> {
    /// One sink for each query head, if there are any.
    pub sinks: Option<&'a [f64]>,
    /// The call.
    pub request: &'a Request,
}

impl ExtraTermRows<'_> {
    /// Adds the terms to out and lse of these rows.
    pub fn apply(
        &self,
        runs: &[Run],
        source: &dyn TensorSource,
        sink: &mut dyn TensorSink,
    ) -> Result<(), StreamError> {
        let Request { pattern, shape, .. } = self.request;
        let extra = Denominator::new(pattern, shape, self.sinks).map_err(RingError::from)?;
        if extra.is_empty() {
            return Ok(());
        }
        for (batch, rows) in self.chunks(runs) {
            let mut out = self.read(source, Role::Out, batch, rows)?;
            let mut lse = self.read(source, Role::Lse, batch, rows)?;
            extra.apply(&[rows], &mut out, &mut lse);
            for (role, tensor) in [(Role::Out, out), (Role::Lse, lse)] {
                let heads: Vec<usize> = (0..self.request.shape.heads).collect();
                sink.write(&range(role, batch, rows, &heads), tensor.data())?;
            }
        }
        Ok(())
    }

    /// The gradient of the sinks over these rows.
    pub fn gradient(
        &self,
        runs: &[Run],
        dlse: bool,
        source: &dyn TensorSource,
    ) -> Result<Vec<f64>, StreamError> {
        let sinks = self.sinks.unwrap_or_default();
        let mut sums = vec![0.0; sinks.len()];
        for (batch, rows) in self.chunks(runs) {
            let read = |role: Role| self.read(source, role, batch, rows);
            let (out, lse, dout) = (read(Role::Out)?, read(Role::Lse)?, read(Role::Dout)?);
            let dlse = dlse.then(|| read(Role::Dlse)).transpose()?;
            let results = [&out.view(), &lse.view(), &dout.view()];
            let dlse = dlse.as_ref().map(Tensor::view);
            let part = sinks::gradient(sinks, results, dlse.as_ref());
            let part = part.map_err(RingError::from)?;
            sums.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
        }
        Ok(sums)
    }

    /// The rows, a few at a time: (batch entry, rows).
    fn chunks(&self, runs: &[Run]) -> impl Iterator<Item = (usize, Run)> {
        let shape = self.request.shape;
        let most = (CHUNK / (shape.heads * shape.value_dim)).max(1);
        (0..shape.batch).flat_map(move |batch| {
            let parts = runs.iter().flat_map(move |&run| {
                (0..run.count).step_by(most).map(move |start| Run {
                    first: run.first + start * run.stride,
                    count: most.min(run.count - start),
                    ..run
                })
            });
            parts.map(move |rows| (batch, rows))
        })
    }

    fn read(
        &self,
        source: &dyn TensorSource,
        role: Role,
        batch: usize,
        rows: Run,
    ) -> Result<Tensor, StreamError> {
        let shape = &self.request.shape;
        let dims = [1, rows.count, shape.heads, row_width(role, shape)];
        let heads: Vec<usize> = (0..shape.heads).collect();
        let mut tensor = Tensor::try_zeros(source.dtype(role), dims)?;
        source.read(&range(role, batch, rows, &heads), tensor.data_mut())?;
        Ok(tensor)
    }
}

/// The outputs of a rank, written to a sink with their extra terms.
pub struct WithExtraTerms<'s> {
    /// The extra terms.
    pub terms: ExtraTermRows<'s>,
    /// Reads out and lse from where the sink has written them.
    pub source: &'s dyn TensorSource,
    /// Takes the outputs.
    pub sink: &'s mut dyn TensorSink,
}

impl<K: Kernel> ShardOutput<K> for WithExtraTerms<'_> {
    type Error = StreamError;

    fn store(&mut self, kernel: &K, request: &Request, rank: &Rank<K>) -> Result<(), StreamError> {
        ToSink(self.sink).store(kernel, request, rank)?;
        match request.pass {
            Pass::Forward => {
                let runs = stored_runs(request, rank, Role::Out);
                self.terms.apply(&runs, self.source, self.sink)
            }
            Pass::Backward { .. } | Pass::BackwardByBranch => Ok(()),
        }
    }
}

fn range<'a>(role: Role, batch: usize, tokens: Run, heads: &'a [usize]) -> RowRange<'a> {
    RowRange {
        role,
        batch,
        tokens,
        heads,
    }
}
