//! The jobs that are timed: shapes that rings have, each at every place where it fits.
//!
//! The decision here: a job is never timed on the rows it has just had. Rings go from rank to rank and
//! from parcel to parcel, so their rows come from further away than those of a job that is
//! repeated; and rows of a dilated branch lie apart.

use encke_core::job::{Causal, Job, Operand};

use super::Sizes;
use crate::cost::is_few;

/// The most places of one shape; enough for a cache to forget the first.
const PLACES: usize = 16;
/// The dilation rate of what is read with gaps.
pub(super) const DILATION: usize = 4;

/// A shape to be timed.
#[derive(Debug)]
pub(super) struct Probe {
    /// The job at each of its places.
    pub jobs: Vec<Job>,
    /// Whether it takes rows of the whole sequence; else those of one rank, and ranks can have it
    /// side by side.
    pub whole: bool,
}

impl Probe {
    /// What it is about, apart from the place.
    pub fn job(&self) -> &Job {
        &self.jobs[0]
    }

    /// Whether the time it takes alone is all cores' time.
    pub fn fills_cores(&self) -> bool {
        self.whole && !is_few(self.job())
    }
}

/// One shape: so many segments of so many rows, of so many heads, one token in so many.
#[derive(Debug, Clone, Copy)]
struct Figure {
    segments: usize,
    rows: usize,
    heads: usize,
    dilation: usize,
}

/// All shapes, of a sequence and of ranks with `part` rows of it.
pub(super) fn probes(sizes: Sizes, part: usize) -> Vec<Probe> {
    let figure = |segments: usize, rows: usize, heads: usize, dilation: usize| Figure {
        segments: segments.max(1),
        rows: rows.max(1),
        heads: heads.clamp(1, sizes.heads),
        dilation,
    };
    let (n, all) = (sizes.rows, sizes.heads);
    let whole = [figure(1, n, all, 1), figure(1, n / DILATION, 1, DILATION)];
    let of_rank = [
        figure(1, part, all, 1),
        figure(1, part / 4, all, 1),
        figure(2, part / 2, all, 1),
        figure(part / 16, part.min(16), all, 1),
        figure(1, part / DILATION, 1, DILATION),
        figure(1, part / DILATION, all, DILATION),
        figure(1, part / 2, 2, 2),
    ];
    let whole = whole.map(|figure| (figure, n, true));
    let of_rank = of_rank.map(|figure| (figure, part, false));
    let both = |(figure, rows, whole): (Figure, usize, bool)| {
        [false, true].map(|causal| Probe {
            jobs: placed(sizes, figure, rows, causal),
            whole,
        })
    };
    whole.into_iter().chain(of_rank).flat_map(both).collect()
}

/// A shape at every place among so many rows.
fn placed(sizes: Sizes, figure: Figure, rows: usize, causal: bool) -> Vec<Job> {
    let tokens = figure.segments * figure.rows;
    let dilation = figure.dilation.min(rows / tokens).max(1);
    let figure = Figure { dilation, ..figure };
    let blocks = (rows / (tokens * dilation)).max(1);
    let tokens = (0..blocks).flat_map(|block| {
        let first = block * tokens * dilation;
        first..first + dilation
    });
    let heads = || (0..=sizes.heads - figure.heads).step_by(figure.heads);
    let places = tokens.flat_map(|token| heads().map(move |head| (token, head)));
    places
        .take(PLACES)
        .map(|place| job(sizes, figure, place, causal))
        .collect()
}

fn job(sizes: Sizes, figure: Figure, (token, head): (usize, usize), causal: bool) -> Job {
    let Figure {
        segments,
        rows,
        heads,
        dilation,
    } = figure;
    // Rows lie as a rank's do: heads side by side, token after token.
    let place = |unit: usize| {
        let row = sizes.heads * unit;
        Operand {
            offset: token * row,
            batch: 0,
            segment: rows * dilation * row,
            row: dilation * row,
            heads: (head..head + heads).map(|head| head * unit).collect(),
        }
    };
    let mask = Causal {
        query: 0,
        query_step: 1,
        key: 0,
        key_step: 1,
    };
    Job {
        batch: 1,
        segments,
        queries: rows,
        keys: rows,
        heads,
        dim: sizes.dim,
        q: place(sizes.dim),
        k: place(sizes.dim),
        cells: place(1),
        dq: None,
        causal: causal.then_some(mask),
        scale: 1.0 / (sizes.dim as f64).sqrt(),
        gain: 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::probes;
    use crate::profile::Sizes;
    use encke_core::DType;

    #[test]
    fn every_place_lies_inside_its_rows() {
        for (rows, heads) in [(8, 1), (9, 3), (64, 2), (1000, 5), (4096, 4)] {
            let sizes = Sizes {
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
