//! Scratch memory, kept between calls.
//!
//! Each task borrows one [`Scratch`]: a single piece of memory, cut into panels as the task needs
//! them. Its size depends on the head dimension alone, so a second call with the same dimension
//! allocates nothing, and what is held can be compared with what was announced.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::real::Real;

/// Panels begin at multiples of this many bytes, so that no vector straddles two cache lines.
const ALIGNMENT: usize = 64;

/// Memory of one task.
#[derive(Debug, Default)]
pub(crate) struct Scratch<A> {
    memory: Vec<A>,
}

impl<A: Real> Scratch<A> {
    /// Elements that panels of these sizes take, alignment included.
    pub fn elements(panels: &[usize]) -> usize {
        let line = ALIGNMENT / size_of::<A>();
        panels
            .iter()
            .map(|len| len.next_multiple_of(line))
            .sum::<usize>()
            + line
    }

    /// Cuts the memory into panels of these sizes. Their contents are left over from before.
    pub fn panels<const N: usize>(&mut self, sizes: [usize; N]) -> [&mut [A]; N] {
        let needed = Scratch::<A>::elements(&sizes);
        if self.memory.len() < needed {
            self.memory.clear();
            self.memory.reserve_exact(needed);
            self.memory.resize(needed, A::ZERO);
        }
        let line = ALIGNMENT / size_of::<A>();
        let skip = self.memory.as_ptr().align_offset(ALIGNMENT);
        // A pointer that cannot be aligned only costs speed.
        let skip = if skip < line { skip } else { 0 };
        let mut rest = &mut self.memory[skip..];
        sizes.map(|len| {
            let (panel, after) = std::mem::take(&mut rest).split_at_mut(len.next_multiple_of(line));
            rest = after;
            &mut panel[..len]
        })
    }
}

/// Scratch memory nobody uses at the moment.
#[derive(Debug)]
pub(crate) struct Pool<A> {
    idle: Mutex<Vec<Scratch<A>>>,
}

impl<A> Default for Pool<A> {
    fn default() -> Pool<A> {
        Pool {
            idle: Mutex::default(),
        }
    }
}

/// A panic elsewhere leaves a vector of whole pieces behind, so the lock is good to use.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<A: Real> Pool<A> {
    /// Lends one task's memory.
    pub fn with<R>(&self, run: impl FnOnce(&mut Scratch<A>) -> R) -> R {
        let idle = lock(&self.idle).pop();
        let mut scratch = idle.unwrap_or_default();
        let result = run(&mut scratch);
        lock(&self.idle).push(scratch);
        result
    }

    /// Bytes held by pieces nobody uses at the moment.
    pub fn bytes(&self) -> usize {
        let held = |scratch: &Scratch<A>| scratch.memory.capacity() * size_of::<A>();
        lock(&self.idle).iter().map(held).sum()
    }

    /// Gives those back.
    pub fn clear(&self) {
        lock(&self.idle).clear();
    }
}
