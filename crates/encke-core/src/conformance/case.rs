//! Random attention cases: several jobs into one carry, with every freedom a job has.
//!
//! A case is not a plan: its strides, head maps and masks are drawn without regard to any pattern,
//! so a kernel that is right here is right for patterns nobody has thought of yet.
//!
//! The decision here: numbers are rounded when they are drawn, so that a kernel and the oracle are
//! given exactly the same ones whatever type each stores them in.

use super::layout::{Layout, Places, shuffled};
use super::{Random, Suite};
use crate::dtype::DType;
use crate::job::{Causal, Job, Operand};

/// Head dimensions that cross vector widths on both sides.
pub(super) const DIMS: [usize; 9] = [1, 2, 3, 8, 16, 40, 64, 80, 128];
/// The most queries and keys of a case: few, and enough to cross the block sizes of kernels.
const SIZES: [(usize, usize); 6] = [(8, 8), (40, 40), (8, 200), (200, 8), (200, 200), (200, 200)];
/// Multiplications per job above which batch, segments and heads are cut back.
const WORK: usize = 500_000;
/// One job and the keys it reads.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub job: Job,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
}

/// Jobs that share queries and a carry. All numbers are exact in the types they are stored in.
#[derive(Debug, Clone)]
pub(super) struct Case {
    pub dim: usize,
    pub gain: f64,
    /// Cells of the buffers, gaps included.
    pub cells: usize,
    pub q: Vec<f64>,
    pub dout: Vec<f64>,
    pub dlse: Vec<f64>,
    pub dq: Vec<f64>,
    pub parts: Vec<Part>,
}

/// Addresses of one (query, key) pair.
pub(super) struct Pair {
    pub part: usize,
    pub key_row: usize,
    pub cell: usize,
    pub q: usize,
    pub key: usize,
    pub dq: usize,
}

impl Case {
    /// The case of a seed, with numbers that `dtype` can hold.
    pub fn new(seed: u64, dtype: DType, suite: Suite) -> Case {
        let mut random = Random::new(seed);
        let sizes = Sizes::new(&mut random, suite.dims);
        let rows = sizes.places(sizes.queries);
        let own = shuffled(&mut random, sizes.heads);
        let q = Layout::new(&mut random, rows, &own, sizes.dim);
        let cells = Layout::new(&mut random, rows, &own, 1);
        let dq = random.once_in(2).then(|| {
            let heads = shuffled(&mut random, sizes.heads);
            Layout::new(&mut random, rows, &heads, sizes.dim)
        });
        let mut numbers = Numbers::new(&mut random, dtype, sizes.dim);
        if suite.signs {
            numbers.scale *= random.pick(&[-1.0, -1.0, 0.0]);
        }
        let gain = random.pick(&[1.0, 0.5, 0.3]);
        let shared = Shared {
            gain,
            queries: (random.below(40), random.pick(&[1, 1, 2, 3])),
            q: &q.operand,
            cells: &cells.operand,
            dq: dq.as_ref().map(|layout| &layout.operand),
        };
        let count = random.pick(&[1, 2, 2, 3, 4]);
        let parts = (0..count)
            .map(|_| part(&mut random, &sizes, &shared, &numbers))
            .collect();
        let sum = dtype.sum();
        let dims = sizes.dim;
        let mut values = |layout: &Layout, width, dtype: DType| {
            layout.values(width, |_| dtype.round(random.unit()))
        };
        let dout = values(&cells, dims, dtype);
        let dlse = values(&cells, 1, sum);
        let gradient = values(dq.as_ref().unwrap_or(&q), 1, sum);
        let q = q.values(1, |c| numbers.query(&mut random, c));
        Case {
            dim: sizes.dim,
            gain,
            cells: cells.elements,
            q,
            dout,
            dlse,
            dq: gradient,
            parts,
        }
    }

