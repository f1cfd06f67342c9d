//! What one GPU can show of NCCL: a group of one rank that sends to itself, a rank whose peer never
//! comes, and, with an NCCL that lets ranks share a GPU (2.30 and later, told so by
//! NCCL_MULTI_RANK_GPU_ENABLE=1), groups of two to four under the suite for transports.

use std::sync::Arc;
use std::time::{Duration, Instant};

use encke_core::transport::{Address, Incoming, Outgoing, Transport, TransportError};
use encke_cuda::{CudaKernel, Error, Nccl, NcclTransport};

use crate::tally::Tally;
use crate::wires::{Bytes, suite};

const DEADLINE: Duration = Duration::from_secs(60);

fn alone(
    nccl: &Arc<Nccl>,
    kernel: &CudaKernel,
    deadline: Duration,
) -> Result<NcclTransport, String> {
    let words = |error: Error| error.to_string();
    let id = nccl.unique_id().map_err(words)?;
    NcclTransport::new(nccl, kernel.device(), &id, 0, 1, deadline).map_err(words)
}

fn address(tag: u64, elements: usize) -> Address {
    Address {
        peer: 0,
        tag,
        elements,
    }
}

/// Messages to itself, of several sizes and tags, posted in different orders at the two ends.
fn to_itself(nccl: &Arc<Nccl>, kernel: &CudaKernel) -> Result<(), String> {
    let mut wire = Bytes {
        kernel,
        inner: alone(nccl, kernel, DEADLINE)?,
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
            let behind = got[sent.len()..].iter().all(|&byte| byte == 0xee);
            if got[..sent.len()] != **sent || !behind {
                return Err(format!(
                    "round {round}, tag {tag}: other bytes than were sent"
                ));
            }
        }
    }
    Ok(())
}

/// A receive that nobody sends: refused or ended at the deadline, and the wire says so ever after.
fn unmatched(nccl: &Arc<Nccl>, kernel: &CudaKernel) -> Result<(), String> {
    let inner = alone(nccl, kernel, Duration::from_secs(2))?;
    let mut wire = Bytes { kernel, inner };
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

/// A rank of two whose peer never comes: the deadline ends the wait.
fn abandoned(nccl: &Arc<Nccl>, kernel: &CudaKernel) -> Result<(), String> {
    let limit = Duration::from_secs(2);
    let id = nccl.unique_id().map_err(|error| error.to_string())?;
    let start = Instant::now();
    let ended = NcclTransport::new(nccl, kernel.device(), &id, 0, 2, limit).map(|_| ());
    println!(
        "  a peer that never comes: {ended:?} after {:?}",
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

/// Wires of so many ranks, all on this GPU, that have met.
pub fn together(
    nccl: &Arc<Nccl>,
    kernel: &CudaKernel,
    ranks: usize,
    deadline: Duration,
) -> Result<Vec<NcclTransport>, String> {
    let id = nccl.unique_id().map_err(|error| error.to_string())?;
    std::thread::scope(|scope| {
        let meet = |rank: usize| {
            let (id, device) = (&id, kernel.device());
            scope.spawn(move || NcclTransport::new(nccl, device, id, rank, ranks, deadline))
        };
        let threads: Vec<_> = (0..ranks).map(meet).collect();
        let met = threads.into_iter().map(|thread| match thread.join() {
            Ok(met) => met.map_err(|error| error.to_string()),
            Err(_) => Err("a rank panicked".to_string()),
        });
        met.collect()
    })
}

/// A rank of several that falls silent: the others' deadline ends their exchange, with its number.
fn silent(nccl: &Arc<Nccl>, kernel: &CudaKernel) -> Result<(), String> {
    let mut wires = together(nccl, kernel, 2, Duration::from_secs(3))?;
    let start = Instant::now();
    let mut wire = Bytes {
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
        "  a rank that is silent: {ended:?} after {:?}",
        start.elapsed()
    );
    match ended {
        Err(TransportError::Deadline { peer: 1, .. }) if start.elapsed() < DEADLINE => Ok(()),
        other => Err(format!("{other:?} after {:?}", start.elapsed())),
    }
}

/// All of it.
pub fn run(tally: &mut Tally, kernel: &CudaKernel) {
    let nccl = match Nccl::load() {
        Ok(nccl) => nccl,
        Err(error) => {
            println!("NCCL skipped: {error}");
            return;
        }
    };
    println!("NCCL {}", nccl.version());
    let one = || -> Result<(), String> {
        let wire = alone(&nccl, kernel, DEADLINE)?;
        suite(kernel, vec![wire])
    };
    let checks: [&dyn Fn() -> Result<(), String>; 4] = [
        &one,
        &|| to_itself(&nccl, kernel),
        &|| unmatched(&nccl, kernel),
        &|| abandoned(&nccl, kernel),
    ];
    tally.group("NCCL, one rank", checks.into_iter().map(|check| check()));
    if !shares_gpus() {
        println!("NCCL of several ranks skipped: NCCL_MULTI_RANK_GPU_ENABLE=1 is not set");
        return;
    }
    let several = (2..=4).map(|ranks| suite(kernel, together(&nccl, kernel, ranks, DEADLINE)?));
    let all = several.chain(std::iter::once_with(|| silent(&nccl, kernel)));
    tally.group("NCCL, two to four ranks on one GPU", all);
}
