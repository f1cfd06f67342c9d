//! Jobs in steps of tiles, in the order that does not depend on the ring (`bits.rs`).
//!
//! The decision here: a step is a job. Pairs of tiles on one diagonal have neither a query nor a
//! key in common and see each other through the same mask, so they are the segments of one strided
//! job, and any kernel computes them, on as many threads as it has. Kernels know no order.

use std::iter::successors;
use std::ops::Range;

use serde::Serialize;

use crate::job::{Band, Job, Mask, Operand};

/// Which tiles of keys a query of a job meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TilePart {
    /// All.
    All,
    /// Its own and those before.
    UpToOwn,
    /// Those after its own.
    AfterOwn,
}

/// Where the rows of a job are on the grid of their segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct JobTiles {
    /// Rows of a tile.
    pub tile: usize,
    /// Rows of the segment before the first query.
    pub query: usize,
    /// Rows of the segment before the first key.
    pub key: usize,
    /// Which tiles of keys a query meets.
    pub part: TilePart,
}

impl JobTiles {
    /// The keys among `visible` that query row `i` meets.
    #[inline]
    pub fn visible(&self, i: usize, visible: Range<usize>) -> Range<usize> {
        let end = ((self.query + i) / self.tile + 1) * self.tile;
        let own_end = end.saturating_sub(self.key);
        let Range { start, end } = visible;
        match self.part {
            TilePart::All => start..end,
            TilePart::UpToOwn => start..end.min(own_end).max(start),
            TilePart::AfterOwn => start.max(own_end).min(end)..end,
        }
    }
}

/// The part of tile number `tile` that is among `count` rows, `before` rows after the grid's start.
fn tile_rows(tile: usize, size: usize, before: usize, count: usize) -> Range<usize> {
    let start = (tile * size).saturating_sub(before);
    start..((tile + 1) * size - before).min(count)
}