    /// Calls `each` for every pair that is computed, job by job.
    pub fn pairs(&self, mut each: impl FnMut(Pair)) {
        for (part, job) in self.parts.iter().map(|part| &part.job).enumerate() {
            for (b, s, query_row, h) in rows(job, job.queries) {
                for key_row in 0..job.visible(query_row) {
                    each(Pair {
                        part,
                        key_row,
                        cell: job.cells.at(b, s, query_row, h),
                        q: job.q.at(b, s, query_row, h),
                        key: job.k.at(b, s, key_row, h),
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

impl Part {
    /// Which elements of dk and dv the job may write.
    pub fn touched_keys(&self) -> Vec<bool> {
        let rows = [(&self.job, &self.job.k, self.job.keys)];
        marks(self.k.len(), self.job.dim, rows.into_iter())
    }

    /// Which of so many cells the job may write.
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
fn rows(job: &Job, rows: usize) -> impl Iterator<Item = (usize, usize, usize, usize)> {
    let (segments, heads) = (job.segments, job.heads);
    (0..job.batch * segments * rows * heads).map(move |i| {
        let (i, h) = (i / heads, i % heads);
        let (i, row) = (i / rows, i % rows);
        (i / segments, i % segments, row, h)
    })
}

/// Marks the rows that operands reach.
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

/// The sizes all operands of a case share.
struct Sizes {
    dim: usize,
    batch: usize,
    segments: usize,
    queries: usize,
    keys: usize,
    heads: usize,
    kv_heads: usize,
}

impl Sizes {
    fn new(random: &mut Random, dims: &[usize]) -> Sizes {
        let dim = random.pick(dims);
        let (most_queries, most_keys) = random.pick(&SIZES);
        let (queries, keys) = (1 + random.below(most_queries), 1 + random.below(most_keys));
        let mut places = [
            1 + random.below(2),
            1 + random.below(3),
            1 + random.below(6),
        ];
        for place in 0..3 {
            while places[place] > 1
                && places.iter().product::<usize>() * queries * keys * dim > WORK
            {
                places[place] -= 1;
            }
        }
        let [batch, segments, heads] = places;
        let kv_heads = 1 + random.below(heads);
        Sizes {
            dim,
            batch,
            segments,
            queries,
            keys,
            heads,
            kv_heads,
        }
    }

    fn places(&self, rows: usize) -> Places {
        [self.batch, self.segments, rows]
    }
}

/// `limit`, or any number from 1 to it.
fn all_or_some(random: &mut Random, limit: usize) -> usize {
    if random.once_in(2) {
        limit
    } else {
        1 + random.below(limit)
    }
}

/// What all parts of a case have in common.
struct Shared<'a> {
    gain: f64,
    /// Position of the first query row and the distance to the next.
    queries: (usize, usize),
    q: &'a Operand,
    cells: &'a Operand,
    dq: Option<&'a Operand>,
}

/// One job over some of the query rows and keys of its own.
fn part(random: &mut Random, sizes: &Sizes, shared: &Shared<'_>, numbers: &Numbers) -> Part {
    let step = random.pick(&[1, 1, 1, 1, 2, 3]);
    let first = if random.once_in(3) {
        random.below(sizes.queries)
    } else {
        0
    };
    let queries = all_or_some(random, (sizes.queries - first).div_ceil(step));
    let keys = all_or_some(random, sizes.keys);
    let causal = (!random.once_in(3)).then(|| {
        let (position, distance) = shared.queries;
        let last = position + sizes.queries * distance;
        Causal {
            query: position + first * distance,
            query_step: step * distance,
            key: random.below(last + 5),
            key_step: random.pick(&[1, 1, 2, 3, 5]),
        }
    });
    let mut slots: Vec<usize> = (0..sizes.heads)
        .map(|h| h * sizes.kv_heads / sizes.heads)
        .collect();
    if random.once_in(2) {
        random.shuffle(&mut slots);
    }
    let k = Layout::new(random, sizes.places(keys), &slots, sizes.dim);
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
        q: thin(shared.q),
        k: k.operand.clone(),
        cells: thin(shared.cells),
        dq: shared.dq.map(thin),
        causal,
        scale: numbers.scale,
        gain: shared.gain,
    };
    let sum = numbers.dtype.sum();
    Part {
        job,
        k: k.values(1, |c| numbers.key(random, c)),
        v: k.values(1, |_| numbers.dtype.round(random.unit())),
        dk: k.values(1, |_| sum.round(random.unit())),
        dv: k.values(1, |_| sum.round(random.unit())),
    }
}

/// How q and k are drawn.
struct Numbers {
    dtype: DType,
    scale: f64,
    spread: f64,
    /// Scores of about ±1e4 from small integers, which every type holds and sums exactly: what is
    /// tested is the range of the softmax, not the rounding of the inputs.
    large: bool,
}

impl Numbers {
    fn new(random: &mut Random, dtype: DType, dim: usize) -> Numbers {
        let large = random.once_in(4);
        let usual = 1.0 / (dim as f64).sqrt();
        Numbers {
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
