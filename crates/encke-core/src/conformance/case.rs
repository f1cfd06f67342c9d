//! Random attention cases: several jobs into one carry, covering everything a job can express.
//!
//! A case is not a plan: strides, head maps and masks are drawn independently of any pattern, so a
//! kernel that passes also supports patterns that do not exist yet.
//!
//! The decision here: values are rounded when they are drawn, so the kernel and the oracle compute
//! with exactly the same inputs, whatever type each stores them in.

use super::layout::{GAP, Layout, RowCounts, shuffled};
use super::masks;
use super::random::Random;
use super::suite::KernelSuite;
use crate::dtype::DType;
use crate::job::{Band, Job, Mask, Operand};

/// The largest numbers of queries and keys of a case: small, but beyond the tile sizes of kernels.
const SIZES: [(usize, usize); 6] = [(8, 8), (40, 40), (8, 200), (200, 8), (200, 200), (200, 200)];
/// The same for cases with few queries and many keys, which have half as many keys at least.
const LONG_SIZES: [(usize, usize); 4] = [(1, 2000), (4, 1500), (9, 1500), (16, 1200)];
/// Multiplications per job above which batch, segments and heads are reduced.
const WORK: usize = 500_000;
const LONG_WORK: usize = 4_000_000;
/// One job and the keys it reads.
#[derive(Debug, Clone)]
pub(super) struct CaseJob {
    pub job: Job,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
}

/// Jobs that share queries and a carry. All values are exact in their storage types.
#[derive(Debug, Clone)]
pub(super) struct Case {
    pub dim: usize,
    pub value_dim: usize,
    pub gain: f64,
    /// Cells of the buffers, gaps included.
    pub cells: usize,
    pub q: Vec<f64>,
    pub dout: Vec<f64>,
    pub dlse: Vec<f64>,
    pub dq: Vec<f64>,
    pub delta: Option<DeltaPlace>,
    pub parts: Vec<CaseJob>,
}

/// Where a case with addresses of its own for delta has it.
#[derive(Debug, Clone)]
pub(super) struct DeltaPlace {
    /// Elements of the buffer, gaps included.
    elements: usize,
    /// The address of each cell, and that of its delta.
    of_cells: Vec<(usize, usize)>,
}

impl DeltaPlace {
    fn new(cells: &Layout, delta: &Layout) -> DeltaPlace {
        let both = cells.addresses.iter().zip(&delta.addresses);
        DeltaPlace {
            elements: delta.elements,
            of_cells: both.map(|(cell, delta)| (*cell, *delta)).collect(),
        }
    }

    /// The buffer, from the delta of each cell.
    pub fn buffer(&self, of_cells: &[f64]) -> Vec<f64> {
        let mut buffer = vec![GAP; self.elements];
        for &(cell, delta) in &self.of_cells {
            buffer[delta] = of_cells[cell];
        }
        buffer
    }
}

/// Addresses of one (query, key) pair.
pub(super) struct PairAddresses {
    pub part: usize,
    /// Batch entry, segment and head.
    pub at: (usize, usize, usize),
    pub query_row: usize,
    pub key_row: usize,
    pub cell: usize,
    pub q: usize,
    pub key: usize,
    pub value: usize,
    pub dq: usize,
}

impl Case {
    /// The case of a seed, with values that are exact in `dtype`.
    pub fn new(seed: u64, dtype: DType, suite: KernelSuite) -> Case {
        let mut random = Random::new(seed);
        let sizes = CaseSizes::new(&mut random, suite);
        // Where keys are many, so are the positions of queries: causal masks show some of them.
        let positions = if suite.long_keys { 2 * sizes.keys } else { 40 };
        let rows = sizes.row_counts(sizes.queries);
        let own = shuffled(&mut random, sizes.heads);
        let q = Layout::new(&mut random, rows, &own, sizes.dim);
        let cells = Layout::new(&mut random, rows, &own, 1);
        let mut of_delta = Random::new(seed ^ 0xde17a);
        let delta = of_delta.once_in(3).then(|| {
            let heads = shuffled(&mut of_delta, sizes.heads);
            Layout::new(&mut of_delta, rows, &heads, 1)
        });
        let dq = random.once_in(2).then(|| {
            let heads = shuffled(&mut random, sizes.heads);
            Layout::new(&mut random, rows, &heads, sizes.dim)
        });
        let mut distribution = ValueDistribution::new(&mut random, dtype, sizes.dim);
        if suite.signs {
            distribution.scale *= random.pick(&[-1.0, -1.0, 0.0]);
        }
        let gain = random.pick(&[1.0, 0.5, 0.3]);
        let shared = QueryOperands {
            gain,
            queries: (random.below(positions), random.pick(&[1, 1, 2, 3])),
            q: &q.operand,
            cells: &cells.operand,
            delta: delta.as_ref().map(|layout| &layout.operand),
            dq: dq.as_ref().map(|layout| &layout.operand),
        };
        let count = random.pick(&[1, 2, 2, 3, 4]);
        let parts = (0..count)
            .map(|_| part(&mut random, &sizes, &shared, &distribution))
            .collect();
        let sum = dtype.sum();
        let dims = sizes.dim;
        let mut values = |layout: &Layout, width, dtype: DType| {
            layout.values(width, |_| dtype.round(random.unit()))
        };
        let dout = values(&cells, dims, dtype);
        let dlse = values(&cells, 1, sum);
        let gradient = values(dq.as_ref().unwrap_or(&q), 1, sum);
        let q = q.values(1, |c| distribution.query(&mut random, c));
        Case {
            dim: sizes.dim,
            value_dim: sizes.dim,
            gain,
            cells: cells.elements,
            q,
            dout,
            dlse,
            dq: gradient,
            delta: delta.map(|delta| DeltaPlace::new(&cells, &delta)),
            parts,
        }
    }

