//! NCCL on one GPU: a rank that sends to itself, a rank whose peer never joins, and, with an NCCL
//! that lets ranks share a GPU (2.30 and later, with NCCL_MULTI_RANK_GPU_ENABLE=1), groups of two
//! to four ranks under the transport suite.

use std::sync::Arc;
use std::time::{Duration, Instant};

use encke_core::transport::{Address, Incoming, Outgoing, Transport, TransportError};
use encke_cuda::{CudaKernel, Error, Nccl, NcclTransport};

use crate::tally::GpuTally;
use crate::wires::{ByteTransport, suite};

const DEADLINE: Duration = Duration::from_secs(60);

fn one_rank(
    nccl: &Arc<Nccl>,
    kernel: &CudaKernel,
    deadline: Duration,
) -> Result<NcclTransport, String> {
    let text = |error: Error| error.to_string();
    let id = nccl.unique_id().map_err(text)?;
    NcclTransport::new(nccl, kernel.device(), &id, 0, 1, deadline).map_err(text)
}

fn address(tag: u64, elements: usize) -> Address {
    Address {
        peer: 0,
        tag,
        elements,
    }
}

/// Messages to itself, with several sizes and tags, posted in different orders at the two ends.
fn to_itself(nccl: &Arc<Nccl>, kernel: &CudaKernel) -> Result<(), String> {
    let mut wire = ByteTransport {
        kernel,
        inner: one_rank(nccl, kernel, DEADLINE)?,
    };
    for round in 0..20 {
        let sizes = [1 + 977 * round % 9001, 300, 100_000];
        let content = |tag: usize, size: usize| -> Vec<u8> {
            (0..size)
                .map(|i| (i * 7 + tag * 31 + round * 13) as u8)
                .collect()
        };
        let sent: Vec<Vec<u8>> = (0..3).map(|tag| content(tag, sizes[tag])).collect();
        let mut received: Vec<Vec<u8>> = sizes.iter().map(|size| vec![0xee; size + 5]).collect();
        let sends: Vec<Outgoing<'_, Vec<u8>>> = sent
            .iter()
            .enumerate()
            .map(|(tag, parcel)| Outgoing {
                to: address(tag as u64, sizes[tag]),
                parcel,
            })
            .collect();
        let mut receives: Vec<Incoming<'_, Vec<u8>>> = received
            .iter_mut()
            .enumerate()
            .rev()
            .map(|(tag, parcel)| Incoming {
                from: address(tag as u64, sizes[tag]),
                parcel,
            })
            .collect();
        let mut computed = 0;
        let moved = wire
            .exchange(round, &sends, &mut receives, &mut || computed += 1)
            .map_err(|error| error.to_string())?;
        let bytes: usize = sizes.iter().sum();
        if (moved.sent_bytes, moved.received_bytes, computed) != (bytes, bytes, 1) {
            return Err(format!(
                "{moved:?} of {bytes} bytes, computed {computed} times"
            ));
        }
        for (tag, (got, sent)) in received.iter().zip(&sent).enumerate() {
            let untouched = got[sent.len()..].iter().all(|&byte| byte == 0xee);
            if got[..sent.len()] != **sent || !untouched {
                return Err(format!(
                    "round {round}, tag {tag}: received other bytes than were sent"
                ));
            }
        }
    }
    Ok(())
}

/// A receive without a send: refused or ended at the deadline, and so is the next exchange.
fn unmatched(nccl: &Arc<Nccl>, kernel: &CudaKernel) -> Result<(), String> {
    let inner = one_rank(nccl, kernel, Duration::from_secs(2))?;
    let mut wire = ByteTransport { kernel, inner };
    for round in 0..2 {
        let start = Instant::now();
        let mut parcel = vec![0; 64];
        let mut receives = [Incoming {
            from: address(1, 64),
            parcel: &mut parcel,
        }];
        let ended = wire.exchange(round, &[], &mut receives, &mut || {});
        println!("  a receive without a send: {ended:?}");
        let typed = matches!(
            ended,
            Err(TransportError::Local { rank: 0, .. } | TransportError::Deadline { rank: 0, .. })
        );
        if !typed || start.elapsed() > DEADLINE {
            return Err(format!("{ended:?} after {:?}", start.elapsed()));
        }
    }
    Ok(())
}

