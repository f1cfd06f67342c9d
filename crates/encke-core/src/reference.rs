//! The specification in code: attention and its gradients in f64, one query at a time.
//!
//! Everything fast is judged against this file, so it shares nothing with what it judges: no plan,
//! no lanes, no blocks. It is not meant to be quick; it only avoids visiting tokens that cannot
//! matter, by stepping through the query's own index set.
//!
//! The decision here: a mode is nothing but which branches share a softmax, so all modes go
//! through one `attend` and one `pull_back`, and differ in what they hand to them.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::partial::{Carry, Partial};
use crate::pattern::{Branch, MixingGradient, Mode, Pattern};
use crate::shape::Shape;

/// What the forward pass gives.
#[derive(Debug, Clone, PartialEq)]
pub struct Forward {
    /// The output, `[b, n, heads, d]`.
    pub out: Vec<f64>,
    /// Log-sum-exp of each query's scores, `[b, n, heads]`; minus infinity where it sees no key.
    pub lse: Vec<f64>,
}

/// What the backward pass gives.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients {
    /// Gradient of q, `[b, n, heads, d]`.
    pub dq: Vec<f64>,
    /// Gradient of k, `[b, n, kv_heads, d]`.
    pub dk: Vec<f64>,
    /// Gradient of v, `[b, n, kv_heads, d]`.
    pub dv: Vec<f64>,
}

/// Attention of `q` `[b, n, heads, d]` over `k` and `v` `[b, n, kv_heads, d]`, all row-major.
pub fn forward(
    shape: &Shape,
    pattern: &Pattern,
    scale: f64,
    q: &[f64],
    k: &[f64],
    v: &[f64],
) -> Result<Forward> {
    let call = Call::new(shape, pattern, scale, q, k, v)?;
    let mut out = vec![0.0; q.len()];
    let mut lse = vec![f64::NEG_INFINITY; q.len() / shape.dim];
    for row in call.rows() {
        let at = call.query(row);
        let whole = call.attend(row, &call.parts[row.head]);
        lse[at.start / shape.dim] = whole.lse;
        if pattern.mode() != Mode::Fkodom {
            let gained = whole.out.iter().map(|x| pattern.gain() * x);
            out[at].iter_mut().zip(gained).for_each(|(o, x)| *o = x);
        }
    }
    if pattern.mode() == Mode::Fkodom {
        call.fkodom_forward(&mut out);
    }
    Ok(Forward { out, lse })
}

/// Gradients of `sum(out * dout) + sum(lse * dlse)`, except where the mode defines others
/// (detached mixing weights). Needs nothing but the inputs: it runs the forward pass again.
#[expect(
    clippy::too_many_arguments,
    reason = "these are the operands of the formula, and a struct for one function hides them"
)]
pub fn backward(
    shape: &Shape,
    pattern: &Pattern,
    scale: f64,
    q: &[f64],
    k: &[f64],
    v: &[f64],
    dout: &[f64],
    dlse: Option<&[f64]>,
) -> Result<Gradients> {
    let call = Call::new(shape, pattern, scale, q, k, v)?;
    let Shape {
        batch,
        tokens,
        heads,
        dim,
        ..
    } = *shape;
    check_len("dout", dout, &[batch, tokens, heads, dim])?;
    if let Some(dlse) = dlse {
        check_len("dlse", dlse, &[batch, tokens, heads])?;
        if pattern.mode() == Mode::Fkodom {
            return Err(Error::NotInMode {
                what: "a gradient of the lse",
                mode: pattern.mode().name(),
                hint: "its output is no softmax of its lse: leave the gradient out, or use group \
                       mode",
            });
        }
    }
    let mut gradients = Gradients {
        dq: vec![0.0; q.len()],
        dk: vec![0.0; k.len()],
        dv: vec![0.0; v.len()],
    };
    if pattern.mode() == Mode::Fkodom {
        call.fkodom_backward(dout, &mut gradients);
    } else {
        call.softmax_backward(dout, dlse, &mut gradients);
    }
    Ok(gradients)
}

/// The attention of one query of `head`, the numbers of which are `q`. Keys are asked for one at
/// a time: `key` is given a token and returns its k and v as the head reads them, so that no tensor
/// need exist as a whole.
pub fn row(
    shape: &Shape,
    pattern: &Pattern,
    scale: f64,
    (token, head): (usize, usize),
    q: &[f64],
    mut key: impl FnMut(usize) -> (Vec<f64>, Vec<f64>),
) -> Result<Partial> {
    pattern.check(shape)?;
    check_len("q", q, &[shape.dim])?;
    if pattern.mode() == Mode::Fkodom {
        return Err(Error::NotInMode {
            what: "one row alone",
            mode: pattern.mode().name(),
            hint: "its rows are divided by sums over the whole sequence: use group mode",
        });
    }
    let mut carry = Carry::new(shape.dim);
    for &part in &parts(shape, pattern)[head] {
        for token in keys(shape, pattern, part, token) {
            let (k, v) = key(token);
            carry.absorb(scale * dot(q, &k), &v);
        }
    }
    let mut whole = carry.finish();
    whole.out.iter_mut().for_each(|x| *x *= pattern.gain());
    Ok(whole)
}

