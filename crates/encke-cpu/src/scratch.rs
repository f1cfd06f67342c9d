//! Scratch memory, kept between calls.
//!
//! A pool hands out two kinds of pieces: a [`Tile`] for the results of a task, held until the wave
//! is stored, and a [`Work`] for what a thread needs while it computes. Their sizes depend on the
//! head dimension alone.
//!
//! The decision here: pieces are reserved exactly and never shrink, so a second call with the same
//! dimension allocates nothing, and what is held can be compared with what was announced.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::real::Real;
use crate::tile::{LANES, Lanes, ROWS};

/// The results of one task: a sum for each channel (two of them for dk and dv), and the softmax.
#[derive(Debug)]
pub(crate) struct Tile<A> {
    pub sums: [Vec<Lanes<A>>; 2],
    pub m: Lanes<A>,
    pub l: Lanes<A>,
}

/// What a thread computes with.
#[derive(Debug)]
pub(crate) struct Work<A> {
    /// Two operands that stay for the whole task, as lanes.
    pub lanes: [Vec<Lanes<A>>; 2],
    /// Two operands that change with each block, as rows.
    pub rows: [Vec<A>; 2],
    /// Scores and weights of a block.
    pub weights: [Vec<Lanes<A>>; 2],
    /// One row.
    pub row: Vec<A>,
}

/// Gives a vector exactly `len` elements.
fn fit<T: Copy>(vector: &mut Vec<T>, len: usize, value: T) {
    vector.reserve_exact(len.saturating_sub(vector.len()));
    vector.resize(len, value);
}

fn held<T>(vectors: &[Vec<T>]) -> usize {
    let elements: usize = vectors.iter().map(Vec::capacity).sum();
    elements * size_of::<T>()
}

impl<A: Real> Tile<A> {
    fn new() -> Tile<A> {
        Tile {
            sums: Default::default(),
            m: [A::NEG_INFINITY; LANES],
            l: [A::ZERO; LANES],
        }
    }

    fn fit(&mut self, dim: usize) {
        for sums in &mut self.sums {
            fit(sums, dim, [A::ZERO; LANES]);
        }
    }

    /// Bytes of a tile.
    pub fn bytes(dim: usize) -> usize {
        size_of::<Tile<A>>() + 2 * dim * size_of::<Lanes<A>>()
    }
}

impl<A: Real> Work<A> {
    fn new() -> Work<A> {
        Work {
            lanes: Default::default(),
            rows: Default::default(),
            weights: Default::default(),
            row: Vec::new(),
        }
    }

    fn fit(&mut self, dim: usize) {
        for side in 0..2 {
            fit(&mut self.lanes[side], dim, [A::ZERO; LANES]);
            fit(&mut self.rows[side], ROWS * dim, A::ZERO);
            fit(&mut self.weights[side], ROWS, [A::ZERO; LANES]);
        }
        fit(&mut self.row, dim, A::ZERO);
    }

    /// Bytes of the memory of one thread.
    pub fn bytes(dim: usize) -> usize {
        let lanes = 2 * (dim + ROWS) * size_of::<Lanes<A>>();
        size_of::<Work<A>>() + lanes + (2 * ROWS + 1) * dim * size_of::<A>()
    }
}

/// Tiles and works nobody uses at the moment.
#[derive(Debug)]
pub(crate) struct Pool<A> {
    tiles: Mutex<Vec<Tile<A>>>,
    works: Mutex<Vec<Work<A>>>,
}

impl<A> Default for Pool<A> {
    fn default() -> Pool<A> {
        Pool {
            tiles: Mutex::default(),
            works: Mutex::default(),
        }
    }
}

/// A panic elsewhere leaves a vector of whole pieces behind, so the lock is good to use.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<A: Real> Pool<A> {
    /// `count` tiles, to be given back.
    pub fn take(&self, count: usize, dim: usize) -> Vec<Tile<A>> {
        let mut tiles = {
            let mut idle = lock(&self.tiles);
            let from = idle.len().saturating_sub(count);
            idle.split_off(from)
        };
        tiles.resize_with(count, Tile::new);
        tiles.iter_mut().for_each(|tile| tile.fit(dim));
        tiles
    }

    /// Keeps tiles for the next call.
    pub fn give_back(&self, mut tiles: Vec<Tile<A>>) {
        lock(&self.tiles).append(&mut tiles);
    }

    /// Lends the memory of one thread.
    pub fn with_work<R>(&self, dim: usize, run: impl FnOnce(&mut Work<A>) -> R) -> R {
        let idle = lock(&self.works).pop();
        let mut work = idle.unwrap_or_else(Work::new);
        work.fit(dim);
        let result = run(&mut work);
        lock(&self.works).push(work);
        result
    }

    /// Bytes held by pieces nobody uses at the moment.
    pub fn bytes(&self) -> usize {
        let tile = |tile: &Tile<A>| size_of::<Tile<A>>() + held(&tile.sums);
        let work = |work: &Work<A>| {
            let row = work.row.capacity() * size_of::<A>();
            let lanes = held(&work.lanes) + held(&work.weights);
            size_of::<Work<A>>() + lanes + held(&work.rows) + row
        };
        let tiles: usize = lock(&self.tiles).iter().map(tile).sum();
        let works: usize = lock(&self.works).iter().map(work).sum();
        tiles + works
    }
}
