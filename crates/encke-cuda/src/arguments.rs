//! Jobs and blocks as kernel arguments. Their head tables are uploaded, equal tables once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use encke_core::job::{Block, Job, Operand};

use crate::abi;
use crate::allocation::DeviceAllocation;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::tensor_map::common_divisor;

/// Tables cached on the device at most.
const TABLES: usize = 1024;

/// Tables of integers on a device, one copy of each.
#[derive(Default)]
pub(crate) struct TableCache {
    tables: Mutex<HashMap<Vec<i64>, Arc<DeviceAllocation>>>,
}

/// A kernel argument, and the tables on the device that it points to.
pub(crate) struct KernelArgument<T> {
    pub value: T,
    pub(crate) tables: Vec<Arc<DeviceAllocation>>,
}

impl<T> KernelArgument<T> {
    /// The tables, which the launch reads.
    pub fn tables(&self) -> impl Iterator<Item = &DeviceAllocation> {
        self.tables.iter().map(|table| &**table)
    }
}

impl TableCache {
    /// A table on the device, uploaded unless an equal one is cached. Cached tables are never
    /// freed: CUDA graphs keep their addresses.
    pub fn get(&self, device: &Arc<Device>, values: Vec<i64>) -> Result<Arc<DeviceAllocation>> {
        // An empty table has an address, too.
        let values = match values.is_empty() {
            true => vec![0],
            false => values,
        };
        if let Some(table) = lock(&self.tables).get(&values) {
            return Ok(Arc::clone(table));
        }
        // The lock is not held here: work that is enqueued may launch what another thread has
        // delayed, which needs tables itself.
        device.refuse_first_use("uploading the heads of a shape")?;
        let table = Arc::new(DeviceAllocation::new(device, values.len() * 8)?);
        table.write(bytemuck::cast_slice(&values))?;
        if lock(&self.tables).len() < TABLES {
            // Calls on other streams read it without waiting for this one.
            device.complete_first_use()?;
            let mut tables = lock(&self.tables);
            return Ok(Arc::clone(tables.entry(values).or_insert(table)));
        }
        Ok(table)
    }

    /// A job as a kernel argument.
    pub fn job(&self, device: &Arc<Device>, job: &Job) -> Result<KernelArgument<abi::JobParams>> {
        let mut tables = Vec::new();
        let mut operand = |operand: &Operand| self.operand(device, operand, &mut tables);
        let dq = job.dq.as_ref().unwrap_or(&job.q);
        let (q, k, cells) = (operand(&job.q)?, operand(&job.k)?, operand(&job.cells)?);
        let (delta, dq) = (operand(job.delta())?, operand(dq)?);
        let position = |x: usize| x as i64;
        let mask = job.causal();
        let mask = mask.as_ref();
        let value = abi::JobParams {
            q,
            k,
            cells,
            delta,
            dq,
            query: mask.map_or(0, |mask| position(mask.query)),
            query_step: mask.map_or(1, |mask| position(mask.query_step)),
            key: mask.map_or(0, |mask| position(mask.key)),
            key_step: mask.map_or(1, |mask| position(mask.key_step)),
            batch: to_i32(job.batch, "batch entries")?,
            segments: to_i32(job.segments, "segments")?,
            queries: to_i32(job.queries, "queries in a segment")?,
            keys: to_i32(job.keys, "keys in a segment")?,
            heads: to_i32(job.heads, "heads")?,
            dim: to_i32(job.dim, "elements in a row")?,
            causal: mask.is_some() as i32,
            value_dim: to_i32(job.value_dim, "elements in a row of values")?,
            scale: job.scale,
            gain: job.gain,
        };
        Ok(KernelArgument { value, tables })
    }

    /// A block of rows as a kernel argument.
    pub fn block(
        &self,
        device: &Arc<Device>,
        block: &Block,
    ) -> Result<KernelArgument<abi::BlockParams>> {
        let mut tables = Vec::new();
        let mut operand = |operand: &Operand| self.operand(device, operand, &mut tables);
        let value = abi::BlockParams {
            from: operand(&block.from)?,
            to: operand(&block.to)?,
            batch: to_i32(block.batch, "batch entries")?,
            segments: to_i32(block.segments, "segments")?,
            rows: to_i32(block.rows, "rows in a segment")?,
            heads: to_i32(block.heads, "heads")?,
            width: block.width as i64,
        };
        Ok(KernelArgument { value, tables })
    }

    pub(crate) fn operand(
        &self,
        device: &Arc<Device>,
        operand: &Operand,
        tables: &mut Vec<Arc<DeviceAllocation>>,
    ) -> Result<abi::OperandParams> {
        let heads: Vec<i64> = operand.heads.iter().map(|&head| head as i64).collect();
        let unit = common_divisor(&operand.heads).max(1) as i64;
        let table = self.get(device, heads)?;
        let pointer = table.pointer();
        tables.push(table);
        Ok(abi::OperandParams {
            offset: operand.offset as i64,
            batch: operand.batch as i64,
            segment: operand.segment as i64,
            row: operand.row as i64,
            unit,
            heads: pointer,
        })
    }
}

/// Groups of heads that read the same keys, as a table: the start of each group in the list of
/// heads, the end of the last, and the list. Also the number of groups.
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

/// A count as an `int` of the device.
pub(crate) fn to_i32(count: usize, what: &str) -> Result<i32> {
    i32::try_from(count).map_err(|_| Error::Unsupported {
        what: format!("{count} {what}: the limit is {}", i32::MAX),
    })
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
    fn heads_that_share_keys_form_one_group() {
        let (table, count) = groups(&keys(&[0, 64, 0, 64, 128]));
        assert_eq!(count, 3);
        assert_eq!(table, [0, 2, 4, 5, 0, 2, 1, 3, 4]);
    }
}
