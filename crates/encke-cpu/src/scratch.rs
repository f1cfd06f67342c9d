//! Scratch memory of the kernels, kept between calls.
//!
//! A task of the vector kernels borrows one [`Scratch`] and divides it into panels. Its size
//! depends on the widths of keys and values and on dropout, so a second call of a job like it
//! allocates nothing, and the bytes held can be compared with the bytes that the kernel announced.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::real::Real;

/// Panels start at multiples of this many bytes, so that no vector straddles two cache lines.
const ALIGNMENT: usize = 64;

/// Scratch memory of one task of a vector kernel.
#[derive(Debug, Default)]
pub struct Scratch<A> {
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

    /// Divides the memory into panels of these sizes. Their contents are left over from earlier
    /// uses.
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

/// Memory whose size a [`ScratchPool`] can report.
pub trait HeldBytes {
    /// Allocated bytes.
    fn held_bytes(&self) -> usize;
}

impl<A> HeldBytes for Scratch<A> {
    fn held_bytes(&self) -> usize {
        self.memory.capacity() * size_of::<A>()
    }
}

/// Scratch memory that no task uses at the moment.
#[derive(Debug)]
pub struct ScratchPool<S> {
    idle: Mutex<Vec<S>>,
}

impl<S> Default for ScratchPool<S> {
    fn default() -> ScratchPool<S> {
        ScratchPool {
            idle: Mutex::default(),
        }
    }
}

impl<S: Default + HeldBytes> ScratchPool<S> {
    /// Calls `run` with scratch memory, and keeps that memory afterwards.
    pub fn with<R>(&self, run: impl FnOnce(&mut S) -> R) -> R {
        let idle = self.lock().pop();
        let mut scratch = idle.unwrap_or_default();
        let result = run(&mut scratch);
        self.lock().push(scratch);
        result
    }

    /// Bytes of the idle scratch memory.
    pub fn bytes(&self) -> usize {
        self.lock().iter().map(S::held_bytes).sum()
    }

    /// Frees the idle scratch memory.
    pub fn clear(&self) {
        self.lock().clear();
    }

    /// A thread that panicked left a valid vector behind, so a poisoned lock is safe to use.
    fn lock(&self) -> MutexGuard<'_, Vec<S>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