/// The branches of each head: none, one or several.
fn parts(shape: &Shape, pattern: &Pattern) -> Vec<Vec<Part>> {
    let mut parts = vec![Vec::new(); shape.heads];
    for (index, &branch) in pattern.branches().iter().enumerate() {
        for (head, offset) in pattern.heads_of(index, shape.heads) {
            parts[head].push(Part { branch, offset });
        }
    }
    parts
}

/// The keys `token` sees in `part`: its own index set, as far as causality allows (spec 0).
fn keys(
    shape: &Shape,
    pattern: &Pattern,
    part: Part,
    token: usize,
) -> impl Iterator<Item = usize> + use<> {
    // A segment longer than the sequence is the sequence; so cut, nothing below overflows.
    let segment = part.branch.segment.min(shape.tokens);
    let dilation = part.branch.dilation;
    let start = token / segment * segment;
    let touched = (token - start) % dilation == part.offset;
    let end = match pattern.is_causal() {
        true => token + 1,
        false => (start + segment).min(shape.tokens),
    };
    let visible = if touched {
        start + part.offset..end
    } else {
        0..0
    };
    visible.step_by(dilation)
}

/// One query: a token of a head of a sequence.
#[derive(Clone, Copy)]
struct Row {
    batch: usize,
    token: usize,
    head: usize,
}

/// A branch as one head has it.
#[derive(Clone, Copy)]
struct Part {
    branch: Branch,
    offset: usize,
}

/// What arrives at one query from above, and what its softmax needs to send it down (spec 3).
struct Upstream<'a> {
    dout: &'a [f64],
    lse: f64,
    /// dout·out less the gradient of the lse: what every dS of the row has subtracted.
    delta: f64,
}

/// The checked operands of one call.
struct Call<'a> {
    shape: &'a Shape,
    pattern: &'a Pattern,
    scale: f64,
    q: &'a [f64],
    k: &'a [f64],
    v: &'a [f64],
    /// The branches of each head: none, one or several.
    parts: Vec<Vec<Part>>,
}

