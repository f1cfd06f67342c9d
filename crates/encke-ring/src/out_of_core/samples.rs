//! Selected rows of an output whose other rows are not stored.
//!
//! They are copied from rows that arrive in host memory, or gathered on the device that holds them.

use std::collections::{BTreeMap, BTreeSet};

use encke_core::Data;
use encke_core::job::{Block, Operand};
use encke_core::kernel::{Kernel, Result as KernelResult};
use encke_core::plan::program::Role;

use super::error::StreamError;
use super::row_io::BufferSlot;
use super::source::{RowRange, TensorSink};

/// A sampled row of the output.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SampledRow {
    /// The row of out.
    pub out: Vec<f64>,
    /// Its lse.
    pub lse: f64,
}

/// Sampled rows that are still on the device.
#[derive(Debug)]
pub struct GatheredSamples<B> {
    role: Role,
    places: Vec<(usize, usize)>,
    rows: B,
}

/// Keeps the selected rows: (token, head) of the first batch entry.
#[derive(Debug, Default)]
pub struct Samples {
    selected: BTreeSet<(usize, usize)>,
    rows: BTreeMap<(usize, usize), SampledRow>,
}

impl Samples {
    /// Selects these rows.
    pub fn new(selected: impl IntoIterator<Item = (usize, usize)>) -> Samples {
        Samples {
            selected: selected.into_iter().collect(),
            rows: BTreeMap::new(),
        }
    }

    /// The number of selected rows.
    pub fn selected(&self) -> usize {
        self.selected.len()
    }

    /// The selected rows within a range, each with its row number in the range.
    fn within(&self, range: &RowRange<'_>) -> Vec<((usize, usize), usize)> {
        let RowRange { tokens, heads, .. } = *range;
        if range.batch != 0 || tokens.count == 0 {
            return Vec::new();
        }
        let range = self.selected.range((tokens.first, 0)..(tokens.end(), 0));
        let row = |&(token, head): &(usize, usize)| {
            let past = token - tokens.first;
            let index = heads.binary_search(&head).ok()?;
            let met = past.is_multiple_of(tokens.stride);
            met.then(|| ((token, head), past / tokens.stride * heads.len() + index))
        };
        range.filter_map(row).collect()
    }

    /// Copies the selected rows of a range of out or lse from a buffer, on the device.
    pub fn gather<K: Kernel>(
        &self,
        kernel: &K,
        from: &BufferSlot<&K::Buffer>,
        range: &RowRange<'_>,
        width: usize,
    ) -> KernelResult<Option<GatheredSamples<K::Buffer>>> {
        let selected = self.within(range);
        if selected.is_empty() || !matches!(range.role, Role::Out | Role::Lse) {
            return Ok(None);
        }
        // The head table of an operand serves as a list of row addresses.
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
            heads: selected.len(),
            width,
            from: rows(
                from.at,
                selected.iter().map(|(_, row)| row * width).collect(),
            ),
            to: rows(0, (0..selected.len()).map(|row| row * width).collect()),
        };
        let mut rows = kernel.allocate(from.dtype, selected.len() * width)?;
        kernel.copy(&block, false, kernel.input(from.buffer), &mut rows)?;
        Ok(Some(GatheredSamples {
            role: range.role,
            places: selected.into_iter().map(|(place, _)| place).collect(),
            rows,
        }))
    }

    /// Copies gathered rows to the host and keeps them.
    pub fn accept<K: Kernel>(
        &mut self,
        kernel: &K,
        gathered: GatheredSamples<K::Buffer>,
    ) -> KernelResult<()> {
        let rows = kernel.move_to_host(gathered.rows)?.to_f64();
        let width = rows.len() / gathered.places.len();
        for (place, row) in gathered.places.iter().zip(rows.chunks(width)) {
            self.keep(*place, gathered.role, row.to_vec());
        }
        Ok(())
    }

    /// Keeps a row of out, or its lse.
    fn keep(&mut self, place: (usize, usize), role: Role, row: Vec<f64>) {
        let sampled = self.rows.entry(place).or_default();
        match role {
            Role::Out => sampled.out = row,
            _ => sampled.lse = row[0],
        }
    }

    /// Takes the rows that were kept since the last call.
    pub fn take(&mut self) -> BTreeMap<(usize, usize), SampledRow> {
        std::mem::take(&mut self.rows)
    }
}

impl TensorSink for Samples {
    fn write(&mut self, range: &RowRange<'_>, from: &Data) -> Result<(), StreamError> {
        if !matches!(range.role, Role::Out | Role::Lse) {
            return Ok(());
        }
        let slice = from.as_slice();
        let width = slice.len() / (range.tokens.count * range.heads.len()).max(1);
        for (place, row) in self.within(range) {
            let elements = (row * width..(row + 1) * width).map(|i| slice.get(i));
            self.keep(place, range.role, elements.collect());
        }
        Ok(())
    }
}
