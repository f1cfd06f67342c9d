//! What is timed beside jobs: filling, copying, finishing, loading, memory to be had, and hops.

use std::hint::black_box;
use std::time::{Duration, Instant};

use encke_core::job::{Block, Operand};
use encke_core::kernel::Kernel;
use encke_core::sharding::Run as Tokens;
use encke_core::transport::{Address, Incoming, Outgoing, Transport, WireBuffer};
use encke_core::{Data, Tensor};
use encke_ring::threads::endpoints;

use super::operands::Operands;
use super::probes::DILATION;
use super::timing::seconds;
use super::{Reading, Sizes};
use crate::ClockError;

/// Where rows are copied to and from.
#[derive(Debug)]
pub(super) struct Places {
    copied: Data,
    tensor: Tensor,
}

impl Places {
    pub fn new(sizes: Sizes) -> Places {
        let Sizes {
            rows,
            heads,
            dim,
            dtype,
        } = sizes;
        Places {
            copied: Data::zeros(dtype, rows * heads * dim),
            tensor: Tensor::zeros(dtype, [1, rows, heads, dim]),
        }
    }

    /// Times everything once, on the rows of a whole sequence.
    pub fn read<K: Kernel<Buffer = Data>>(
        &mut self,
        kernel: &K,
        sizes: Sizes,
        operands: &mut Operands,
    ) -> Result<[(Reading, f64); 9], ClockError> {
        let Sizes {
            rows,
            heads,
            dim,
            dtype,
        } = sizes;
        let Places { copied, tensor } = self;
        let Operands {
            inputs,
            carry,
            lse,
            gradients,
            ..
        } = operands;
        let block = block(sizes);
        let apart = apart(sizes);
        let all = [Tokens {
            first: 0,
            stride: 1,
            count: rows,
        }];
        let elements = rows * heads * dim;
        let fill = seconds(|times| kernel.fill(&mut gradients[times % 3], 0.0))?;
        let copy = seconds(|times| {
            let from = kernel.input(&inputs[times % 4]);
            kernel.copy(&block, false, from, copied)
        })?;
        let add = seconds(|times| {
            let [one, other, _] = &mut *gradients;
            let (from, to) = if times % 2 == 0 {
                (one, other)
            } else {
                (other, one)
            };
            kernel.copy(&block, true, kernel.input(from), to)
        })?;
        let apart = seconds(|times| {
            let from = kernel.input(&inputs[times % 4]);
            let mut apart = apart.iter();
            apart.try_for_each(|block| kernel.copy(block, false, from, copied))
        })?;
        let finish = seconds(|_| kernel.finish(rows * heads, dim, 1.0, carry, copied, lse))?;
        let load = seconds(|_| kernel.upload(&tensor.view(), &all, copied))?;
        let carried = seconds(|times| {
            copied.copy_from(black_box(&inputs[times % 4]), elements);
            Ok(())
        })?;
        let fresh = seconds(|_| {
            let mut buffer = kernel.allocate(dtype, elements)?;
            kernel.fill(black_box(&mut buffer), 0.0)
        })?;
        // Any finite lse will do for the jobs that are timed next.
        kernel.fill(lse, 10.0)?;
        Ok([
            (Reading::Fill, fill),
            (Reading::Copy, copy),
            (Reading::Add, add),
            (Reading::Apart, apart),
            (Reading::Finish, finish),
            (Reading::Load, load),
            (Reading::Carry, carried),
            (Reading::Fresh, fresh),
            (Reading::Hop, hop_s()),
        ])
    }
}

/// All rows, as they lie.
pub(super) fn block(sizes: Sizes) -> Block {
    let Sizes {
        rows, heads, dim, ..
    } = sizes;
    let operand = Operand {
        offset: 0,
        batch: 0,
        segment: 0,
        row: heads * dim,
        heads: (0..heads).map(|head| head * dim).collect(),
    };
    Block {
        batch: 1,
        segments: 1,
        rows,
        heads,
        width: dim,
        from: operand.clone(),
        to: operand,
    }
}

/// All rows again, as a dilated branch packs them: those of one head, one token in so many, as far
/// as they go.
pub(super) fn apart(sizes: Sizes) -> Vec<Block> {
    let Sizes {
        rows, heads, dim, ..
    } = sizes;
    let each = rows / DILATION;
    let places = (0..heads).flat_map(|head| (0..DILATION).map(move |phase| (head, phase)));
    let operand = |offset: usize, row: usize| Operand {
        offset,
        batch: 0,
        segment: 0,
        row,
        heads: [0].into(),
    };
    let block = |(i, (head, phase)): (usize, (usize, usize))| Block {
        batch: 1,
        segments: 1,
        rows: each,
        heads: 1,
        width: dim,
        from: operand((phase * heads + head) * dim, DILATION * heads * dim),
        to: operand(i * each * dim, dim),
    };
    places.enumerate().map(block).collect()
}

/// Seconds of a hop without bytes to speak of, between two threads of this process.
fn hop_s() -> f64 {
    const HOPS: usize = 64;
    let ends = endpoints::<Vec<u8>>(2, Duration::from_secs(60));
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for (rank, mut end) in ends.into_iter().enumerate() {
            scope.spawn(move || {
                let address = Address {
                    peer: 1 - rank,
                    tag: 0,
                    elements: 1,
                };
                let (sent, mut received) = (vec![0u8], vec![0u8]);
                for round in 0..HOPS {
                    let outgoing = [Outgoing {
                        to: address,
                        parcel: &sent,
                    }];
                    let mut incoming = [Incoming {
                        from: address,
                        parcel: &mut received,
                    }];
                    // Both ends do the same, so nothing can fail but a thread that is not run.
                    if end
                        .exchange(round, &outgoing, &mut incoming, &mut || {})
                        .is_err()
                    {
                        return;
                    }
                }
            });
        }
    });
    begin.elapsed().as_secs_f64() / HOPS as f64
}
