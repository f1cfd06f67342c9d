//! Rows of the output held against the f64 reference, straight from the generator.
//!
//! The decision here: uniform samples alone would hardly ever touch a branch that has one token in
//! a million, so each branch gets samples of its own beside them.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use encke::plan::Request;
use encke::plan::program::Role;
use encke::{DType, reference};
use encke_ring::out_of_core::{Generator, Sampled, Samples};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// Samples that each branch gets of the rows it touches.
const OF_BRANCH: usize = 64;

/// How far checked rows were off.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Checked {
    /// Rows compared.
    pub rows: usize,
    /// Keys that those rows see.
    pub keys: u64,
    /// The largest error of a number of out.
    pub worst_out: f64,
    /// The largest error of an lse.
    pub worst_lse: f64,
    /// Rows that were outside the tolerance.
    pub wrong: usize,
}

/// How far a right row may be off.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Tolerance {
    /// A number of out: values reach 1.73, are summed in 16 roundings' worth, and rounded once.
    pub out: f64,
    /// An lse, of which a rounding is relative to its size.
    pub lse: f64,
}

impl Tolerance {
    pub fn of(dtype: DType) -> Tolerance {
        let sum = dtype.sum().epsilon();
        Tolerance {
            out: (dtype.epsilon() + 16.0 * sum) * 3f64.sqrt(),
            lse: 32.0 * sum * 10.0,
        }
    }
}

/// The rows to check, as what keeps them.
pub fn samples(request: &Request, generator: &Generator, uniform: usize) -> Samples {
    Samples::new(places(request, generator, uniform))
}

/// The token and head of each row to check: `uniform` anywhere (or all there are), and some of each
/// branch.
pub fn places(
    request: &Request,
    generator: &Generator,
    uniform: usize,
) -> BTreeSet<(usize, usize)> {
    let shape = &request.shape;
    let mut wanted = BTreeSet::new();
    let mut throws = 0..;
    let mut pick = |bound: usize| generator.pick(throws.next().unwrap_or_default(), bound);
    let all = shape.tokens * shape.heads;
    while wanted.len() < uniform.min(all) {
        wanted.insert((pick(shape.tokens), pick(shape.heads)));
    }
    for (index, branch) in request.pattern.branches().iter().enumerate() {
        let heads = request.pattern.heads_of(index, shape.heads);
        for _ in 0..OF_BRANCH {
            let (head, offset) = heads[pick(heads.len())];
            let start = pick(shape.tokens) / branch.segment * branch.segment;
            let length = branch.segment.min(shape.tokens - start);
            if offset < length {
                let token = start
                    + offset
                    + pick((length - offset).div_ceil(branch.dilation)) * branch.dilation;
                wanted.insert((token, head));
            }
        }
    }
    wanted
}

impl Checked {
    /// Compares rows.
    pub fn check(
        &mut self,
        request: &Request,
        generator: &Generator,
        rows: BTreeMap<(usize, usize), Sampled>,
    ) -> Result<()> {
        let rows: Vec<((usize, usize), Sampled)> = rows.into_iter().collect();
        let checked = rows
            .par_iter()
            .map(|(place, row)| Checked::row(request, generator, *place, row))
            .try_reduce(Checked::default, |one, other| Ok(one.with(other)))?;
        *self = self.with(checked);
        Ok(())
    }

    /// What both found.
    pub fn with(self, other: Checked) -> Checked {
        Checked {
            rows: self.rows + other.rows,
            keys: self.keys + other.keys,
            worst_out: self.worst_out.max(other.worst_out),
            worst_lse: self.worst_lse.max(other.worst_lse),
            wrong: self.wrong + other.wrong,
        }
    }

    /// One row: the reference asks the generator for every key it sees.
    fn row(
        request: &Request,
        generator: &Generator,
        place: (usize, usize),
        row: &Sampled,
    ) -> Result<Checked> {
        let (token, head) = place;
        let shape = &request.shape;
        let read = |role, token, head| generator.row(role, 0, token, head, request.dtype);
        let kv_head = shape.kv_head(head);
        let mut keys = 0;
        let key = |token: usize| {
            keys += 1;
            (read(Role::K, token, kv_head), read(Role::V, token, kv_head))
        };
        let q = read(Role::Q, token, head);
        let expected = reference::row(shape, &request.pattern, request.scale(), place, &q, key)?;
        let pairs = expected.out.iter().zip(&row.out);
        // A NaN is as wrong as can be; `max` alone would drop it.
        let worse = |x: f64, y: f64| {
            if y.is_nan() { f64::INFINITY } else { x.max(y) }
        };
        let out = pairs.fold(0.0, |most, (x, y)| worse(most, (x - y).abs()));
        let lse = worse(0.0, (expected.lse - row.lse).abs());
        let tolerance = Tolerance::of(request.dtype);
        Ok(Checked {
            rows: 1,
            keys,
            worst_out: out,
            worst_lse: lse,
            wrong: usize::from(out > tolerance.out || lse > tolerance.lse),
        })
    }
}
