//! What is timed beside jobs: fills, copies, finishing, loading, allocation and transfers.

use std::hint::black_box;
use std::time::{Duration, Instant};

use encke_core::job::{Block, Operand};
use encke_core::kernel::{Kernel, KernelError};
use encke_core::sharding::Run as Tokens;
use encke_core::transport::{Address, Incoming, Outgoing, Transport, WireBuffer};
use encke_core::{Data, Tensor};
use encke_ring::threads::endpoints;

use super::buffers::ProbeBuffers;
use super::probes::DILATION;
use super::readings::Reading;
use super::timing::{TimedWork, seconds};
use crate::probe_sizes::ProbeSizes;

/// The buffers that copies are timed on, beside those of the probes.
#[derive(Debug)]
pub(super) struct CopyBuffers {
    copied: Data,
    tensor: Tensor,
}

impl CopyBuffers {
    pub fn new(sizes: ProbeSizes) -> CopyBuffers {
        let dims = [1, sizes.rows, sizes.heads, sizes.dim];
        CopyBuffers {
            copied: Data::zeros(sizes.dtype, sizes.elements()),
            tensor: Tensor::zeros(sizes.dtype, dims),
        }
    }

    /// Times everything once, on the rows of a whole sequence.
    pub fn measure<K: Kernel<Buffer = Data>>(
        &mut self,
        kernel: &K,
        sizes: ProbeSizes,
        buffers: &mut ProbeBuffers,
    ) -> Result<Vec<(Reading, f64)>, KernelError> {
        let CopyBuffers { copied, tensor } = self;
        let mut taken = measure_copies(kernel, sizes, buffers, copied, &mut |work| seconds(work))?;
        let (inputs, gradients) = (&buffers.inputs, &mut buffers.gradients);
        let block = all_rows(sizes);
        let all = [Tokens {
            first: 0,
            stride: 1,
            count: sizes.rows,
        }];
        let fill = seconds(|times| kernel.fill(&mut gradients[times % 3], 0.0))?;
        let add = seconds(|times| {
            let [one, other, _] = &mut *gradients;
            let (from, to) = if times % 2 == 0 {
                (one, other)
            } else {
                (other, one)
            };
            kernel.copy(&block, true, kernel.input(from), to)
        })?;
        let load = seconds(|_| kernel.upload(&tensor.view(), &all, copied))?;
        let thread_copy = seconds(|times| {
            copied.copy_from(black_box(&inputs[times % 4]), sizes.elements());
            Ok(())
        })?;
        let allocation = seconds(|_| {
            let mut buffer = kernel.allocate(sizes.dtype, sizes.elements())?;
            kernel.fill(black_box(&mut buffer), 0.0)
        })?;
        taken.extend([
            (Reading::Fill, fill),
            (Reading::AddingCopy, add),
            (Reading::Load, load),
            (Reading::ThreadCopy, thread_copy),
            (Reading::Allocation, allocation),
            (Reading::Latency, latency_s()),
        ]);
        Ok(taken)
    }
}

/// Times copies of contiguous and of strided rows, and finishing.
pub(super) fn measure_copies<K: Kernel>(
    kernel: &K,
    sizes: ProbeSizes,
    buffers: &mut ProbeBuffers<K::Buffer>,
    copied: &mut K::Buffer,
    seconds: &mut dyn FnMut(&mut TimedWork<'_>) -> Result<f64, KernelError>,
) -> Result<Vec<(Reading, f64)>, KernelError> {
    let ProbeBuffers {
        inputs, carry, lse, ..
    } = buffers;
    let mut copy = |blocks: &[Block]| {
        seconds(&mut |times| {
            let from = kernel.input(&inputs[times % 4]);
            let mut blocks = blocks.iter();
            blocks.try_for_each(|block| kernel.copy(block, false, from, copied))
        })
    };
    let contiguous = copy(&[all_rows(sizes)])?;
    let strided = copy(&strided_rows(sizes))?;
    let cells = sizes.rows * sizes.heads;
    let finish = seconds(&mut |_| kernel.finish(cells, sizes.dim, 1.0, carry, copied, lse))?;
    // The jobs that are timed next need a finite lse.
    kernel.fill(lse, 10.0)?;
    Ok(vec![
        (Reading::Copy, contiguous),
        (Reading::StridedCopy, strided),
        (Reading::Finish, finish),
    ])
}

/// All rows, contiguous.
pub(super) fn all_rows(sizes: ProbeSizes) -> Block {
    let ProbeSizes {
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

/// All rows as a dilated branch packs them: of each head, every [`DILATION`]th token from each
/// offset. Rows beyond a multiple of the dilation are left out.
pub(super) fn strided_rows(sizes: ProbeSizes) -> Vec<Block> {
    let ProbeSizes {
        rows, heads, dim, ..
    } = sizes;
    let each = rows / DILATION;
    let offsets = (0..heads).flat_map(|head| (0..DILATION).map(move |phase| (head, phase)));
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
    offsets.enumerate().map(block).collect()
}

/// Seconds of a transfer of one byte between two threads of this process.
fn latency_s() -> f64 {
    const ROUNDS: usize = 64;
    let endpoints = endpoints::<Vec<u8>>(2, Duration::from_secs(60));
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for (rank, mut endpoint) in endpoints.into_iter().enumerate() {
            scope.spawn(move || {
                let address = Address {
                    peer: 1 - rank,
                    tag: 0,
                    elements: 1,
                };
                let (sent, mut received) = (vec![0u8], vec![0u8]);
                for round in 0..ROUNDS {
                    let outgoing = [Outgoing {
                        to: address,
                        parcel: &sent,
                    }];
                    let mut incoming = [Incoming {
                        from: address,
                        parcel: &mut received,
                    }];
                    // Both ends do the same, so only a thread that is never scheduled can fail.
                    if endpoint
                        .exchange(round, &outgoing, &mut incoming, &mut || {})
                        .is_err()
                    {
                        return;
                    }
                }
            });
        }
    });
    begin.elapsed().as_secs_f64() / ROUNDS as f64
}
