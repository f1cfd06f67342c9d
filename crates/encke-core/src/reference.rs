//! The reference: attention and its gradients in f64, one query at a time, as the specification
//! (`docs/spec.md`) defines them.
//!
//! All kernels and rings are tested against this file, so it shares no code with them: no plan, no
//! lanes, no blocks. It is not fast; its only optimisation is to step through the index set of the
//! query instead of testing every token.
//!
//! The decision here: modes differ only in which branches share a softmax, so all modes use one
//! `attend` and one `backward_row` with different arguments.

use std::ops::Range;

use crate::dropout::FourPairs;
use crate::error::{Error, Result};
use crate::padding::Padding;
use crate::partial::{OnlineSoftmax, Partial};
use crate::pattern::{Branch, MixingGradient, Mode, Pattern};
use crate::scores::Scores;
use crate::shape::Shape;

/// The results of the forward pass.
#[derive(Debug, Clone, PartialEq)]
pub struct ReferenceForward {
    /// The output, `[b, n, heads, d]`.
    pub out: Vec<f64>,
    /// Log-sum-exp of each query's scores, `[b, n, heads]`; minus infinity if it sees no key.
    pub lse: Vec<f64>,
}

/// The results of the backward pass.
#[derive(Debug, Clone, PartialEq)]
pub struct ReferenceGradients {
    /// Gradient of q, `[b, n, heads, d]`.
    pub dq: Vec<f64>,
    /// Gradient of k, `[b, n, kv_heads, d]`.
    pub dk: Vec<f64>,
    /// Gradient of v, `[b, n, kv_heads, value_dim]`.
    pub dv: Vec<f64>,
    /// Gradient of the sinks, `[heads]`; empty without sinks.
    pub dsinks: Vec<f64>,
}

/// Attention of `q` `[b, nq, heads, d]` over `k` `[b, n, kv_heads, d]` and `v` `[b, n, kv_heads,
/// value_dim]`, all row-major. `scores` may be the scale alone.
pub fn forward(
    shape: &Shape,
    pattern: &Pattern,
    scores: impl Into<Scores>,
    q: &[f64],
    k: &[f64],
    v: &[f64],
) -> Result<ReferenceForward> {
    let call = CheckedCall::new(shape, pattern, scores.into(), q, k, v)?;
    let cells = q.len() / shape.dim;
    let mut out = vec![0.0; cells * shape.value_dim];
    let mut lse = vec![f64::NEG_INFINITY; cells];
    for row in call.rows() {
        let at = call.output(row);
        let whole = call.attend(row, &call.branches[row.head]);
        lse[call.cell(row)] = whole.lse;
        if pattern.mode() != Mode::Fkodom {
            let gained = whole.out.iter().map(|x| pattern.gain() * x);
            out[at].iter_mut().zip(gained).for_each(|(o, x)| *o = x);
        }
    }
    if pattern.mode() == Mode::Fkodom {
        call.fkodom_forward(&mut out);
    }
    Ok(ReferenceForward { out, lse })
}

/// Gradients of `sum(out * dout) + sum(lse * dlse)`, or those that the mode defines instead
/// (detached mixing weights). Recomputes the forward pass from the inputs.
#[expect(
    clippy::too_many_arguments,
    reason = "these are the operands of the formula, and a struct for one function would hide them"
)]
pub fn backward(
    shape: &Shape,
    pattern: &Pattern,
    scores: impl Into<Scores>,
    q: &[f64],
    k: &[f64],
    v: &[f64],
    dout: &[f64],
    dlse: Option<&[f64]>,
) -> Result<ReferenceGradients> {
    let call = CheckedCall::new(shape, pattern, scores.into(), q, k, v)?;
    let dims = [shape.batch, shape.queries, shape.heads, shape.value_dim];
    check_len("dout", dout, &dims)?;
    if let Some(dlse) = dlse {
        check_len("dlse", dlse, &dims[..3])?;
        pattern.check_dlse()?;
    }
    let mut gradients = ReferenceGradients {
        dq: vec![0.0; q.len()],
        dk: vec![0.0; k.len()],
        dv: vec![0.0; v.len()],
        dsinks: vec![0.0; call.scores.sinks.as_ref().map_or(0, |sinks| sinks.len())],
    };
    if pattern.mode() == Mode::Fkodom {
        call.fkodom_backward(dout, &mut gradients);
    } else {
        call.softmax_backward(dout, dlse, &mut gradients);
    }
    Ok(gradients)
}

