//! Every kind of hop under the transport suite.
//!
//! The suite exchanges bytes on the host, so each byte becomes an f32 on the GPU. Around each
//! exchange the wrapper provokes races with its copies: parcels are computed on the compute stream
//! just before, overwritten and freed right after, and their memory is reallocated.

use std::time::Duration;

use encke_core::conformance::{self, Random};
use encke_core::job::{Block, Operand};
use encke_core::memory::Memory;
use encke_core::sharding::Run;
use encke_core::transport::{
    Address, HostWireBuffer, Incoming, Moved, Outgoing, Transport, TransportError,
};
use encke_core::{DType, Data, View};
use encke_cuda::{Buffer, CudaKernel, Pinned, Staged};
use encke_ring::threads::endpoints;

use crate::tally::GpuTally;

const DEADLINE: Duration = Duration::from_secs(60);

/// A transport of buffers as one of bytes.
pub struct ByteTransport<'a, T> {
    pub kernel: &'a CudaKernel,
    pub inner: T,
}

/// A buffer that a kernel writes.
fn computed(kernel: &CudaKernel, values: &[f32]) -> Buffer {
    let count = values.len();
    let view = View::contiguous(values, [1, count, 1, 1]).expect("a row of values");
    let runs = [Run::leading(count)];
    let mut first = kernel.allocate(DType::F32, count).expect("room");
    let mut second = kernel.allocate(DType::F32, count).expect("room");
    kernel.upload(&view, &runs, &mut first).expect("an upload");
    let whole = Operand {
        offset: 0,
        batch: 0,
        segment: 0,
        row: 0,
        heads: vec![0].into(),
    };
    let block = Block {
        from: whole.clone(),
        to: whole,
        batch: 1,
        segments: 1,
        rows: 1,
        heads: 1,
        width: count,
    };
    kernel
        .copy(&block, false, &first, &mut second)
        .expect("a copy");
    second
}

fn values(kernel: &CudaKernel, buffer: Buffer) -> Vec<f32> {
    match kernel.move_to_host(buffer).expect("a download") {
        Data::F32(values) => values,
        other => panic!("{:?} instead of f32", other.as_slice().dtype()),
    }
}

