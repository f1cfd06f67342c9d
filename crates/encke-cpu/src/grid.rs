//! Division of a job's queries into tiles and blocks of tiles.
//!
//! Query heads that read the same keys form one group, and a block of tiles may span the heads of a
//! group, so that each key is packed once for all of them. The longest blocks come first, so that
//! the last one to finish is short.

use std::ops::Range;

use encke_core::job::Job;

use crate::schedule::{batch_segments, head_groups};
use crate::shape::MIN_TILES;

/// How the queries of a job are divided.
#[derive(Debug)]
pub(crate) struct QueryGrid {
    /// Heads that read the same keys.
    pub groups: Vec<Vec<usize>>,
    /// Queries in a tile.
    lanes: usize,
    queries: usize,
    tiles_per_head: usize,
    /// The most tiles in a block.
    max_tiles: usize,
}

/// Queries of one head: a full tile, or the rest at the end of the head.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tile {
    pub head: usize,
    pub first: usize,
    pub count: usize,
}

/// Consecutive tiles of one group in one segment.
#[derive(Debug, Clone)]
pub(crate) struct QueryBlock {
    pub batch: usize,
    pub segment: usize,
    pub group: usize,
    pub tiles: Range<usize>,
}

impl QueryGrid {
    /// Blocks have at most `max_tiles` tiles, and fewer if there would be less than `tasks` blocks.
    pub fn new(job: &Job, lanes: usize, max_tiles: usize, tasks: usize) -> QueryGrid {
        let mut grid = QueryGrid {
            groups: head_groups(job),
            lanes,
            queries: job.queries,
            tiles_per_head: job.queries.div_ceil(lanes),
            max_tiles,
        };
        let segments = job.batch * job.segments;
        let blocks = |grid: &QueryGrid| -> usize {
            let groups = 0..grid.groups.len();
            groups
                .map(|group| segments * grid.blocks(group).count())
                .sum()
        };
        while grid.max_tiles >= 2 * MIN_TILES && blocks(&grid) < tasks {
            grid.max_tiles /= 2;
        }
        grid
    }

    /// The number of tiles of a group.
    pub fn tiles(&self, group: usize) -> usize {
        self.groups[group].len() * self.tiles_per_head
    }

    /// One tile of a group.
    #[inline]
    pub fn tile(&self, group: usize, tile: usize) -> Tile {
        let first = tile % self.tiles_per_head * self.lanes;
        Tile {
            head: self.groups[group][tile / self.tiles_per_head],
            first,
            count: self.lanes.min(self.queries - first),
        }
    }

    /// The tiles of a group, divided into blocks of about equal size.
    pub fn blocks(&self, group: usize) -> impl Iterator<Item = Range<usize>> {
        let tiles = self.tiles(group);
        let step = tiles.div_ceil(tiles.div_ceil(self.max_tiles).max(1)).max(1);
        let firsts = (0..tiles).step_by(step);
        firsts.map(move |first| first..(first + step).min(tiles))
    }

    /// Every block of a job. In a causal job the longest come first.
    pub fn all_blocks(&self, job: &Job) -> Vec<QueryBlock> {
        let mut blocks: Vec<QueryBlock> = self
            .group_indices(job)
            .flat_map(|(batch, segment, group)| {
                self.blocks(group).map(move |tiles| QueryBlock {
                    batch,
                    segment,
                    group,
                    tiles,
                })
            })
            .collect();
        if job.mask.is_some() {
            // A block attends to about as many keys as its last query.
            let last = |block: &QueryBlock| {
                let tile = self.tile(block.group, block.tiles.end - 1);
                tile.first + tile.count
            };
            blocks.sort_by_key(|block| std::cmp::Reverse(last(block)));
        }
        blocks
    }

    /// Every (batch, segment, group) of a job.
    pub fn group_indices(&self, job: &Job) -> impl Iterator<Item = (usize, usize, usize)> {
        let groups = self.groups.len();
        batch_segments(job).flat_map(move |(b, s)| (0..groups).map(move |g| (b, s, g)))
    }
}
