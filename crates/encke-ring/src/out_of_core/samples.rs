//! The rows of an output that somebody asked for, of which the rest is not kept.
//!
//! They are taken from rows that come to the host, or picked on the device that holds the rows.

use std::collections::{BTreeMap, BTreeSet};

use encke_core::Data;
use encke_core::job::{Block, Operand};
use encke_core::kernel::{Kernel, Result as KernelResult};
use encke_core::plan::program::Role;

use super::error::StreamError;
use super::row_io::BufferSlot;
use super::source::{RowRange, Sink};

/// A row of the output.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Sampled {
    /// The output.
    pub out: Vec<f64>,
    /// Its lse.
    pub lse: f64,
}

/// Rows that were picked, still on the device.
#[derive(Debug)]
pub struct Gathered<B> {
    role: Role,
    places: Vec<(usize, usize)>,
    numbers: B,
}

/// Keeps the rows that somebody asked for: (token, head) of the first batch entry.
#[derive(Debug, Default)]
pub struct Samples {
    wanted: BTreeSet<(usize, usize)>,
    rows: BTreeMap<(usize, usize), Sampled>,
}

impl Samples {
    /// Keeps these.
    pub fn new(wanted: impl IntoIterator<Item = (usize, usize)>) -> Samples {
        Samples {
            wanted: wanted.into_iter().collect(),
            rows: BTreeMap::new(),
        }
    }

    /// How many are wanted.
    pub fn wanted(&self) -> usize {
        self.wanted.len()
    }

    /// Those of a range of the first batch entry, each with the number of its row there.
    fn within(&self, range: &RowRange<'_>) -> Vec<((usize, usize), usize)> {
        let RowRange { tokens, heads, .. } = *range;
        if range.batch != 0 || tokens.count == 0 {
            return Vec::new();
        }
        let range = self.wanted.range((tokens.first, 0)..(tokens.end(), 0));
        let row = |&(token, head): &(usize, usize)| {
            let past = token - tokens.first;
            let index = heads.binary_search(&head).ok()?;
            let met = past.is_multiple_of(tokens.stride);
            met.then(|| ((token, head), past / tokens.stride * heads.len() + index))
        };
        range.filter_map(row).collect()
    }

    /// Copies those of a range of out or lse out of a buffer, on the device.
    pub fn gather<K: Kernel>(
        &self,
        kernel: &K,
        from: &BufferSlot<&K::Buffer>,
        range: &RowRange<'_>,
        width: usize,
    ) -> KernelResult<Option<Gathered<K::Buffer>>> {
        let wanted = self.within(range);
        if wanted.is_empty() || !matches!(range.role, Role::Out | Role::Lse) {
            return Ok(None);
        }
        // An address for each row is what the table of an operand's heads is.
        let rows = |offset: usize, heads: Vec<usize>| Operand {
            offset,
            batch: 0,
            segment: 0,
            row: 0,
            heads: heads.into(),
        };
        let block = Block {
            batch: 1,
            segments: 1,
            rows: 1,
            heads: wanted.len(),
            width,
            from: rows(from.at, wanted.iter().map(|(_, row)| row * width).collect()),
            to: rows(0, (0..wanted.len()).map(|row| row * width).collect()),
        };
        let mut numbers = kernel.allocate(from.dtype, wanted.len() * width)?;
        kernel.copy(&block, false, kernel.input(from.buffer), &mut numbers)?;
        Ok(Some(Gathered {
            role: range.role,
            places: wanted.into_iter().map(|(place, _)| place).collect(),
            numbers,
        }))
    }

    /// Brings gathered rows to the host and keeps them.
    pub fn accept<K: Kernel>(
        &mut self,
        kernel: &K,
        gathered: Gathered<K::Buffer>,
    ) -> KernelResult<()> {
        let numbers = kernel.into_host(gathered.numbers)?.to_f64();
        let width = numbers.len() / gathered.places.len();
        for (place, row) in gathered.places.iter().zip(numbers.chunks(width)) {
            self.keep(*place, gathered.role, row.to_vec());
        }
        Ok(())
    }

    /// Keeps a row of out, or its lse.
    fn keep(&mut self, place: (usize, usize), role: Role, numbers: Vec<f64>) {
        let sampled = self.rows.entry(place).or_default();
        match role {
            Role::Out => sampled.out = numbers,
            _ => sampled.lse = numbers[0],
        }
    }

    /// Takes the rows that have come since.
    pub fn take(&mut self) -> BTreeMap<(usize, usize), Sampled> {
        std::mem::take(&mut self.rows)
    }
}

impl Sink for Samples {
    fn write(&mut self, range: &RowRange<'_>, from: &Data) -> Result<(), StreamError> {
        if !matches!(range.role, Role::Out | Role::Lse) {
            return Ok(());
        }
        let slice = from.as_slice();
        let width = slice.len() / (range.tokens.count * range.heads.len()).max(1);
        for (place, row) in self.within(range) {
            let numbers = (row * width..(row + 1) * width).map(|i| slice.get(i));
            self.keep(place, range.role, numbers.collect());
        }
        Ok(())
    }
}
