//! Jobs: the unit of work of a kernel, one strided batched attention with its mask.
//!
//! The decision here: a job consists of addresses. Each operand is an affine view of a buffer, so
//! dilation, segments, grouped heads and packed parcels are all just strides to a kernel, and no
//! rows are gathered before they are attended to.

use serde::Serialize;
use std::sync::Arc;

/// An affine view of a buffer: maps (batch, segment, row, head) to an address in elements.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Operand {
    /// Address of the first row of the first segment and batch entry, before `heads` is added.
    pub offset: usize,
    /// Stride between batch entries.
    pub batch: usize,
    /// Stride between segments.
    pub segment: usize,
    /// Stride between rows.
    pub row: usize,
    /// The offset of each head.
    pub heads: Arc<[usize]>,
}

impl Operand {
    /// The address of the first element of one row of one head.
    #[inline]
    pub fn at(&self, batch: usize, segment: usize, row: usize, head: usize) -> usize {
        self.offset
            + batch * self.batch
            + segment * self.segment
            + row * self.row
            + self.heads[head]
    }
}

/// A causal mask: the positions of queries and keys within their segment. A query sees the keys at
/// or before its own position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Causal {
    /// Position of the first query.
    pub query: usize,
    /// Step between the positions of consecutive queries.
    pub query_step: usize,
    /// Position of the first key.
    pub key: usize,
    /// Step between the positions of consecutive keys.
    pub key_step: usize,
}

/// One strided batched attention: in every segment of every batch entry, for every head, `queries`
/// rows against `keys` rows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Job {
    /// Batch entries.
    pub batch: usize,
    /// Segments.
    pub segments: usize,
    /// Query rows in a segment.
    pub queries: usize,
    /// Key rows in a segment.
    pub keys: usize,
    /// Heads.
    pub heads: usize,
    /// The head dimension.
    pub dim: usize,
    /// Addresses in q, in elements.
    pub q: Operand,
    /// Addresses in k and v (and dk and dv), in elements.
    pub k: Operand,
    /// Addresses of cells. A cell is one query of one head slot: m, l, lse and delta hold one
    /// element per cell; acc, out and dout hold `dim` elements per cell, at `dim` times the
    /// address.
    pub cells: Operand,
    /// Addresses in dq, if they differ from those in q.
    pub dq: Option<Operand>,
    /// The causal mask; None if every query sees every key.
    pub causal: Option<Causal>,
    /// The softmax scale: factor of q·k.
    pub scale: f64,
    /// Factor of the output after the softmax. The backward pass needs it too.
    pub gain: f64,
}

impl Job {
    /// The number of keys that query row `i` sees. Positions ascend, so these are the first keys.
    #[inline]
    pub fn visible(&self, i: usize) -> usize {
        match self.causal {
            None => self.keys,
            Some(mask) => {
                let position = mask.query + i * mask.query_step;
                if position < mask.key {
                    0
                } else {
                    ((position - mask.key) / mask.key_step + 1).min(self.keys)
                }
            }
        }
    }

    /// (query, key) pairs the job computes, over all batch entries, segments and heads.
    pub fn pairs(&self) -> u128 {
        let each = (self.batch * self.segments * self.heads) as u128;
        let one: u128 = match self.causal {
            None => self.queries as u128 * self.keys as u128,
            Some(mask) => mask.pairs(self.queries, self.keys),
        };
        each * one
    }

    /// This job restricted to some of its query rows.
    pub fn of_queries(&self, rows: std::ops::Range<usize>) -> Job {
        let of = |operand: &Operand| Operand {
            offset: operand.offset + rows.start * operand.row,
            ..operand.clone()
        };
        let mut job = Job {
            queries: rows.len(),
            q: of(&self.q),
            cells: of(&self.cells),
            dq: self.dq.as_ref().map(of),
            ..self.clone()
        };
        if let Some(mask) = &mut job.causal {
            mask.query += rows.start * mask.query_step;
        }
        job
    }
}

impl Causal {
    /// The number of visible pairs in closed form.
    fn pairs(&self, queries: usize, keys: usize) -> u128 {
        // Queries before `first` see nothing, those from `full` on see every key.
        let ahead = |position: usize| {
            let gap = position.saturating_sub(self.query);
            gap.div_ceil(self.query_step).min(queries)
        };
        let first = ahead(self.key);
        let full = ahead(self.key + (keys - 1) * self.key_step);
        let slope = self.query_step as u128;
        let lead = (self.query + first * self.query_step) as u128;
        let between = match full.checked_sub(first) {
            Some(count) if count > 0 => {
                let start = lead - self.key as u128;
                floor_sum(count as u128, self.key_step as u128, slope, start) + count as u128
            }
            _ => 0,
        };
        between + (queries - full.max(first)) as u128 * keys as u128
    }
}

/// Sum over i in 0..n of floor((a·i + b) / m).
fn floor_sum(mut n: u128, mut m: u128, mut a: u128, mut b: u128) -> u128 {
    let mut sum = 0;
    while n > 0 {
        sum += n * (n - 1) / 2 * (a / m) + n * (b / m);
        (a, b) = (a % m, b % m);
        let top = a * n + b;
        (n, b) = (top / m, top % m);
        (m, a) = (a, m);
        if m == 0 {
            break;
        }
    }
    sum
}

/// Rows to copy, add or merge from one buffer into another; addresses as in [`Job`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Block {
    /// Batch entries.
    pub batch: usize,
    /// Segments.
    pub segments: usize,
    /// Rows in a segment.
    pub rows: usize,
    /// Heads.
    pub heads: usize,
    /// Contiguous elements of one row of one head.
    pub width: usize,
    /// The source.
    pub from: Operand,
    /// The destination.
    pub to: Operand,
}

impl Block {
    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.batch * self.segments * self.rows * self.heads * self.width
    }

    /// `elements` contiguous elements, from one address to another.
    pub fn contiguous(elements: usize, from: usize, to: usize) -> Block {
        let at = |offset: usize| Operand {
            offset,
            batch: 0,
            segment: 0,
            row: 0,
            heads: Arc::new([0]),
        };
        Block {
            batch: 1,
            segments: 1,
            rows: 1,
            heads: 1,
            width: elements,
            from: at(from),
            to: at(to),
        }
    }

    /// Every pair of addresses (from, to), in storage order of the source.
    pub fn addresses(&self) -> impl Iterator<Item = (usize, usize)> {
        let each = |count: usize| 0..count;
        each(self.batch).flat_map(move |b| {
            each(self.segments).flat_map(move |s| {
                each(self.rows).flat_map(move |i| {
                    each(self.heads)
                        .map(move |h| (self.from.at(b, s, i, h), self.to.at(b, s, i, h)))
                })
            })
        })
    }
}