impl<T: Transport<Buffer>> Transport<Vec<u8>> for ByteTransport<'_, T> {
    fn exchange(
        &mut self,
        round: usize,
        outgoing: &[Outgoing<'_, Vec<u8>>],
        incoming: &mut [Incoming<'_, Vec<u8>>],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Moved, TransportError> {
        let kernel = self.kernel;
        let floats = |bytes: &Vec<u8>| -> Vec<f32> { bytes.iter().map(|&x| x.into()).collect() };
        let mut sent: Vec<Buffer> = outgoing
            .iter()
            .map(|message| computed(kernel, &floats(message.parcel)))
            .collect();
        let mut received: Vec<Buffer> = incoming
            .iter()
            .map(|message| computed(kernel, &floats(message.parcel)))
            .collect();
        let sends: Vec<Outgoing<'_, Buffer>> = outgoing
            .iter()
            .zip(&sent)
            .map(|(message, parcel)| Outgoing {
                to: message.to,
                parcel,
            })
            .collect();
        let mut receives: Vec<Incoming<'_, Buffer>> = incoming
            .iter()
            .zip(&mut received)
            .map(|(message, parcel)| Incoming {
                from: message.from,
                parcel,
            })
            .collect();
        let moved = self
            .inner
            .exchange(round, &sends, &mut receives, meanwhile)?;
        drop((sends, receives));
        for buffer in &mut sent {
            kernel.fill(buffer, -1.0).expect("a fill");
        }
        drop(sent);
        for message in outgoing {
            let mut again = kernel
                .allocate(DType::F32, message.parcel.len())
                .expect("room");
            kernel.fill(&mut again, -2.0).expect("a fill");
        }
        for (message, buffer) in incoming.iter_mut().zip(received) {
            let values = values(kernel, buffer);
            *message.parcel = values.into_iter().map(|x| x as u8).collect();
        }
        let width = DType::F32.bytes();
        Ok(Moved {
            sent_bytes: moved.sent_bytes / width,
            received_bytes: moved.received_bytes / width,
        })
    }
}

/// Runs every rank's part of the suite on its own thread.
pub fn suite<T>(kernel: &CudaKernel, wires: Vec<T>) -> Result<(), String>
where
    T: Transport<Buffer> + Send,
{
    let ranks = wires.len();
    std::thread::scope(|scope| {
        let part = |(rank, inner): (usize, T)| {
            scope.spawn(move || {
                let mut wire = ByteTransport { kernel, inner };
                conformance::transport(rank, ranks, &mut wire)
            })
        };
        let threads: Vec<_> = wires.into_iter().enumerate().map(part).collect();
        let mut result = Ok(());
        for thread in threads {
            let ended = thread.join().map_err(|_| "a rank panicked".to_string());
            let ended = ended.and_then(|ended| ended.map_err(|failure| failure.to_string()));
            result = result.and(ended);
        }
        result
    })
}

/// Large parcels around the whole ring, in two alternating buffers: many chunks, every staging slot
/// used several times, and all ranks at once.
fn large(kernel: &CudaKernel, ranks: usize, elements: usize) -> Result<(), String> {
    let content = |home: usize| -> Vec<f32> {
        let mut random = Random::new(home as u64);
        (0..elements).map(|_| random.unit() as f32).collect()
    };
    let run_rank = |rank: usize, mut wire: encke_ring::threads::Endpoint<Buffer>| {
        let mut held = computed(kernel, &content(rank));
        let mut coming = kernel
            .allocate(DType::F32, elements)
            .map_err(|error| error.to_string())?;
        let address = |peer: usize| Address {
            peer,
            tag: 1,
            elements,
        };
        for round in 1..ranks {
            let sends = [Outgoing {
                to: address((rank + 1) % ranks),
                parcel: &held,
            }];
            let mut receives = [Incoming {
                from: address((rank + ranks - 1) % ranks),
                parcel: &mut coming,
            }];
            wire.exchange(round, &sends, &mut receives, &mut || {})
                .map_err(|error| error.to_string())?;
            std::mem::swap(&mut held, &mut coming);
        }
        let home = (rank + 1) % ranks;
        match values(kernel, held) == content(home) {
            true => Ok(()),
            false => Err(format!("rank {rank} did not get the values of rank {home}")),
        }
    };
    let run_rank = &run_rank;
    std::thread::scope(|scope| {
        let wires = endpoints(ranks, DEADLINE).into_iter().enumerate();
        let threads: Vec<_> = wires
            .map(|(rank, wire)| scope.spawn(move || run_rank(rank, wire)))
            .collect();
        let mut ended = threads.into_iter().map(|thread| thread.join());
        ended.try_for_each(|ended| ended.map_err(|_| "a rank panicked".to_string())?)
    })
}

/// Pinned memory may be changed as soon as an upload has returned.
fn pinned_upload(kernel: &CudaKernel) -> Result<(), String> {
    let count = 8 << 20;
    let mut parcel = Pinned::new(kernel.device(), 4, count).map_err(|error| error.to_string())?;
    bytemuck::cast_slice_mut::<u8, f32>(parcel.host_bytes_mut(count)).fill(1.0);
    let mut buffer = kernel.allocate(DType::F32, count).expect("room");
    let view = View::contiguous(
        bytemuck::cast_slice::<u8, f32>(parcel.host_bytes(count)),
        [1, count, 1, 1],
    );
    let runs = [Run::leading(count)];
    let uploaded = kernel.upload(&view.expect("a row of values"), &runs, &mut buffer);
    uploaded.map_err(|error| error.to_string())?;
    parcel.host_bytes_mut(count).fill(0);
    match values(kernel, buffer).iter().all(|&value| value == 1.0) {
        true => Ok(()),
        false => Err("values changed during their upload".into()),
    }
}

/// Runs all checks.
pub fn run(tally: &mut GpuTally, pointer: &CudaKernel, pinned: &CudaKernel) {
    for (name, kernel) in [("pointer hops", pointer), ("pinned hops", pinned)] {
        let ranks = 1..=8;
        tally.group(
            &format!("transport suite, {name}"),
            ranks.map(|ranks| suite(kernel, endpoints(ranks, DEADLINE))),
        );
        tally.group(
            &format!("large parcels, {name}"),
            [(2, 5 << 20), (4, 10 << 20), (5, (1 << 21) + 3)]
                .into_iter()
                .map(|(ranks, elements)| large(kernel, ranks, elements)),
        );
    }
    tally.group("uploads from pinned memory", [pinned_upload(pointer)]);
    let staged = |ranks: usize| {
        let wires = endpoints(ranks, DEADLINE).into_iter().enumerate();
        let wires = wires.map(|(rank, wire)| Staged::new(wire, pointer.device(), rank, DEADLINE));
        suite(pointer, wires.collect())
    };
    tally.group("transport suite, staged over threads", (1..=8).map(staged));
}