/// A rank of two whose peer never joins: the deadline ends the wait.
fn missing_peer(nccl: &Arc<Nccl>, kernel: &CudaKernel) -> Result<(), String> {
    let limit = Duration::from_secs(2);
    let id = nccl.unique_id().map_err(|error| error.to_string())?;
    let start = Instant::now();
    let ended = NcclTransport::new(nccl, kernel.device(), &id, 0, 2, limit).map(|_| ());
    println!(
        "  a peer that never joins: {ended:?} after {:?}",
        start.elapsed()
    );
    match ended {
        Err(Error::Deadline { .. }) if start.elapsed() < DEADLINE => Ok(()),
        other => Err(format!("{other:?} after {:?}", start.elapsed())),
    }
}

/// Whether several ranks may share a GPU; NCCL itself reads this too.
pub fn shares_gpus() -> bool {
    std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1")
}

/// The transports of `ranks` ranks on this GPU.
pub fn joined(
    nccl: &Arc<Nccl>,
    kernel: &CudaKernel,
    ranks: usize,
    deadline: Duration,
) -> Result<Vec<NcclTransport>, String> {
    let id = nccl.unique_id().map_err(|error| error.to_string())?;
    std::thread::scope(|scope| {
        let join = |rank: usize| {
            let (id, device) = (&id, kernel.device());
            scope.spawn(move || NcclTransport::new(nccl, device, id, rank, ranks, deadline))
        };
        let threads: Vec<_> = (0..ranks).map(join).collect();
        let joined = threads.into_iter().map(|thread| match thread.join() {
            Ok(joined) => joined.map_err(|error| error.to_string()),
            Err(_) => Err("a rank panicked".to_string()),
        });
        joined.collect()
    })
}

/// A rank that stops responding: the others' deadline ends their exchange and names it.
fn unresponsive(nccl: &Arc<Nccl>, kernel: &CudaKernel) -> Result<(), String> {
    let mut wires = joined(nccl, kernel, 2, Duration::from_secs(3))?;
    let start = Instant::now();
    let mut wire = ByteTransport {
        kernel,
        inner: wires.remove(0),
    };
    let mut parcel = vec![0; 64];
    let mut receives = [Incoming {
        from: Address {
            peer: 1,
            tag: 0,
            elements: 64,
        },
        parcel: &mut parcel,
    }];
    let ended = wire.exchange(0, &[], &mut receives, &mut || {});
    println!(
        "  an unresponsive rank: {ended:?} after {:?}",
        start.elapsed()
    );
    match ended {
        Err(TransportError::Deadline { peer: 1, .. }) if start.elapsed() < DEADLINE => Ok(()),
        other => Err(format!("{other:?} after {:?}", start.elapsed())),
    }
}

/// Runs all checks.
pub fn run(tally: &mut GpuTally, kernel: &CudaKernel) {
    let nccl = match Nccl::load() {
        Ok(nccl) => nccl,
        Err(error) => {
            println!("NCCL skipped: {error}");
            return;
        }
    };
    println!("NCCL {}", nccl.version());
    let one = || -> Result<(), String> {
        let wire = one_rank(&nccl, kernel, DEADLINE)?;
        suite(kernel, vec![wire])
    };
    let checks: [&dyn Fn() -> Result<(), String>; 4] = [
        &one,
        &|| to_itself(&nccl, kernel),
        &|| unmatched(&nccl, kernel),
        &|| missing_peer(&nccl, kernel),
    ];
    tally.group("NCCL, one rank", checks.into_iter().map(|check| check()));
    if !shares_gpus() {
        println!("NCCL of several ranks skipped: NCCL_MULTI_RANK_GPU_ENABLE=1 is not set");
        return;
    }
    let several = (2..=4).map(|ranks| suite(kernel, joined(&nccl, kernel, ranks, DEADLINE)?));
    let all = several.chain(std::iter::once_with(|| unresponsive(&nccl, kernel)));
    tally.group("NCCL, two to four ranks on one GPU", all);
}