/// The attention of one query `q` of `head` at position `token`. `key` returns the k and v of a
/// token as the head reads them, one token at a time, so that no whole tensor needs to exist.
pub fn row(
    shape: &Shape,
    pattern: &Pattern,
    scores: impl Into<Scores>,
    (token, head): (usize, usize),
    q: &[f64],
    mut key: impl FnMut(usize) -> (Vec<f64>, Vec<f64>),
) -> Result<Partial> {
    pattern.check(shape)?;
    check_len("q", q, &[shape.dim])?;
    if pattern.mode() == Mode::Fkodom {
        return Err(Error::NotInMode {
            what: "a single row",
            mode: pattern.mode().name(),
            hint: "its rows are divided by sums over the whole sequence: use group mode",
        });
    }
    let scores = scores.into();
    if scores.dropout.is_some() {
        return Err(Error::NotInMode {
            what: "a single row with dropout",
            mode: pattern.mode().name(),
            hint: "its coins depend on the batch entry: use `forward`",
        });
    }
    let mut carry = OnlineSoftmax::new(shape.value_dim);
    if let Some(sinks) = &scores.sinks {
        carry.start_at(sinks[head]);
    }
    for &branch in &branches_of_heads(shape, pattern)[head] {
        carry.add_phantoms(phantoms(shape, pattern, branch, token));
        for other in keys(shape, pattern, branch, token) {
            let (k, v) = key(other);
            let (score, _) = scores.of(dot(q, &k), head, token.abs_diff(other));
            carry.absorb(score, &v);
        }
    }
    let mut whole = carry.finish();
    whole.out.iter_mut().for_each(|x| *x *= pattern.gain());
    Ok(whole)
}

/// The branches of each head: none, one or several.
fn branches_of_heads(shape: &Shape, pattern: &Pattern) -> Vec<Vec<HeadBranch>> {
    let mut branches = vec![Vec::new(); shape.heads];
    for (index, &branch) in pattern.branches().iter().enumerate() {
        for (head, offset) in pattern.heads_of(index, shape.heads) {
            branches[head].push(HeadBranch { branch, offset });
        }
    }
    branches
}

/// The keys that the query at position `x` sees in a branch: its index set within its document, as
/// far as the mask shows it (spec sections 0, 5 and 9).
fn keys(
    shape: &Shape,
    pattern: &Pattern,
    HeadBranch { branch, offset }: HeadBranch,
    x: usize,
) -> impl Iterator<Item = usize> {
    let document = pattern.document_of(x, shape.tokens);
    // Clamped to the document, so that nothing below overflows.
    let segment = branch.segment.min(document.len());
    let dilation = branch.dilation;
    let start = document.start + (x - document.start) / segment * segment;
    let touched = (x - start) % dilation == offset;
    let end = match pattern.is_causal() {
        true => x + 1,
        false => (start + segment).min(document.end),
    };
    let index_set = if touched { start + offset..end } else { 0..0 };
    let keys = index_set.step_by(dilation);
    keys.filter(move |&j| pattern.sees(document.start, x, j))
}

/// The phantom keys that the query at position `x` sees in a branch: the places of its index set
/// that torchscale fills with zeros (spec section 10).
fn phantoms(
    shape: &Shape,
    pattern: &Pattern,
    HeadBranch { branch, offset }: HeadBranch,
    x: usize,
) -> usize {
    if pattern.padding_rule() == Padding::None || pattern.is_causal() {
        return 0;
    }
    let tokens = keys(shape, pattern, HeadBranch { branch, offset }, x).count();
    let length = pattern.document_of(x, shape.tokens).len();
    let places = branch.segment.min(length).div_ceil(branch.dilation);
    // A branch that does not select the query has no places for it.
    if tokens == 0 { 0 } else { places - tokens }
}