    /// This case with other masks and, if `transforms`, with transforms of its scores.
    pub fn with_masks(mut self, seed: u64, transforms: bool) -> Case {
        let random = &mut Random::new(seed ^ 0xd0c5);
        let transform = masks::transform(random, self.parts[0].job.heads).filter(|_| transforms);
        for part in &mut self.parts {
            part.job.transform = transform.clone();
            part.job.mask = masks::mask(random, &part.job);
        }
        self
    }

    /// Calls `each` for every visible pair, job by job.
    pub fn pairs(&self, mut each: impl FnMut(PairAddresses)) {
        for (part, job) in self.parts.iter().map(|part| &part.job).enumerate() {
            for (b, s, query_row, h) in rows(job, job.queries) {
                for key_row in job.visible(query_row) {
                    let key = job.k.at(b, s, key_row, h);
                    each(PairAddresses {
                        part,
                        at: (b, s, h),
                        query_row,
                        key_row,
                        cell: job.cells.at(b, s, query_row, h),
                        q: job.q.at(b, s, query_row, h),
                        key,
                        value: job.value(key),
                        dq: dq(job).at(b, s, query_row, h),
                    });
                }
            }
        }
    }

    /// Which cells a job may write.
    pub fn touched_cells(&self) -> Vec<bool> {
        let jobs = self.parts.iter().map(|part| &part.job);
        marks(
            self.cells,
            1,
            jobs.map(|job| (job, &job.cells, job.queries)),
        )
    }

    /// Which elements of dq a job may write.
    pub fn touched_dq(&self) -> Vec<bool> {
        let jobs = self.parts.iter().map(|part| &part.job);
        let rows = jobs.map(|job| (job, dq(job), job.queries));
        marks(self.dq.len(), self.dim, rows)
    }
}

impl CaseJob {
    /// Which elements of dk the job may write; of dv, those of the same rows.
    pub fn touched_keys(&self) -> Vec<bool> {
        let rows = [(&self.job, &self.job.k, self.job.keys)];
        marks(self.k.len(), self.job.dim, rows.into_iter())
    }

    /// Which of `cells` cells the job may write.
    pub fn touched_cells(&self, cells: usize) -> Vec<bool> {
        let rows = [(&self.job, &self.job.cells, self.job.queries)];
        marks(cells, 1, rows.into_iter())
    }

    /// The addresses of key row `t` in every batch entry, segment and head.
    pub fn key_addresses(&self, t: usize) -> Vec<usize> {
        rows(&self.job, 1)
            .map(|(b, s, _, h)| self.job.k.at(b, s, t, h))
            .collect()
    }
}

/// Where a job writes the gradient of its queries.
fn dq(job: &Job) -> &Operand {
    job.dq.as_ref().unwrap_or(&job.q)
}

/// Every (batch, segment, row, head).
pub(super) fn rows(job: &Job, rows: usize) -> impl Iterator<Item = (usize, usize, usize, usize)> {
    let (segments, heads) = (job.segments, job.heads);
    (0..job.batch * segments * rows * heads).map(move |i| {
        let (i, h) = (i / heads, i % heads);
        let (i, row) = (i / rows, i % rows);
        (i / segments, i % segments, row, h)
    })
}

/// Marks the elements of the rows that operands address.
fn marks<'a>(
    elements: usize,
    width: usize,
    operands: impl Iterator<Item = (&'a Job, &'a Operand, usize)>,
) -> Vec<bool> {
    let mut marks = vec![false; elements];
    for (job, operand, count) in operands {
        for (b, s, row, h) in rows(job, count) {
            let at = operand.at(b, s, row, h);
            marks[at..at + width].fill(true);
        }
    }
    marks
}

/// The sizes that all operands of a case share.
struct CaseSizes {
    dim: usize,
    batch: usize,
    segments: usize,
    queries: usize,
    keys: usize,
    heads: usize,
    kv_heads: usize,
}

