//! From a job to what the device is told: tables of heads move over, once for equal ones.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use encke_core::job::{Block, Job, Operand};

use crate::abi;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::Memory;

/// How many tables are kept on the device.
const TABLES: usize = 1024;

/// Tables of numbers on a device.
#[derive(Default)]
pub(crate) struct Tables {
    kept: Mutex<HashMap<Vec<i64>, Arc<Memory>>>,
}

/// Something the device is told, with the tables it points to.
pub(crate) struct Told<T> {
    pub value: T,
    tables: Vec<Arc<Memory>>,
}

impl<T> Told<T> {
    /// The tables, to be named as read.
    pub fn tables(&self) -> impl Iterator<Item = &Memory> {
        self.tables.iter().map(|table| &**table)
    }
}

impl Tables {
    /// Numbers on the device. Equal tables are kept once.
    pub fn get(&self, device: &Arc<Device>, numbers: Vec<i64>) -> Result<Arc<Memory>> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(table) = kept.get(&numbers) {
            return Ok(Arc::clone(table));
        }
        if kept.len() >= TABLES {
            kept.clear(); // memory is freed in stream order, after the last job that reads it
        }
        let table = Arc::new(Memory::new(device, numbers.len() * 8)?);
        table.write(bytemuck::cast_slice(&numbers))?;
        kept.insert(numbers, Arc::clone(&table));
        Ok(table)
    }

    /// A job as the device is told it.
    pub fn job(&self, device: &Arc<Device>, job: &Job) -> Result<Told<abi::Job>> {
        let mut tables = Vec::new();
        let mut operand = |operand: &Operand| self.operand(device, operand, &mut tables);
        let dq = job.dq.as_ref().unwrap_or(&job.q);
        let (q, k, cells, dq) = (
            operand(&job.q)?,
            operand(&job.k)?,
            operand(&job.cells)?,
            operand(dq)?,
        );
        let position = |x: usize| x as i64;
        let mask = job.causal.as_ref();
        let value = abi::Job {
            q,
            k,
            cells,
            dq,
            query: mask.map_or(0, |mask| position(mask.query)),
            query_step: mask.map_or(1, |mask| position(mask.query_step)),
            key: mask.map_or(0, |mask| position(mask.key)),
            key_step: mask.map_or(1, |mask| position(mask.key_step)),
            batch: small(job.batch, "batch entries")?,
            segments: small(job.segments, "segments")?,
            queries: small(job.queries, "queries in a segment")?,
            keys: small(job.keys, "keys in a segment")?,
            heads: small(job.heads, "heads")?,
            dim: small(job.dim, "numbers in a row")?,
            causal: mask.is_some() as i32,
            pad: 0,
            scale: job.scale,
            gain: job.gain,
        };
        Ok(Told { value, tables })
    }

    /// A block of rows as the device is told it.
    pub fn block(&self, device: &Arc<Device>, block: &Block) -> Result<Told<abi::Block>> {
        let mut tables = Vec::new();
        let mut operand = |operand: &Operand| self.operand(device, operand, &mut tables);
        let value = abi::Block {
            from: operand(&block.from)?,
            to: operand(&block.to)?,
            batch: small(block.batch, "batch entries")?,
            segments: small(block.segments, "segments")?,
            rows: small(block.rows, "rows in a segment")?,
            heads: small(block.heads, "heads")?,
            width: block.width as i64,
        };
        Ok(Told { value, tables })
    }

    fn operand(
        &self,
        device: &Arc<Device>,
        operand: &Operand,
        tables: &mut Vec<Arc<Memory>>,
    ) -> Result<abi::Operand> {
        let heads: Vec<i64> = operand.heads.iter().map(|&head| head as i64).collect();
        let unit = heads.iter().fold(0, |unit, &head| gcd(unit, head)).max(1);
        let table = self.get(device, heads)?;
        let pointer = table.pointer();
        tables.push(table);
        Ok(abi::Operand {
            offset: operand.offset as i64,
            batch: operand.batch as i64,
            segment: operand.segment as i64,
            row: operand.row as i64,
            unit,
            heads: pointer,
        })
    }
}

/// Heads that read the same keys, as the device is told them: where each group starts in the list
/// of heads, and that list. Also the number of groups.
pub(crate) fn groups(keys: &Operand) -> (Vec<i64>, usize) {
    let mut groups: Vec<(usize, Vec<i64>)> = Vec::new();
    for (head, &at) in keys.heads.iter().enumerate() {
        match groups.iter_mut().find(|group| group.0 == at) {
            Some(group) => group.1.push(head as i64),
            None => groups.push((at, vec![head as i64])),
        }
    }
    let mut table = vec![0];
    for (_, heads) in &groups {
        table.push(table.last().copied().unwrap_or(0) + heads.len() as i64);
    }
    table.extend(groups.iter().flat_map(|(_, heads)| heads));
    (table, groups.len())
}

/// A count as the device holds it.
fn small(count: usize, what: &str) -> Result<i32> {
    i32::try_from(count).map_err(|_| Error::Unsupported {
        what: format!("{count} {what}: the limit is {}", i32::MAX),
    })
}

fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(heads: &[usize]) -> Operand {
        Operand {
            offset: 0,
            batch: 0,
            segment: 0,
            row: 0,
            heads: heads.into(),
        }
    }

    #[test]
    fn heads_that_share_keys_are_one_group() {
        let (table, count) = groups(&keys(&[0, 64, 0, 64, 128]));
        assert_eq!(count, 3);
        assert_eq!(table, [0, 2, 4, 5, 0, 2, 1, 3, 4]);
    }
}
