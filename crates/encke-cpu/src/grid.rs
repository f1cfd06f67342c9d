//! Division of a job's queries into tiles and blocks of tiles.
//!
//! Query heads that read the same keys form one group, and a block of tiles may span the heads of a
//! group, so that each key is packed once for all of them. Blocks do not span pieces of the mask.
//! The longest blocks come first, so that the last one to finish is short.

use std::ops::Range;

use encke_core::job::{Job, Piece};

use crate::pieces::{forgets, pieces};
use crate::schedule::{batch_segments, head_groups};
use crate::shape::MIN_TILES;

/// How the queries of a job are divided.
#[derive(Debug)]
pub(crate) struct QueryGrid {
    /// Heads that read the same keys.
    pub groups: Vec<Vec<usize>>,
    /// The pieces of the mask.
    pub pieces: Vec<Piece>,
    /// Queries in a tile.
    lanes: usize,
    /// The most tiles in a block.
    max_tiles: usize,
}

/// Queries of one head: a full tile, or the rest at the end of a piece.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tile {
    pub head: usize,
    pub first: usize,
    pub count: usize,
}

/// Consecutive tiles of one piece and one group in one segment.
#[derive(Debug, Clone)]
pub(crate) struct QueryBlock {
    pub batch: usize,
    pub segment: usize,
    pub group: usize,
    pub piece: usize,
    pub tiles: Range<usize>,
}

impl QueryGrid {
    /// Blocks have at most `max_tiles` tiles, and fewer if there would be less than `tasks` blocks.
    pub fn new(job: &Job, lanes: usize, max_tiles: usize, tasks: usize) -> QueryGrid {
        let mut grid = QueryGrid {
            groups: head_groups(job),
            pieces: pieces(job),
            lanes,
            max_tiles,
        };
        let segments = job.batch * job.segments;
        let blocks = |grid: &QueryGrid| -> usize {
            let parts = grid.parts();
            parts
                .map(|(group, piece)| segments * grid.blocks(group, piece).count())
                .sum()
        };
        while grid.max_tiles >= 2 * MIN_TILES && blocks(&grid) < tasks {
            grid.max_tiles /= 2;
        }
        grid
    }

    /// The number of tiles of one head in a piece.
    fn tiles_per_head(&self, piece: usize) -> usize {
        self.pieces[piece].queries.len().div_ceil(self.lanes)
    }

    /// One tile of a group in a piece. Tiles with the same rows follow each other if the queries of
    /// the piece see only keys around them; otherwise the tiles of a head do.
    #[inline]
    pub fn tile(&self, group: usize, piece: usize, tile: usize) -> Tile {
        let (heads, rows) = (&self.groups[group], &self.pieces[piece].queries);
        let (head, row) = match forgets(&self.pieces[piece]) {
            true => (tile % heads.len(), tile / heads.len()),
            false => {
                let tiles = self.tiles_per_head(piece);
                (tile / tiles, tile % tiles)
            }
        };
        let first = rows.start + row * self.lanes;
        Tile {
            head: heads[head],
            first,
            count: self.lanes.min(rows.end - first),
        }
    }

    /// The tiles of a group in a piece, divided into blocks of about equal size.
    pub fn blocks(&self, group: usize, piece: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let tiles = self.groups[group].len() * self.tiles_per_head(piece);
        let step = tiles.div_ceil(tiles.div_ceil(self.max_tiles).max(1)).max(1);
        let firsts = (0..tiles).step_by(step);
        firsts.map(move |first| first..(first + step).min(tiles))
    }

    /// The keys that are visible to some query of a block: from the first to one past the last.
    pub fn visible(&self, group: usize, piece: usize, tiles: Range<usize>) -> Range<usize> {
        let rows = &self.pieces[piece];
        let (mut start, mut end) = (usize::MAX, 0);
        for tile in tiles {
            let Tile { first, count, .. } = self.tile(group, piece, tile);
            let (low, high) = (rows.visible(first), rows.visible(first + count - 1));
            (start, end) = (start.min(low.start), end.max(high.end));
        }
        start..end
    }

    /// Every block of a job. If it has a mask, the longest come first.
    pub fn all_blocks(&self, job: &Job) -> Vec<QueryBlock> {
        let mut blocks = Vec::new();
        for (batch, segment) in batch_segments(job) {
            for (group, piece) in self.parts() {
                blocks.extend(self.blocks(group, piece).map(|tiles| QueryBlock {
                    batch,
                    segment,
                    group,
                    piece,
                    tiles,
                }));
            }
        }
        if job.causal().is_some() {
            // A block attends to about as many keys as its last query.
            let last = |block: &QueryBlock| {
                let tile = self.tile(block.group, block.piece, block.tiles.end - 1);
                tile.first + tile.count
            };
            blocks.sort_by_key(|block| std::cmp::Reverse(last(block)));
        } else if job.mask.is_some() {
            let pairs = |block: &QueryBlock| {
                let tile = self.tile(block.group, block.piece, block.tiles.end - 1);
                let last = tile.first + tile.count - 1;
                block.tiles.len() * self.pieces[block.piece].visible(last).len()
            };
            blocks.sort_by_cached_key(|block| std::cmp::Reverse(pairs(block)));
        }
        blocks
    }

    /// Every (group, piece) of a job.
    pub fn parts(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (groups, pieces) = (self.groups.len(), self.pieces.len());
        (0..groups).flat_map(move |group| (0..pieces).map(move |piece| (group, piece)))
    }
}
