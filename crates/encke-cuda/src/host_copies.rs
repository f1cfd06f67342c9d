//! Asynchronous copies between the GPU's memory and pinned host memory, and hops made of two.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::{CudaStream, DriverError, sys};

use crate::allocation::DeviceAllocation;
use crate::error::{Error, Result};
use crate::hops::StagingLane;
use crate::host_memory::HostMemory;
use crate::lock::lock;

/// Bytes of a staging slot: enough that a copy reaches the bandwidth of the link.
const SLOT_BYTES: usize = 4 << 20;
/// Senders with a staging lane of their own; further senders share lanes.
const LANES: usize = 8;

static SENDERS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Numbers the threads that send.
    static SENDER: usize = SENDERS.fetch_add(1, Ordering::Relaxed);
}

/// Enqueues the copy of `bytes` bytes of a GPU's memory, from offset `at` on, to the beginning of
/// `host`, after the last copy from or to `host`.
pub(crate) fn copy_to_host(
    host: &mut HostMemory,
    stream: &Arc<CudaStream>,
    from: &DeviceAllocation,
    at: usize,
    bytes: usize,
) -> Result<()> {
    let (to, source) = (host.pointer(), from.pointer() + at as u64);
    let what = "copying from the GPU";
    enqueue(
        host,
        stream,
        (from, at, bytes),
        (&[from], &[]),
        what,
        |stream| {
            // SAFETY: `enqueue` checks both ends; neither is freed before the copy's event.
            unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), source, bytes, stream) }.result()
        },
    )
}

/// Enqueues the copy of the beginning of `host` into `bytes` bytes of a GPU's memory, from offset
/// `at` on, after the last copy from or to `host`.
pub(crate) fn copy_from_host(
    host: &mut HostMemory,
    stream: &Arc<CudaStream>,
    to: &DeviceAllocation,
    at: usize,
    bytes: usize,
) -> Result<()> {
    let (from, target) = (host.pointer().cast_const(), to.pointer() + at as u64);
    let what = "copying to the GPU";
    enqueue(
        host,
        stream,
        (to, at, bytes),
        (&[], &[to]),
        what,
        |stream| {
            // SAFETY: `enqueue` checks both ends; neither is freed before the copy's event.
            unsafe { sys::cuMemcpyHtoDAsync_v2(target, from.cast(), bytes, stream) }.result()
        },
    )
}

fn enqueue(
    host: &mut HostMemory,
    stream: &Arc<CudaStream>,
    (memory, at, bytes): (&DeviceAllocation, usize, usize),
    (reads, writes): (&[&DeviceAllocation], &[&DeviceAllocation]),
    what: &str,
    copy: impl FnOnce(sys::CUstream) -> std::result::Result<(), DriverError>,
) -> Result<()> {
    let inside = bytes <= host.bytes() && at + bytes <= memory.bytes();
    assert!(inside, "a copy beyond its memory");
    let device = memory.device();
    let event = device.enqueue_recorded(stream, what, reads, writes, |stream| {
        let ordered = host.order_after_last_copy(stream);
        let copied = ordered.and_then(|()| copy(stream.cu_stream()));
        copied.map_err(|error| Error::driver(what, error))
    })?;
    host.set_last_copy(event);
    Ok(())
}

/// Enqueues the hop of `bytes` bytes through pinned host memory; no host thread waits.
pub(crate) fn hop(from: &DeviceAllocation, to: &DeviceAllocation, bytes: usize) -> Result<()> {
    let lane = from.device().staging_lane(SENDER.with(|own| own % LANES))?;
    // Held for the whole hop: a slot's fill and drain are enqueued before its next use.
    let mut lane = lock(&lane);
    let StagingLane {
        device_to_host,
        host_to_device,
        slots,
    } = &mut *lane;
    to.mark_received_through_host();
    for at in (0..bytes).step_by(SLOT_BYTES) {
        let chunk = SLOT_BYTES.min(bytes - at);
        let create = || HostMemory::new(from.device().context(), SLOT_BYTES);
        let slot = slots.next(HostMemory::is_idle, create)?;
        copy_to_host(slot, device_to_host, from, at, chunk)?;
        copy_from_host(slot, host_to_device, to, at, chunk)?;
    }
    Ok(())
}
