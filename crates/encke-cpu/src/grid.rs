//! The tasks of a job: which heads, tiles and rows each of them has.
//!
//! Query heads that read the same keys are one group, and a block of tiles may span them: keys are
//! packed once for all. The longest tasks come first, so that the last to finish is a short one.

use std::ops::Range;

use encke_core::job::Job;

use crate::shape::FEWEST_TILES;

/// How the queries of a job are cut up.
#[derive(Debug)]
pub(crate) struct Grid {
    /// Heads that read the same keys, told apart by the address of those.
    pub groups: Vec<Vec<usize>>,
    /// Queries in a tile.
    lanes: usize,
    queries: usize,
    tiles_per_head: usize,
    /// The most tiles of a block.
    most: usize,
}

/// Queries of one head that fill a tile, or what is left of them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tile {
    pub head: usize,
    pub first: usize,
    pub count: usize,
}

/// Some tiles of one group in one segment.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    pub batch: usize,
    pub segment: usize,
    pub group: usize,
    pub tiles: Range<usize>,
}

impl Grid {
    /// Blocks have at most `most` tiles, and fewer where there would not be `tasks` of them.
    pub fn new(job: &Job, lanes: usize, most: usize, tasks: usize) -> Grid {
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for head in 0..job.heads {
            let same = |group: &&mut Vec<usize>| job.k.heads[group[0]] == job.k.heads[head];
            match groups.iter_mut().find(same) {
                Some(group) => group.push(head),
                None => groups.push(vec![head]),
            }
        }
        let mut grid = Grid {
            groups,
            lanes,
            queries: job.queries,
            tiles_per_head: job.queries.div_ceil(lanes),
            most,
        };
        let places = job.batch * job.segments;
        let blocks = |grid: &Grid| -> usize {
            let groups = 0..grid.groups.len();
            groups
                .map(|group| places * grid.blocks(group).count())
                .sum()
        };
        while grid.most >= 2 * FEWEST_TILES && blocks(&grid) < tasks {
            grid.most /= 2;
        }
        grid
    }

    /// Tiles of a group.
    pub fn tiles(&self, group: usize) -> usize {
        self.groups[group].len() * self.tiles_per_head
    }

    /// A tile of a group.
    #[inline]
    pub fn tile(&self, group: usize, tile: usize) -> Tile {
        let first = tile % self.tiles_per_head * self.lanes;
        Tile {
            head: self.groups[group][tile / self.tiles_per_head],
            first,
            count: self.lanes.min(self.queries - first),
        }
    }

    /// The tiles of a group in pieces of about one size that are computed together.
    pub fn blocks(&self, group: usize) -> impl Iterator<Item = Range<usize>> {
        let tiles = self.tiles(group);
        let step = tiles.div_ceil(tiles.div_ceil(self.most).max(1)).max(1);
        let firsts = (0..tiles).step_by(step);
        firsts.map(move |first| first..(first + step).min(tiles))
    }

    /// Every block of a job, the longest first where some are longer than others.
    pub fn all_blocks(&self, job: &Job) -> Vec<Block> {
        let mut blocks: Vec<Block> = self
            .pieces(job)
            .flat_map(|(batch, segment, group)| {
                self.blocks(group).map(move |tiles| Block {
                    batch,
                    segment,
                    group,
                    tiles,
                })
            })
            .collect();
        if job.causal.is_some() {
            // A block sees about as many keys as its last query.
            let last = |block: &Block| {
                let tile = self.tile(block.group, block.tiles.end - 1);
                tile.first + tile.count
            };
            blocks.sort_by_key(|block| std::cmp::Reverse(last(block)));
        }
        blocks
    }

    /// Every (batch, segment, group) of a job.
    pub fn pieces(&self, job: &Job) -> impl Iterator<Item = (usize, usize, usize)> {
        let (segments, groups) = (job.segments, self.groups.len());
        let all = (0..job.batch).flat_map(move |b| (0..segments).map(move |s| (b, s)));
        all.flat_map(move |(b, s)| (0..groups).map(move |g| (b, s, g)))
    }
}
