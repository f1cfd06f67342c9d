//! What is timed beside jobs: filling, copying, finishing, loading, memory to be had, and hops.

use std::hint::black_box;
use std::time::{Duration, Instant};

use encke_core::job::{Block, Operand};
use encke_core::kernel::Kernel;
use encke_core::sharding::Run as Tokens;
use encke_core::transport::{Address, Incoming, Outgoing, Parcel, Transport};
use encke_core::{Data, Tensor};
use encke_ring::threads::endpoints;

use super::operands::Operands;
use super::timing::seconds;
use super::{Reading, Sizes};
use crate::clock::ClockError;

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
    ) -> Result<[(Reading, f64); 7], ClockError> {
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
        let operand = Operand {
            offset: 0,
            batch: 0,
            segment: 0,
            row: heads * dim,
            heads: (0..heads).map(|head| head * dim).collect(),
        };
        let block = Block {
            batch: 1,
            segments: 1,
            rows,
            heads,
            width: dim,
            from: operand.clone(),
            to: operand,
        };
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
            (Reading::Finish, finish),
            (Reading::Load, load),
            (Reading::Carry, carried),
            (Reading::Fresh, fresh),
            (Reading::Hop, hop_s()),
        ])
    }
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