impl<'a> Call<'a> {
    fn new(
        shape: &'a Shape,
        pattern: &'a Pattern,
        scale: f64,
        q: &'a [f64],
        k: &'a [f64],
        v: &'a [f64],
    ) -> Result<Call<'a>> {
        pattern.check(shape)?;
        let Shape {
            batch,
            tokens,
            heads,
            kv_heads,
            dim,
        } = *shape;
        check_len("q", q, &[batch, tokens, heads, dim])?;
        check_len("k", k, &[batch, tokens, kv_heads, dim])?;
        check_len("v", v, &[batch, tokens, kv_heads, dim])?;
        Ok(Call {
            shape,
            pattern,
            scale,
            q,
            k,
            v,
            parts: parts(shape, pattern),
        })
    }

    /// All queries, in the order they are stored in.
    fn rows(&self) -> impl Iterator<Item = Row> {
        let Shape {
            batch,
            tokens,
            heads,
            ..
        } = *self.shape;
        (0..batch * tokens * heads).map(move |row| Row {
            batch: row / heads / tokens,
            token: row / heads % tokens,
            head: row % heads,
        })
    }

    /// Where the query's numbers lie in q, out and dq.
    fn query(&self, row: Row) -> Range<usize> {
        let Shape {
            tokens, heads, dim, ..
        } = *self.shape;
        let start = ((row.batch * tokens + row.token) * heads + row.head) * dim;
        start..start + dim
    }

    /// Where the numbers of `token`, as the query's head reads it, lie in k, v, dk and dv.
    fn key(&self, row: Row, token: usize) -> Range<usize> {
        let Shape {
            tokens,
            kv_heads,
            dim,
            ..
        } = *self.shape;
        let head = self.shape.kv_head(row.head);
        let start = ((row.batch * tokens + token) * kv_heads + head) * dim;
        start..start + dim
    }

    /// The keys `token` sees in `part`.
    fn keys(&self, part: Part, token: usize) -> impl Iterator<Item = usize> + use<> {
        keys(self.shape, self.pattern, part, token)
    }

    fn score(&self, row: Row, token: usize) -> f64 {
        self.scale * dot(&self.q[self.query(row)], &self.k[self.key(row, token)])
    }

    /// One softmax over the keys of all `parts`; a key that several of them have counts as often.
    fn attend(&self, row: Row, parts: &[Part]) -> Partial {
        let mut carry = Carry::new(self.shape.dim);
        for &part in parts {
            for token in self.keys(part, row.token) {
                carry.absorb(self.score(row, token), &self.v[self.key(row, token)]);
            }
        }
        carry.finish()
    }

    /// Sends what arrives at one query down to q, k and v, through the keys of one branch.
    fn pull_back(&self, row: Row, part: Part, from: &Upstream<'_>, to: &mut Gradients) {
        let query = self.query(row);
        for token in self.keys(part, row.token) {
            let key = self.key(row, token);
            let p = (self.score(row, token) - from.lse).exp();
            let ds = p * (dot(from.dout, &self.v[key.clone()]) - from.delta);
            add(&mut to.dv[key.clone()], p, from.dout);
            add(
                &mut to.dq[query.clone()],
                self.scale * ds,
                &self.k[key.clone()],
            );
            add(&mut to.dk[key], self.scale * ds, &self.q[query.clone()]);
        }
    }

    /// Group and mix mode: the branches of a head share one softmax, hence one lse.
    fn softmax_backward(&self, dout: &[f64], dlse: Option<&[f64]>, to: &mut Gradients) {
        let detached = matches!(
            self.pattern.mode(),
            Mode::Mix {
                gradient: MixingGradient::Detached,
                ..
            }
        );
        for row in self.rows() {
            let at = self.query(row);
            let g = dlse.map_or(0.0, |dlse| dlse[at.start / self.shape.dim]);
            let dout: Vec<f64> = dout[at].iter().map(|x| self.pattern.gain() * x).collect();
            let whole = self.attend(row, &self.parts[row.head]);
            for &part in &self.parts[row.head] {
                // Weights taken as constants: each branch is a softmax with an output of its own.
                let own = detached.then(|| self.attend(row, &[part]));
                let from = Upstream {
                    dout: &dout,
                    lse: whole.lse,
                    delta: dot(&dout, &own.as_ref().unwrap_or(&whole).out) - g,
                };
                self.pull_back(row, part, &from, to);
            }
        }
    }

    /// The peer divides each feature of a branch by its sum over the sequence.
    fn fkodom_forward(&self, out: &mut [f64]) {
        for (batch, head, part) in self.fkodom_parts() {
            let branch = FkodomBranch::new(self, batch, head, part);
            for (row, x) in &branch.rows {
                let at = self.query(*row);
                for (c, o) in out[at].iter_mut().enumerate() {
                    *o += x.out[c] / branch.sigma[c] / self.groups();
                }
            }
        }
    }

    fn fkodom_backward(&self, dout: &[f64], to: &mut Gradients) {
        for (batch, head, part) in self.fkodom_parts() {
            let branch = FkodomBranch::new(self, batch, head, part);
            let dy = |row: Row, c: usize| dout[self.query(row)][c] / self.groups();
            let mut dy_x = vec![0.0; self.shape.dim];
            for (row, x) in &branch.rows {
                for (c, sum) in dy_x.iter_mut().enumerate() {
                    *sum += dy(*row, c) * x.out[c];
                }
            }
            for (row, x) in &branch.rows {
                let sigma = &branch.sigma;
                let dx: Vec<f64> = (0..self.shape.dim)
                    .map(|c| dy(*row, c) / sigma[c] - dy_x[c] / (sigma[c] * sigma[c]))
                    .collect();
                let from = Upstream {
                    dout: &dx,
                    lse: x.lse,
                    delta: dot(&dx, &x.out),
                };
                self.pull_back(*row, part, &from, to);
            }
        }
    }

    /// Everything that fkodom mode normalises by itself: each branch of each head and sequence.
    fn fkodom_parts(&self) -> impl Iterator<Item = (usize, usize, Part)> {
        (0..self.shape.batch).flat_map(move |batch| {
            let heads = self.parts.iter().enumerate();
            heads.flat_map(move |(head, parts)| parts.iter().map(move |&part| (batch, head, part)))
        })
    }

    fn groups(&self) -> f64 {
        self.pattern.branches().len() as f64
    }
}

/// The attention of one branch over a whole sequence, and what fkodom mode divides it by.
struct FkodomBranch {
    /// The queries the branch touches and their attention.
    rows: Vec<(Row, Partial)>,
    /// Sum of the attention over those queries, for each feature.
    sigma: Vec<f64>,
}

impl FkodomBranch {
    fn new(call: &Call<'_>, batch: usize, head: usize, part: Part) -> FkodomBranch {
        // Untouched queries are left out rather than divided: a branch may touch none, and
        // zero over zero is not zero.
        let rows: Vec<(Row, Partial)> = (0..call.shape.tokens)
            .map(|token| Row { batch, token, head })
            .map(|row| (row, call.attend(row, &[part])))
            .filter(|(_, x)| x.lse != f64::NEG_INFINITY)
            .collect();
        let mut sigma = vec![0.0; call.shape.dim];
        rows.iter().for_each(|(_, x)| add(&mut sigma, 1.0, &x.out));
        FkodomBranch { rows, sigma }
    }
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