impl Job {
    /// The steps of a job on a grid, in order; of another job, the job itself.
    pub fn tile_steps(&self) -> Box<dyn Iterator<Item = Job> + '_> {
        let Some(tiles) = self.tiles else {
            return Box::new(std::iter::once(self.clone()));
        };
        let numbers = |before: usize, count: usize| {
            (before / tiles.tile) as isize..(before + count).div_ceil(tiles.tile) as isize
        };
        let queries = numbers(tiles.query, self.queries);
        let keys = numbers(tiles.key, self.keys);
        let diagonals = match tiles.part {
            TilePart::All => queries.start - keys.end + 1..queries.end - keys.start,
            TilePart::UpToOwn => (queries.start - keys.end + 1).max(0)..queries.end - keys.start,
            TilePart::AfterOwn => queries.start - keys.end + 1..(queries.end - keys.start).min(0),
        };
        let each = diagonals.flat_map(move |diagonal| {
            let start = queries.start.max(keys.start + diagonal);
            let end = queries.end.min(keys.end + diagonal);
            self.diagonal(tiles, diagonal, start..end)
        });
        Box::new(each)
    }

    /// The steps of a job on a grid, each with whether it starts the softmax of its queries, if the
    /// job `starts` that of its own.
    pub fn forward_steps(&self, starts: bool) -> impl Iterator<Item = (Job, bool)> + '_ {
        // The first diagonal has every query once.
        let mut rows = 0;
        self.tile_steps().map(move |step| {
            let first = rows < self.queries;
            let tiles = if self.segments == 1 { step.segments } else { 1 };
            rows += tiles * step.queries;
            (step, starts && first)
        })
    }

    /// The steps of one diagonal: the query tiles `numbers`, each with the key tile `diagonal`
    /// before it.
    fn diagonal(&self, of: JobTiles, diagonal: isize, numbers: Range<isize>) -> Vec<Job> {
        let pair = |number: isize| {
            let query = tile_rows(number as usize, of.tile, of.query, self.queries);
            let key = (number - diagonal) as usize;
            (query, tile_rows(key, of.tile, of.key, self.keys))
        };
        let whole = |(queries, keys): &(Range<usize>, Range<usize>)| {
            queries.len() == of.tile && keys.len() == of.tile
        };
        let mut steps = Vec::new();
        let mut number = numbers.start;
        while number < numbers.end {
            let first = pair(number);
            // All tiles between the first and the last one are whole.
            let mut count = 1;
            if whole(&first) {
                let rest = numbers.end - number;
                count = if whole(&pair(numbers.end - 1)) {
                    rest
                } else {
                    (rest - 1).max(1)
                };
            }
            self.add_steps(of, &first, count as usize, &mut steps);
            number += count;
        }
        steps
    }

    /// The steps of `count` pairs of tiles, the first of which is given.
    fn add_steps(
        &self,
        of: JobTiles,
        (queries, keys): &(Range<usize>, Range<usize>),
        count: usize,
        to: &mut Vec<Job>,
    ) {
        let one = self.of_tile_pair(queries.clone(), keys.clone());
        let Some(one) = one else {
            return;
        };
        if count > 1 && self.segments == 1 {
            return to.push(one.repeated(of.tile, count));
        }
        let next = |job: &Job| Some(job.moved(of.tile));
        to.extend(successors(Some(one), next).take(count));
    }

    /// The job of some queries and keys; None if no query sees a key.
    fn of_tile_pair(&self, queries: Range<usize>, keys: Range<usize>) -> Option<Job> {
        let count = keys.len();
        let mut job = Job {
            tiles: None,
            ..self.of_queries(queries)
        };
        job.k.offset += keys.start * job.k.row;
        job.keys = count;
        match &mut job.mask {
            None => {}
            Some(Mask::Band(band)) => band.key += keys.start * band.key_step,
            Some(Mask::Documents(_)) => unreachable!("a job on a grid has one document"),
        }
        if job.pairs() == 0 {
            return None;
        }
        let transform = job.transform.as_ref();
        let slopes = transform.is_some_and(|transform| transform.slopes.is_some());
        // A step is the same job on every ring: it has a mask only if it needs one.
        if !slopes && job.dropout.is_none() && !job.hides() {
            job.mask = None;
        }
        Some(job)
    }

    /// The same on rows `rows` further on, queries and keys alike.
    fn moved(&self, rows: usize) -> Job {
        let by = |operand: &Operand| Operand {
            offset: operand.offset + rows * operand.row,
            ..operand.clone()
        };
        let mask = self.mask.as_ref().map(|mask| match mask {
            Mask::Band(band) => Mask::Band(Band {
                query: band.query + rows * band.query_step,
                key: band.key + rows * band.key_step,
                ..*band
            }),
            Mask::Documents(_) => mask.clone(),
        });
        Job {
            q: by(&self.q),
            k: by(&self.k),
            cells: by(&self.cells),
            delta: self.delta.as_ref().map(by),
            dq: self.dq.as_ref().map(by),
            mask,
            ..self.clone()
        }
    }

    /// This job of one segment `count` times, each `rows` rows further on.
    fn repeated(self, rows: usize, count: usize) -> Job {
        let segments = |operand: Operand| Operand {
            segment: rows * operand.row,
            ..operand
        };
        let dropout = self.dropout.map(|mut dropout| {
            if let Some(Mask::Band(band)) = &self.mask {
                dropout.segment_step = rows * band.key_step;
            }
            dropout
        });
        Job {
            segments: count,
            q: segments(self.q),
            k: segments(self.k),
            cells: segments(self.cells),
            delta: self.delta.map(segments),
            dq: self.dq.map(segments),
            dropout,
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::conformance::Random;
    use crate::job::Window;

    const TILE: usize = 4;

    /// A job of consecutive rows of a segment.
    fn job(segments: usize, queries: Range<usize>, keys: Range<usize>, window: Window) -> Job {
        let rows = |first: usize, row: usize| Operand {
            offset: first * row,
            batch: 0,
            segment: 1000 * row,
            row,
            heads: [0].into(),
        };
        Job {
            batch: 1,
            segments,
            queries: queries.len(),
            keys: keys.len(),
            heads: 1,
            dim: 1,
            value_dim: 1,
            q: rows(queries.start, 1),
            k: rows(keys.start, 1),
            cells: rows(queries.start, 1),
            delta: None,
            dq: None,
            mask: Some(Mask::Band(Band {
                query: queries.start,
                query_step: 1,
                key: keys.start,
                key_step: 1,
                window,
            })),
            transform: None,
            dropout: None,
            scale: 1.0,
            gain: 1.0,
            tiles: Some(JobTiles {
                tile: TILE,
                query: queries.start,
                key: keys.start,
                part: TilePart::All,
            }),
        }
    }

    /// The key tiles that each query meets, in order, and the query tiles that each key meets.
    fn meetings(steps: &[Job]) -> [BTreeMap<usize, Vec<usize>>; 2] {
        let mut met = [BTreeMap::new(), BTreeMap::new()];
        for step in steps {
            for segment in 0..step.segments {
                for i in 0..step.queries {
                    for j in step.visible(i) {
                        let query = step.q.at(0, segment, i, 0);
                        let key = step.k.at(0, segment, j, 0);
                        let own = [query, key];
                        for (side, met) in met.iter_mut().enumerate() {
                            let other = own[1 - side] % 1000 / TILE;
                            let list: &mut Vec<usize> = met.entry(own[side]).or_default();
                            if list.last() != Some(&other) {
                                list.push(other);
                            }
                        }
                    }
                }
            }
        }
        met
    }

    /// The order of the specification for tile `own` of `count`, of the tiles in `seen`.
    fn lawful(own: usize, count: usize, descending: bool, seen: &[usize]) -> Vec<usize> {
        let order: Vec<usize> = match descending {
            true => (0..=own).rev().chain((own + 1..count).rev()).collect(),
            false => (own..count).chain(0..own).collect(),
        };
        order
            .into_iter()
            .filter(|tile| seen.contains(tile))
            .collect()
    }

    #[test]
    fn rings_of_any_size_meet_tiles_in_the_order_of_the_specification() {
        for seed in 0..400 {
            let mut random = Random::new(seed);
            let rows = 1 + random.below(60);
            let mut limit = || (!random.once_in(3)).then(|| random.below(30));
            let window = Window {
                left: limit(),
                right: limit(),
            };
            let segments = 1 + random.below(2);
            let count = rows.div_ceil(TILE);
            let mut cuts: Vec<usize> = (1..count).filter(|_| random.once_in(3)).collect();
            cuts.splice(0..0, [0]);
            cuts.push(count);
            let shards: Vec<Range<usize>> = cuts
                .windows(2)
                .map(|cut| cut[0] * TILE..(cut[1] * TILE).min(rows))
                .collect();
            let ranks = shards.len();
            let mut steps = Vec::new();
            for distance in 0..=ranks {
                for (rank, queries) in shards.iter().enumerate() {
                    let owner = (rank + 2 * ranks - distance) % ranks;
                    let mut whole = job(segments, queries.clone(), shards[owner].clone(), window);
                    let tiles = whole.tiles.as_mut().unwrap();
                    if owner == rank {
                        tiles.part = match distance {
                            0 => TilePart::UpToOwn,
                            _ => TilePart::AfterOwn,
                        };
                    }
                    let own: Vec<Job> = whole.tile_steps().collect();
                    let pairs: u128 = own.iter().map(Job::pairs).sum();
                    let seen: usize = (0..whole.queries).map(|i| whole.visible(i).len()).sum();
                    assert_eq!(pairs, (seen * segments) as u128, "seed {seed}");
                    assert_eq!(whole.pairs(), pairs, "seed {seed}");
                    steps.extend(own);
                }
            }
            for (side, met) in meetings(&steps).into_iter().enumerate() {
                for (row, order) in met {
                    let mut seen = order.clone();
                    seen.sort_unstable();
                    let lawful = lawful(row % 1000 / TILE, count, side == 0, &seen);
                    assert_eq!(order, lawful, "seed {seed}: row {row} of side {side}");
                }
            }
        }
    }
}
