//! Compares sampled output rows with the f64 reference, whose inputs come from the generator.
//!
//! The decision here: uniform samples alone would hardly ever hit a branch that has one token in a
//! million, so each branch gets samples of its own in addition.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use encke::plan::Request;
use encke::plan::program::Role;
use encke::{DType, reference};
use encke_ring::out_of_core::{Generator, SampledRow, Samples};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// Samples of each branch, among the rows it computes.
const PER_BRANCH: usize = 64;

/// The errors of the compared rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct RowCheck {
    /// Rows compared.
    pub rows: usize,
    /// Keys that those rows attend to.
    pub keys: u64,
    /// The largest error of an element of out.
    pub worst_out: f64,
    /// The largest error of an lse.
    pub worst_lse: f64,
    /// Rows outside the tolerance.
    pub wrong: usize,
}

/// The largest allowed errors of a row.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RowTolerance {
    /// Of an element of out: values reach sqrt(3), the sum errs by 16 roundings, or by more where
    /// scores are sums of many terms, and is rounded once.
    pub out: f64,
    /// Of an lse: twice as many roundings, relative to a size of 10.
    pub lse: f64,
}

/// The head dimension from which on more roundings are allowed: the rounding of a score grows with
/// the root of the number of its terms.
const LONG_SUM: usize = 1024;

impl RowTolerance {
    /// For inputs of this type and head dimension.
    pub fn of(dtype: DType, dim: usize) -> RowTolerance {
        let sum = dtype.sum().epsilon();
        let roundings = 16.0 * (dim.max(LONG_SUM) as f64 / LONG_SUM as f64).sqrt();
        RowTolerance {
            out: (dtype.epsilon() + roundings * sum) * 3f64.sqrt(),
            lse: 2.0 * roundings * sum * 10.0,
        }
    }
}

/// A sink that keeps the rows to compare ([`sampled_rows`]).
pub fn samples(request: &Request, generator: &Generator, uniform: usize) -> Samples {
    Samples::new(sampled_rows(request, generator, uniform))
}

/// The (token, head) of each row to compare: `uniform` random ones (or all, if there are fewer),
/// and some of each branch.
pub fn sampled_rows(
    request: &Request,
    generator: &Generator,
    uniform: usize,
) -> BTreeSet<(usize, usize)> {
    let shape = &request.shape;
    let mut rows = BTreeSet::new();
    let mut draws = 0..;
    let mut pick = |bound: usize| generator.pick(draws.next().unwrap_or_default(), bound);
    let all = shape.tokens * shape.heads;
    while rows.len() < uniform.min(all) {
        rows.insert((pick(shape.tokens), pick(shape.heads)));
    }
    for (index, branch) in request.pattern.branches().iter().enumerate() {
        let heads = request.pattern.heads_of(index, shape.heads);
        for _ in 0..PER_BRANCH {
            let (head, offset) = heads[pick(heads.len())];
            let start = pick(shape.tokens) / branch.segment * branch.segment;
            let length = branch.segment.min(shape.tokens - start);
            if offset < length {
                let token = start
                    + offset
                    + pick((length - offset).div_ceil(branch.dilation)) * branch.dilation;
                rows.insert((token, head));
            }
        }
    }
    rows
}

impl RowCheck {
    /// Compares rows and adds the result to this one.
    pub fn check(
        &mut self,
        request: &Request,
        generator: &Generator,
        rows: BTreeMap<(usize, usize), SampledRow>,
    ) -> Result<()> {
        let rows: Vec<((usize, usize), SampledRow)> = rows.into_iter().collect();
        let checked = encke_pool::install(|| {
            rows.par_iter()
                .map(|(at, row)| RowCheck::row(request, generator, *at, row))
                .try_reduce(RowCheck::default, |one, other| Ok(one.with(other)))
        })?;
        *self = self.with(checked);
        Ok(())
    }

    /// The sum of two checks.
    pub fn with(self, other: RowCheck) -> RowCheck {
        RowCheck {
            rows: self.rows + other.rows,
            keys: self.keys + other.keys,
            worst_out: self.worst_out.max(other.worst_out),
            worst_lse: self.worst_lse.max(other.worst_lse),
            wrong: self.wrong + other.wrong,
        }
    }

    /// Compares one row; the reference generates every key it attends to.
    fn row(
        request: &Request,
        generator: &Generator,
        at: (usize, usize),
        row: &SampledRow,
    ) -> Result<RowCheck> {
        let (token, head) = at;
        let shape = &request.shape;
        let read = |role, token, head| generator.row(role, 0, token, head, request.dtype);
        let kv_head = shape.kv_head(head);
        let mut keys = 0;
        let key = |token: usize| {
            keys += 1;
            (read(Role::K, token, kv_head), read(Role::V, token, kv_head))
        };
        let q = read(Role::Q, token, head);
        let expected = reference::row(shape, &request.pattern, request.scores(), at, &q, key)?;
        let pairs = expected.out.iter().zip(&row.out);
        // `f64::max` would drop a NaN.
        let worse = |x: f64, y: f64| {
            if y.is_nan() { f64::INFINITY } else { x.max(y) }
        };
        let out = pairs.fold(0.0, |most, (x, y)| worse(most, (x - y).abs()));
        // A row without keys has minus infinity, which less itself is NaN.
        let lse = match expected.lse == row.lse {
            true => 0.0,
            false => worse(0.0, (expected.lse - row.lse).abs()),
        };
        let tolerance = RowTolerance::of(request.dtype, shape.dim);
        Ok(RowCheck {
            rows: 1,
            keys,
            worst_out: out,
            worst_lse: lse,
            wrong: usize::from(out > tolerance.out || lse > tolerance.lse),
        })
    }
}