/// One query of one head in one batch entry.
#[derive(Clone, Copy)]
struct QueryIndex {
    batch: usize,
    query: usize,
    head: usize,
}

/// A branch with the offset that one head has in it.
#[derive(Clone, Copy)]
struct HeadBranch {
    branch: Branch,
    offset: usize,
}

/// The upstream gradient of one query and what its softmax backward needs (spec section 3).
struct QueryUpstream<'a> {
    dout: &'a [f64],
    lse: f64,
    /// D = dout·out − dlse, which is subtracted in every dS of the row.
    delta: f64,
}

/// The checked operands of one call.
struct CheckedCall<'a> {
    shape: &'a Shape,
    pattern: &'a Pattern,
    scores: Scores,
    q: &'a [f64],
    k: &'a [f64],
    v: &'a [f64],
    /// The branches of each head: none, one or several.
    branches: Vec<Vec<HeadBranch>>,
}

impl<'a> CheckedCall<'a> {
    fn new(
        shape: &'a Shape,
        pattern: &'a Pattern,
        scores: Scores,
        q: &'a [f64],
        k: &'a [f64],
        v: &'a [f64],
    ) -> Result<CheckedCall<'a>> {
        pattern.check(shape)?;
        let keys = |dim: usize| [shape.batch, shape.tokens, shape.kv_heads, dim];
        check_len(
            "q",
            q,
            &[shape.batch, shape.queries, shape.heads, shape.dim],
        )?;
        check_len("k", k, &keys(shape.dim))?;
        check_len("v", v, &keys(shape.value_dim))?;
        if let Some(sinks) = &scores.sinks {
            check_len("sinks", sinks, &[shape.heads])?;
            pattern.check_sinks()?;
        }
        pattern.check_slopes(scores.slopes.is_some())?;
        Ok(CheckedCall {
            shape,
            pattern,
            scores,
            q,
            k,
            v,
            branches: branches_of_heads(shape, pattern),
        })
    }

    /// All queries, in storage order.
    fn rows(&self) -> impl Iterator<Item = QueryIndex> {
        let Shape {
            batch,
            queries,
            heads,
            ..
        } = *self.shape;
        (0..batch * queries * heads).map(move |row| QueryIndex {
            batch: row / heads / queries,
            query: row / heads % queries,
            head: row % heads,
        })
    }

    /// The position of a query.
    fn position(&self, row: QueryIndex) -> usize {
        row.query + self.pattern.first_query(self.shape)
    }

    /// The index of a query in lse.
    fn cell(&self, row: QueryIndex) -> usize {
        (row.batch * self.shape.queries + row.query) * self.shape.heads + row.head
    }

    /// The elements of a query in q and dq.
    fn query(&self, row: QueryIndex) -> Range<usize> {
        elements(self.cell(row), self.shape.dim)
    }

    /// The elements of a query in out and dout.
    fn output(&self, row: QueryIndex) -> Range<usize> {
        elements(self.cell(row), self.shape.value_dim)
    }

    /// The elements of `token` in k and dk and in v and dv, in the key head that the query reads.
    fn key(&self, row: QueryIndex, token: usize) -> [Range<usize>; 2] {
        let shape = self.shape;
        let head = shape.kv_head(row.head);
        let at = (row.batch * shape.tokens + token) * shape.kv_heads + head;
        [elements(at, shape.dim), elements(at, shape.value_dim)]
    }

    /// The keys that a query sees in a branch.
    fn keys(&self, branch: HeadBranch, row: QueryIndex) -> impl Iterator<Item = usize> {
        keys(self.shape, self.pattern, branch, self.position(row))
    }

    /// The score of a pair, and its derivative by scale·q·k.
    fn score(&self, row: QueryIndex, token: usize) -> (f64, f64) {
        let [key, _] = self.key(row, token);
        let product = dot(&self.q[self.query(row)], &self.k[key]);
        let distance = self.position(row).abs_diff(token);
        self.scores.of(product, row.head, distance)
    }

    /// The factor of a pair's weight after the softmax: 0 if the pair is dropped.
    fn dropout(&self, row: QueryIndex, token: usize) -> f64 {
        let Some(dropout) = &self.scores.dropout else {
            return 1.0;
        };
        let query = self.position(row);
        // Tokens are those of the batch entry that a packed row comes from.
        let (entry, first) = self.pattern.entry_of(query);
        let document = self.pattern.document_of(query, self.shape.tokens).start;
        let factors = dropout.factors(FourPairs {
            keys: (token - first) / 4,
            query: query - first,
            head: row.head + self.shape.heads * (row.batch + entry),
            document: document - first,
        });
        factors[(token - first) % 4]
    }

    /// One softmax over the keys of all `branches`; a key in several of them counts several times.
    fn attend(&self, row: QueryIndex, branches: &[HeadBranch]) -> Partial {
        let mut carry = OnlineSoftmax::new(self.shape.value_dim);
        if let Some(sinks) = &self.scores.sinks {
            carry.start_at(sinks[row.head]);
        }
        for &branch in branches {
            carry.add_phantoms(phantoms(
                self.shape,
                self.pattern,
                branch,
                self.position(row),
            ));
            for token in self.keys(branch, row) {
                let [_, value] = self.key(row, token);
                let factor = self.dropout(row, token);
                carry.absorb_dropped(self.score(row, token).0, factor, &self.v[value]);
            }
        }
        carry.finish()
    }

    /// Adds the gradients of one query through the keys of one branch.
    fn backward_row(
        &self,
        row: QueryIndex,
        branch: HeadBranch,
        from: &QueryUpstream<'_>,
        to: &mut ReferenceGradients,
    ) {
        let query = self.query(row);
        for token in self.keys(branch, row) {
            let [key, value] = self.key(row, token);
            let (score, slope) = self.score(row, token);
            let p = (score - from.lse).exp();
            let kept = self.dropout(row, token);
            let dp = match kept {
                0.0 => 0.0,
                _ => kept * dot(from.dout, &self.v[value.clone()]),
            };
            let factor = self.scores.scale * slope * p * (dp - from.delta);
            add(&mut to.dv[value], p * kept, from.dout);
            add(&mut to.dq[query.clone()], factor, &self.k[key.clone()]);
            add(&mut to.dk[key], factor, &self.q[query.clone()]);
        }
    }

    /// Group and mix mode: the branches of a head share one softmax, hence one lse.
    fn softmax_backward(&self, dout: &[f64], dlse: Option<&[f64]>, to: &mut ReferenceGradients) {
        let detached = matches!(
            self.pattern.mode(),
            Mode::Mix {
                gradient: MixingGradient::Detached,
                ..
            }
        );
        for row in self.rows() {
            let at = self.output(row);
            let g = dlse.map_or(0.0, |dlse| dlse[self.cell(row)]);
            let dout: Vec<f64> = dout[at].iter().map(|x| self.pattern.gain() * x).collect();
            let whole = self.attend(row, &self.branches[row.head]);
            if let Some(sinks) = &self.scores.sinks {
                let delta = dot(&dout, &whole.out) - g;
                if sinks[row.head] > f64::NEG_INFINITY {
                    to.dsinks[row.head] -= (sinks[row.head] - whole.lse).exp() * delta;
                }
            }
            for &branch in &self.branches[row.head] {
                // With constant mixing weights, each branch is a softmax with its own output.
                let own = detached.then(|| self.attend(row, &[branch]));
                let from = QueryUpstream {
                    dout: &dout,
                    lse: whole.lse,
                    delta: dot(&dout, &own.as_ref().unwrap_or(&whole).out) - g,
                };
                self.backward_row(row, branch, &from, to);
            }
        }
    }

    /// The fkodom package divides each feature of a branch by its sum over the sequence.
    fn fkodom_forward(&self, out: &mut [f64]) {
        for (batch, head, of_head) in self.fkodom_branches() {
            let branch = FkodomBranch::new(self, batch, head, of_head);
            for (row, x) in &branch.rows {
                let at = self.output(*row);
                for (c, o) in out[at].iter_mut().enumerate() {
                    *o += x.out[c] / branch.sigma[c] / self.groups();
                }
            }
        }
    }

    fn fkodom_backward(&self, dout: &[f64], to: &mut ReferenceGradients) {
        for (batch, head, of_head) in self.fkodom_branches() {
            let branch = FkodomBranch::new(self, batch, head, of_head);
            let dy = |row: QueryIndex, c: usize| dout[self.output(row)][c] / self.groups();
            let mut dy_x = vec![0.0; self.shape.value_dim];
            for (row, x) in &branch.rows {
                for (c, sum) in dy_x.iter_mut().enumerate() {
                    *sum += dy(*row, c) * x.out[c];
                }
            }
            for (row, x) in &branch.rows {
                let sigma = &branch.sigma;
                let dx: Vec<f64> = (0..self.shape.value_dim)
                    .map(|c| dy(*row, c) / sigma[c] - dy_x[c] / (sigma[c] * sigma[c]))
                    .collect();
                let from = QueryUpstream {
                    dout: &dx,
                    lse: x.lse,
                    delta: dot(&dx, &x.out),
                };
                self.backward_row(*row, of_head, &from, to);
            }
        }
    }

    /// The units that fkodom mode normalises: (batch, head, branch).
    fn fkodom_branches(&self) -> impl Iterator<Item = (usize, usize, HeadBranch)> {
        (0..self.shape.batch).flat_map(move |batch| {
            let heads = self.branches.iter().enumerate();
            heads.flat_map(move |(head, branches)| {
                branches.iter().map(move |&branch| (batch, head, branch))
            })
        })
    }

    fn groups(&self) -> f64 {
        self.pattern.branches().len() as f64
    }
}

