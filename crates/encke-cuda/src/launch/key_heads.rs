//! The key heads of a job, and the query heads that read each: the order of work of Hopper's
//! backward kernel.

use encke_core::job::{Job, Operand};

use crate::tensor_map;

/// Where a job's dq is.
pub(crate) fn dq(job: &Job) -> &Operand {
    job.dq.as_ref().unwrap_or(&job.q)
}

/// The offsets of the job's key heads, each once.
pub(crate) fn key_head_offsets(job: &Job) -> Vec<usize> {
    let mut offsets: Vec<usize> = Vec::new();
    for &offset in job.k.heads.iter().take(job.heads) {
        // Query heads that share a key head mostly follow each other.
        if offsets.last() != Some(&offset) && !offsets.contains(&offset) {
            offsets.push(offset);
        }
    }
    offsets
}

/// The kernel's `key_heads` and `query_heads`.
pub(crate) fn heads(job: &Job) -> (Vec<[i32; 2]>, Vec<[i32; 4]>) {
    // Once for each operand: a unit takes a division for each head, and calls are short.
    let operands =
        [&job.q, &job.cells, dq(job)].map(|operand| (operand, tensor_map::unit(operand)));
    let key_unit = tensor_map::unit(&job.k);
    let (mut key_heads, mut query_heads) = (Vec::new(), Vec::with_capacity(job.heads));
    for offset in key_head_offsets(job) {
        let members = (0..job.heads).filter(|&head| job.k.heads[head] == offset);
        key_heads.push([query_heads.len() as i32, (offset / key_unit) as i32]);
        query_heads.extend(members.map(|head| {
            let [q, cells, dq] =
                operands.map(|(operand, unit)| (operand.heads[head] / unit) as i32);
            [head as i32, q, cells, dq]
        }));
    }
    (key_heads, query_heads)
}

/// A table of 32-bit integers, two in each of 64 bits.
pub(crate) fn packed<const N: usize>(table: &[[i32; N]]) -> Vec<i64> {
    let values: Vec<i32> = table.iter().flatten().copied().collect();
    values
        .chunks(2)
        .map(|pair| i64::from(pair[0] as u32) | i64::from(pair[1]) << 32)
        .collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn operand(heads: &[usize]) -> Operand {
        Operand {
            offset: 0,
            batch: 0,
            segment: 0,
            row: 512,
            heads: heads.into(),
        }
    }

    pub(crate) fn job(dim: usize) -> Job {
        Job {
            batch: 1,
            segments: 1,
            queries: 200,
            keys: 300,
            heads: 4,
            dim,
            value_dim: dim,
            q: operand(&[0, 128, 256, 384]),
            k: operand(&[128, 0, 128, 0]),
            cells: operand(&[0, 1, 2, 3]),
            delta: None,
            dq: None,
            mask: None,
            transform: None,
            dropout: None,
            scale: 0.125,
            gain: 1.0,
            tiles: None,
        }
    }

    #[test]
    fn query_heads_are_grouped_by_key_head() {
        let (key_heads, query_heads) = heads(&job(128));
        assert_eq!(key_heads, [[0, 1], [2, 0]]);
        assert_eq!(
            query_heads,
            [[0, 0, 0, 0], [2, 2, 2, 2], [1, 1, 1, 1], [3, 3, 3, 3]]
        );
        assert_eq!(packed(&[[1, -1]]), [-4_294_967_295]);
    }
}
