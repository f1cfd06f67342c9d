//! What a kernel is told: one strided, batched attention, complete with its mask.
//!
//! A job names addresses, not meanings: each operand is an affine view of a buffer, so dilation,
//! segments, head groups and packed parcels all look alike to a kernel, and nothing is gathered.

use serde::Serialize;
use std::sync::Arc;

/// An affine view of a buffer: the address of (batch, segment, row, head) in elements.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Operand {
    /// Address of the first one.
    pub offset: usize,
    /// From one batch entry to the next.
    pub batch: usize,
    /// From one segment to the next.
    pub segment: usize,
    /// From one row to the next.
    pub row: usize,
    /// What each head adds.
    pub heads: Arc<[usize]>,
}

impl Operand {
    /// The address of one row of one head.
    #[inline]
    pub fn at(&self, batch: usize, segment: usize, row: usize, head: usize) -> usize {
        self.offset
            + batch * self.batch
            + segment * self.segment
            + row * self.row
            + self.heads[head]
    }
}

/// Positions of queries and keys within their segment, for the causal mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Causal {
    /// Position of the first query.
    pub query: usize,
    /// Positions from one query to the next.
    pub query_step: usize,
    /// Position of the first key.
    pub key: usize,
    /// Positions from one key to the next.
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
    /// Numbers in a row.
    pub dim: usize,
    /// Addresses in q, in elements.
    pub q: Operand,
    /// Addresses in k and v (and dk and dv), in elements.
    pub k: Operand,
    /// Addresses of cells: m, l, lse and delta hold one number a cell; acc, out and dout hold
    /// `dim` numbers a cell, at `dim` times the address.
    pub cells: Operand,
    /// Addresses in dq where they differ from those in q.
    pub dq: Option<Operand>,
    /// The mask; None where every query sees every key.
    pub causal: Option<Causal>,
    /// What q·k is multiplied with.
    pub scale: f64,
    /// What the output was multiplied with after the softmax (backward needs it).
    pub gain: f64,
}

impl Job {
    /// How many keys query row `i` sees: always the first so many, since positions rise.
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

    /// The same for some of its query rows.
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
    /// Sum over the queries of the keys each one sees, without a loop over them.
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

/// Rows to be copied, added or merged from one buffer into another; addresses as in [`Job`].
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
    /// Contiguous numbers of one row of one head.
    pub width: usize,
    /// Where they are.
    pub from: Operand,
    /// Where they go.
    pub to: Operand,
}

impl Block {
    /// How many numbers it has.
    pub fn numbers(&self) -> usize {
        self.batch * self.segments * self.rows * self.heads * self.width
    }

    /// `numbers` numbers that lie side by side, from one address to another.
    pub fn contiguous(numbers: usize, from: usize, to: usize) -> Block {
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
            width: numbers,
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