impl CaseSizes {
    fn new(random: &mut Random, suite: KernelSuite) -> CaseSizes {
        let dim = random.pick(suite.dims);
        let (work, (most_queries, most_keys)) = match suite.long_keys {
            true => (LONG_WORK, random.pick(&LONG_SIZES)),
            false => (WORK, random.pick(&SIZES)),
        };
        let least_keys = if suite.long_keys { most_keys / 2 } else { 0 };
        let queries = 1 + random.below(most_queries);
        let keys = least_keys + 1 + random.below(most_keys - least_keys);
        let mut counts = [
            1 + random.below(2),
            1 + random.below(3),
            1 + random.below(6),
        ];
        for axis in 0..3 {
            while counts[axis] > 1 && counts.iter().product::<usize>() * queries * keys * dim > work
            {
                counts[axis] -= 1;
            }
        }
        let [batch, segments, heads] = counts;
        let kv_heads = 1 + random.below(heads);
        CaseSizes {
            dim,
            batch,
            segments,
            queries,
            keys,
            heads,
            kv_heads,
        }
    }

    fn row_counts(&self, rows: usize) -> RowCounts {
        [self.batch, self.segments, rows]
    }
}

/// `limit`, or a random integer from 1 to `limit`.
fn all_or_some(random: &mut Random, limit: usize) -> usize {
    if random.once_in(2) {
        limit
    } else {
        1 + random.below(limit)
    }
}

/// The query operands that all jobs of a case share.
struct QueryOperands<'a> {
    gain: f64,
    /// Position of the first query row and the distance to the next.
    queries: (usize, usize),
    q: &'a Operand,
    cells: &'a Operand,
    delta: Option<&'a Operand>,
    dq: Option<&'a Operand>,
}

/// One job over some of the query rows and keys of its own.
fn part(
    random: &mut Random,
    sizes: &CaseSizes,
    shared: &QueryOperands<'_>,
    distribution: &ValueDistribution,
) -> CaseJob {
    let step = random.pick(&[1, 1, 1, 1, 2, 3]);
    let first = if random.once_in(3) {
        random.below(sizes.queries)
    } else {
        0
    };
    let queries = all_or_some(random, (sizes.queries - first).div_ceil(step));
    let keys = all_or_some(random, sizes.keys);
    let band = (!random.once_in(3)).then(|| {
        let (position, distance) = shared.queries;
        let last = position + sizes.queries * distance;
        Band::causal(
            (position + first * distance, step * distance),
            (random.below(last + 5), random.pick(&[1, 1, 2, 3, 5])),
        )
    });
    let mut slots: Vec<usize> = (0..sizes.heads)
        .map(|h| h * sizes.kv_heads / sizes.heads)
        .collect();
    if random.once_in(2) {
        random.shuffle(&mut slots);
    }
    let k = Layout::new(random, sizes.row_counts(keys), &slots, sizes.dim);
    let thin = |operand: &Operand| Operand {
        offset: operand.offset + first * operand.row,
        row: operand.row * step,
        ..operand.clone()
    };
    let job = Job {
        batch: sizes.batch,
        segments: sizes.segments,
        queries,
        keys,
        heads: sizes.heads,
        dim: sizes.dim,
        value_dim: sizes.dim,
        q: thin(shared.q),
        k: k.operand.clone(),
        cells: thin(shared.cells),
        delta: shared.delta.map(thin),
        dq: shared.dq.map(thin),
        mask: band.map(Mask::Band),
        transform: None,
        dropout: None,
        scale: distribution.scale,
        gain: shared.gain,
        tiles: None,
    };
    let sum = distribution.dtype.sum();
    CaseJob {
        job,
        k: k.values(1, |c| distribution.key(random, c)),
        v: k.values(1, |_| distribution.dtype.round(random.unit())),
        dk: k.values(1, |_| sum.round(random.unit())),
        dv: k.values(1, |_| sum.round(random.unit())),
    }
}

/// How the values of q and k are drawn.
struct ValueDistribution {
    dtype: DType,
    scale: f64,
    spread: f64,
    /// Scores of about ±1e4 from small integers, which every type stores and sums exactly: this
    /// tests the range of the softmax, not the rounding of the inputs.
    large: bool,
}

impl ValueDistribution {
    fn new(random: &mut Random, dtype: DType, dim: usize) -> ValueDistribution {
        let large = random.once_in(4);
        let usual = 1.0 / (dim as f64).sqrt();
        ValueDistribution {
            dtype,
            scale: if large {
                1.0
            } else {
                random.pick(&[usual, usual, 0.2])
            },
            spread: random.pick(&[0.0, 0.5, 1.0, 3.0]),
            large,
        }
    }

    fn query(&self, random: &mut Random, channel: usize) -> f64 {
        if self.large && channel == 0 {
            random.pick(&[96.0, -96.0])
        } else {
            self.small(random)
        }
    }

    fn key(&self, random: &mut Random, channel: usize) -> f64 {
        if self.large && channel == 0 {
            random.pick(&[96.0, 96.0, 96.0, -96.0])
        } else {
            self.small(random)
        }
    }

    fn small(&self, random: &mut Random) -> f64 {
        if self.large {
            random.pick(&[-1.0, -0.5, 0.0, 0.0, 0.0, 0.5, 1.0])
        } else {
            self.dtype.round(random.unit() * self.spread)
        }
    }
}
