//! The jobs that are timed: shapes that occur in rings, each at several positions in its rows.
//!
//! The decision here: a job is never timed twice in a row on the same rows. Consecutive jobs of a
//! ring use rows of different ranks and messages, which are not in the caches that a repeated job
//! would find them in; and rows of a dilated branch are strided.

use encke_core::job::{Band, Job, Mask, Operand};

use crate::job_costs::has_few_instances;
use crate::probe_sizes::ProbeSizes;

/// The most positions of one shape: enough to evict the first from the cache.
const MAX_POSITIONS: usize = 16;
/// The dilation of strided probes.
pub(super) const DILATION: usize = 4;

/// A timed shape.
#[derive(Debug)]
pub(super) struct Probe {
    /// The job at each of its positions.
    pub jobs: Vec<Job>,
    /// Whether it uses rows of the whole sequence; otherwise those of one rank, and ranks can run
    /// it concurrently.
    pub whole: bool,
}

impl Probe {
    /// The job at its first position.
    pub fn job(&self) -> &Job {
        &self.jobs[0]
    }

    /// Whether it keeps all cores busy when it runs alone.
    pub fn fills_cores(&self) -> bool {
        self.whole && !has_few_instances(self.job())
    }
}

/// A shape: segments, rows of each, heads, and the dilation of the rows.
#[derive(Debug, Clone, Copy)]
struct ProbeShape {
    segments: usize,
    rows: usize,
    heads: usize,
    dilation: usize,
}

/// All probes, for a whole sequence and for ranks with `part` rows of it.
pub(super) fn probes(sizes: ProbeSizes, part: usize) -> Vec<Probe> {
    let shape = |segments: usize, rows: usize, heads: usize, dilation: usize| ProbeShape {
        segments: segments.max(1),
        rows: rows.max(1),
        heads: heads.clamp(1, sizes.heads),
        dilation,
    };
    let (n, all) = (sizes.rows, sizes.heads);
    let whole = [shape(1, n, all, 1), shape(1, n / DILATION, 1, DILATION)];
    let of_rank = [
        shape(1, part, all, 1),
        shape(1, part / 4, all, 1),
        shape(2, part / 2, all, 1),
        shape(part / 16, part.min(16), all, 1),
        shape(1, part / DILATION, 1, DILATION),
        shape(1, part / DILATION, all, DILATION),
        shape(1, part / 2, 2, 2),
    ];
    let whole = whole.map(|shape| (shape, n, true));
    let of_rank = of_rank.map(|shape| (shape, part, false));
    let both = |(shape, rows, whole): (ProbeShape, usize, bool)| {
        [false, true].map(|causal| Probe {
            jobs: jobs(sizes, shape, rows, causal),
            whole,
        })
    };
    whole.into_iter().chain(of_rank).flat_map(both).collect()
}

/// The jobs of a shape at its positions among `rows` rows.
fn jobs(sizes: ProbeSizes, shape: ProbeShape, rows: usize, causal: bool) -> Vec<Job> {
    let tokens = shape.segments * shape.rows;
    let dilation = shape.dilation.min(rows / tokens).max(1);
    let shape = ProbeShape { dilation, ..shape };
    let blocks = (rows / (tokens * dilation)).max(1);
    let tokens = (0..blocks).flat_map(|block| {
        let first = block * tokens * dilation;
        first..first + dilation
    });
    let heads = || (0..=sizes.heads - shape.heads).step_by(shape.heads);
    let positions = tokens.flat_map(|token| heads().map(move |head| (token, head)));
    positions
        .take(MAX_POSITIONS)
        .map(|position| job(sizes, shape, position, causal))
        .collect()
}

fn job(sizes: ProbeSizes, shape: ProbeShape, (token, head): (usize, usize), causal: bool) -> Job {
    let ProbeShape {
        segments,
        rows,
        heads,
        dilation,
    } = shape;
    // The layout of a rank's buffers: token after token, and of each the heads.
    let operand = |unit: usize| {
        let row = sizes.heads * unit;
        Operand {
            offset: token * row,
            batch: 0,
            segment: rows * dilation * row,
            row: dilation * row,
            heads: (head..head + heads).map(|head| head * unit).collect(),
        }
    };
    let mask = Band::causal((0, 1), (0, 1));
    Job {
        batch: 1,
        segments,
        queries: rows,
        keys: rows,
        heads,
        dim: sizes.dim,
        value_dim: sizes.dim,
        q: operand(sizes.dim),
        k: operand(sizes.dim),
        cells: operand(1),
        delta: None,
        dq: None,
        mask: causal.then_some(Mask::Band(mask)),
        transform: None,
        dropout: None,
        scale: 1.0 / (sizes.dim as f64).sqrt(),
        gain: 1.0,
        tiles: None,
    }
}

#[cfg(test)]
mod tests {
    use super::probes;
    use crate::probe_sizes::ProbeSizes;
    use encke_core::DType;

    #[test]
    fn every_job_stays_inside_its_rows() {
        for (rows, heads) in [(8, 1), (9, 3), (64, 2), (1000, 5), (4096, 4)] {
            let sizes = ProbeSizes {
                rows,
                heads,
                dim: 3,
                dtype: DType::F32,
            };
            let part = rows / 4;
            for probe in probes(sizes, part) {
                let rows = if probe.whole { rows } else { part };
                for job in &probe.jobs {
                    let (segment, row) = (job.segments - 1, job.queries - 1);
                    let head = job.heads - 1;
                    let last = job.q.at(0, segment, row, head) + job.dim;
                    assert!(last <= rows * heads * 3, "{job:?} beyond {rows} rows");
                    assert!(job.cells.at(0, segment, row, head) < rows * heads);
                }
            }
        }
    }
}