/// The attention of one branch over a whole sequence, and the sums that fkodom mode divides it by.
struct FkodomBranch {
    /// The queries that the branch selects, with their attention.
    rows: Vec<(QueryIndex, Partial)>,
    /// Sum of the attention over those queries, for each feature.
    sigma: Vec<f64>,
}

impl FkodomBranch {
    fn new(call: &CheckedCall<'_>, batch: usize, head: usize, branch: HeadBranch) -> FkodomBranch {
        // Only selected queries are divided: a branch may select none, and 0/0 is NaN.
        let rows: Vec<(QueryIndex, Partial)> = (0..call.shape.queries)
            .map(|query| QueryIndex { batch, query, head })
            .map(|row| (row, call.attend(row, &[branch])))
            .filter(|(_, x)| x.lse != f64::NEG_INFINITY)
            .collect();
        let mut sigma = vec![0.0; call.shape.value_dim];
        rows.iter().for_each(|(_, x)| add(&mut sigma, 1.0, &x.out));
        FkodomBranch { rows, sigma }
    }
}

/// The elements of row `at` where rows have `dim` elements.
fn elements(at: usize, dim: usize) -> Range<usize> {
    at * dim..(at + 1) * dim
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

fn add(to: &mut [f64], weight: f64, values: &[f64]) {
    to.iter_mut()
        .zip(values)
        .for_each(|(x, value)| *x += weight * value);
}

fn check_len(tensor: &'static str, values: &[f64], expected: &[usize]) -> Result<()> {
    if values.len() == expected.iter().product::<usize>() {
        return Ok(());
    }
    Err(Error::ShapeMismatch {
        tensor,
        got: vec![values.len()],
        expected: expected.to_vec(),
    })
}
