//! One GPU: its streams, and the order of operations on memory.
//!
//! Kernels run on one compute stream, except attentions, which rotate over several streams: the
//! next attention starts on multiprocessors that the previous one leaves idle, and an attention
//! that waits for a parcel does not delay those behind it. Copies to and from the host,
//! allocations and frees have streams of their own. Each allocation records its last uses (see
//! `last_uses.rs`); events made from these records are the only order between streams.
//!
//! A call of one rank runs on its caller's stream alone ([`Device::on_stream`]): that stream's
//! order is enough, nothing is recorded or waited for, and a CUDA graph can capture the call.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use cudarc::driver::{CudaContext, CudaEvent, CudaFunction, CudaStream, DriverError, result, sys};

use crate::allocation::DeviceAllocation;
use crate::error::{Error, Result};
use crate::hops::{Hops, StagingLane};
use crate::lock::lock;
use crate::program::Program;
use crate::shared_device::SharedDevice;
use crate::spare_memory::SpareMemory;

/// Streams that attentions rotate over: enough that ranks whose parcels have arrived compute while
/// other ranks on the same GPU wait for theirs.
pub(crate) const ATTENTION_STREAMS: usize = 8;

/// Launches that are delayed. A launch may be delayed as long as it is issued before any consumer
/// of its results and before any overwrite of its inputs; [`Device::flush`] names these moments.
pub(crate) trait Deferred: Send + Sync {
    /// Issues the launches that `reason` does not allow to be delayed further.
    fn flush(&self, reason: FlushReason<'_>) -> Result<()>;
}

/// Why launches may not be delayed further, and which.
#[derive(Clone, Copy)]
pub(crate) enum FlushReason<'a> {
    /// This memory is about to be used: launches that write it.
    BeforeUse(&'a [&'a DeviceAllocation]),
    /// This memory is about to be written: launches that read it.
    BeforeWrite(&'a DeviceAllocation),
    /// The thread is about to wait for other ranks: launches that the thread requested.
    BeforeWait,
    /// The thread is about to offer this memory as a receive buffer in this round: launches that
    /// the thread requested and that should not wait for the next parcel.
    BeforeReceive {
        memory: &'a DeviceAllocation,
        round: usize,
    },
    /// The host waits for the GPU: all launches.
    Synchronize,
}

/// A GPU, everything loaded on it, and the streams that calls use.
pub struct Device {
    shared: Arc<SharedDevice>,
    /// Streams of attentions. The first is the compute stream, which also runs all other kernels.
    attention: Vec<Arc<CudaStream>>,
    /// True if all streams are the caller's: its order is the order of all operations, and no
    /// events are recorded.
    on_one_stream: bool,
    last_attention: Mutex<LastAttention>,
    device_to_host: Arc<CudaStream>,
    host_to_device: Arc<CudaStream>,
    allocation_stream: Arc<CudaStream>,
    free_stream: Arc<CudaStream>,
    /// Held while an event is recorded and entered into the last uses of memory, so that an
    /// earlier event of a stream never replaces a later one where several ranks use one allocation.
    record_lock: Mutex<()>,
    deferred: OnceLock<Weak<dyn Deferred>>,
    pinned_hops: AtomicBool,
    staging_lanes: Mutex<Vec<Arc<Mutex<StagingLane>>>>,
    /// Workspaces of earlier calls, if it runs on one stream.
    spare: Mutex<SpareMemory>,
}

impl Device {
    /// Opens the GPU with this ordinal.
    pub fn open(ordinal: usize) -> Result<Arc<Device>> {
        let shared = SharedDevice::open(ordinal)?;
        let failed = |error| Error::driver(format!("opening GPU {ordinal}"), error);
        let stream = || shared.context.new_stream().map_err(failed);
        let attention = (0..ATTENTION_STREAMS).map(|_| stream());
        let attention = attention.collect::<Result<Vec<_>>>()?;
        let copies = [stream()?, stream()?, stream()?, stream()?];
        Ok(Device::with_streams(shared, attention, copies, false))
    }

    /// The number of GPUs that this process can open.
    pub fn count() -> Result<usize> {
        SharedDevice::count()
    }

    /// What distinguishes it from every other GPU, in any process.
    pub fn uuid(&self) -> Result<[u8; 16]> {
        let uuid = result::device::get_uuid(self.context().cu_device());
        let uuid = uuid.map_err(|error| Error::driver("asking for the GPU's identity", error))?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    /// The same GPU with one stream, a caller's, for everything. Nothing waits for other streams:
    /// memory of other devices may be used only if all work on it was done before.
    pub(crate) fn on_stream(&self, stream: &Arc<CudaStream>) -> Arc<Device> {
        let copies = std::array::from_fn(|_| Arc::clone(stream));
        let shared = Arc::clone(&self.shared);
        Device::with_streams(shared, vec![Arc::clone(stream)], copies, true)
    }

    fn with_streams(
        shared: Arc<SharedDevice>,
        attention: Vec<Arc<CudaStream>>,
        [
            device_to_host,
            host_to_device,
            allocation_stream,
            free_stream,
        ]: [Arc<CudaStream>; 4],
        on_one_stream: bool,
    ) -> Arc<Device> {
        Arc::new(Device {
            shared,
            attention,
            on_one_stream,
            last_attention: Mutex::default(),
            device_to_host,
            host_to_device,
            allocation_stream,
            free_stream,
            record_lock: Mutex::default(),
            deferred: OnceLock::new(),
            pinned_hops: AtomicBool::new(false),
            staging_lanes: Mutex::default(),
            spare: Mutex::default(),
        })
    }

    /// Its name, as the driver reports it.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Its compute capability: (9, 0) for a Hopper.
    pub fn capability(&self) -> (i32, i32) {
        self.shared.capability
    }

    /// The number of its multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.shared.multiprocessors
    }

    /// Dynamic shared memory that a block may use at most.
    pub(crate) fn shared_bytes(&self) -> usize {
        self.shared.shared_bytes
    }

    /// Free and total bytes of its memory.
    pub fn memory(&self) -> Result<(usize, usize)> {
        let info = self.context().mem_get_info();
        info.map_err(|error| Error::driver("asking for free memory", error))
    }

    /// Bytes that this process has allocated on it now, and the peak so far.
    pub fn allocated_bytes(&self) -> (usize, usize) {
        self.shared.allocated_bytes()
    }

    /// Launches and copies enqueued so far.
    pub fn enqueued(&self) -> usize {
        self.shared.enqueued.load(Ordering::Relaxed)
    }

    /// Adds an allocation to the counters.
    pub(crate) fn count_allocated(&self, bytes: usize) {
        self.shared.count_allocated(bytes);
    }

    /// Removes a freed allocation from the counters.
    pub(crate) fn count_freed(&self, bytes: usize) {
        self.shared.count_freed(bytes);
    }

    /// The stream of all kernels but attentions.
    pub(crate) fn compute(&self) -> &Arc<CudaStream> {
        &self.attention[0]
    }

    /// Sets the queue of delayed launches. The first one set stays.
    pub(crate) fn set_deferred(&self, deferred: Weak<dyn Deferred>) {
        let _ = self.deferred.set(deferred);
    }

    /// Issues the launches that `reason` does not allow to be delayed further.
    pub(crate) fn flush(&self, reason: FlushReason<'_>) -> Result<()> {
        let deferred = self.deferred.get().and_then(Weak::upgrade);
        deferred.map_or(Ok(()), |deferred| deferred.flush(reason))
    }

    /// Issues all delayed launches: an attention may have been held back to fuse it with the next.
    pub fn flush_deferred(&self) -> Result<()> {
        self.flush(FlushReason::Synchronize)
    }

    /// Enqueues an attention on the next attention stream, after everything it depends on; `work`
    /// also gets the address of that stream's counters. An attention that continues the previous
    /// one stays on its stream, since it has to wait for that one anyway. All others rotate
    /// strictly: a stream that got more work than the others would end alone, and nothing would
    /// start on the multiprocessors that its last attentions leave idle.
    pub(crate) fn attend(
        &self,
        reads: &[&DeviceAllocation],
        writes: &[&DeviceAllocation],
        counters: &[DeviceAllocation],
        work: impl FnOnce(&CudaStream, u64) -> std::result::Result<(), DriverError>,
    ) -> Result<()> {
        let index = {
            let last = lock(&self.last_attention);
            let continues = |event| writes.iter().any(|x| x.last_uses().last_write_is(event));
            match last.event.as_ref().is_some_and(continues) {
                true => last.stream,
                false => (last.stream + 1) % self.attention.len(),
            }
        };
        let mut writes = writes.to_vec();
        writes.push(&counters[index]);
        let what = "attention";
        let stream = &self.attention[index];
        let event = self.enqueue_ordered(stream, reads, &writes, what, |stream| {
            work(stream, counters[index].pointer()).map_err(|error| Error::driver(what, error))
        })?;
        *lock(&self.last_attention) = LastAttention {
            stream: index,
            event,
        };
        Ok(())
    }

    /// The stream for copies to the host.
    pub(crate) fn device_to_host(&self) -> &Arc<CudaStream> {
        &self.device_to_host
    }

    /// The stream for copies from the host.
    pub(crate) fn host_to_device(&self) -> &Arc<CudaStream> {
        &self.host_to_device
    }

    /// The stream of allocations. It is not a compute stream: an allocation that reuses freed
    /// memory waits until the last use of that memory is done.
    pub(crate) fn allocation_stream(&self) -> &Arc<CudaStream> {
        &self.allocation_stream
    }

    /// The stream of frees, which waits for the last use of the memory.
    pub(crate) fn free_stream(&self) -> &Arc<CudaStream> {
        &self.free_stream
    }

    /// All streams that compute or copy.
    fn streams(&self) -> Vec<Arc<CudaStream>> {
        let copies = [&self.device_to_host, &self.host_to_device];
        let mut all: Vec<_> = copies.into_iter().chain(&self.attention).cloned().collect();
        for lane in lock(&self.staging_lanes).iter() {
            all.extend(lock(lane).streams().map(Arc::clone));
        }
        all
    }

    /// The context everything lives in.
    pub(crate) fn context(&self) -> &Arc<CudaContext> {
        &self.shared.context
    }

    /// Whether all its work is on this stream.
    pub(crate) fn runs_on(&self, stream: sys::CUstream) -> bool {
        self.on_one_stream && self.compute().cu_stream() == stream
    }

    /// Refuses what cannot be part of a CUDA graph, if the caller's stream is being captured.
    pub(crate) fn refuse_capture(&self, stream: sys::CUstream, what: &str) -> Result<()> {
        match self.is_captured(stream)? {
            false => Ok(()),
            true => Err(Error::Unsupported {
                what: format!("{what} while a CUDA graph is captured"),
            }),
        }
    }

    /// Memory of an earlier call with this size, whose uses its one stream has in order.
    pub(crate) fn take_spare(&self, bytes: usize) -> Option<sys::CUdeviceptr> {
        match self.keeps_memory() {
            true => lock(&self.spare).take(bytes),
            false => None,
        }
    }

    /// Keeps memory for later calls; returns what must be freed.
    pub(crate) fn keep_spare(&self, bytes: usize, at: sys::CUdeviceptr) -> Vec<sys::CUdeviceptr> {
        match self.keeps_memory() {
            true => lock(&self.spare).keep(bytes, at),
            false => vec![at],
        }
    }

    /// Whether memory is kept between calls: a graph must have its own, because it runs whenever
    /// its owner wants.
    fn keeps_memory(&self) -> bool {
        let captured = || self.is_captured(self.compute().cu_stream());
        self.on_one_stream && captured().is_ok_and(|captured| !captured)
    }

    /// Whether a CUDA graph captures this stream, which must be valid.
    fn is_captured(&self, stream: sys::CUstream) -> Result<bool> {
        let failed = |error| Error::driver("asking whether a stream is captured", error);
        // A thread's first question has no context; the default stream has no other.
        self.context().bind_to_thread().map_err(failed)?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the caller's stream is valid; the status is written before it is read.
        let asked = unsafe { sys::cuStreamIsCapturing(stream, &raw mut status) }.result();
        asked.map_err(failed)?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// How parcels go from rank to rank on this GPU.
    pub fn hops(&self) -> Hops {
        match self.pinned_hops.load(Ordering::Relaxed) {
            true => Hops::Pinned,
            false => Hops::Pointer,
        }
    }

    /// Chooses how parcels go from rank to rank on this GPU.
    pub fn set_hops(&self, hops: Hops) {
        let pinned = hops == Hops::Pinned;
        self.pinned_hops.store(pinned, Ordering::Relaxed);
    }

    /// The staging lane with this number, created on first use.
    pub(crate) fn staging_lane(&self, number: usize) -> Result<Arc<Mutex<StagingLane>>> {
        let mut lanes = lock(&self.staging_lanes);
        while lanes.len() <= number {
            let lane = StagingLane::new(self.stream()?, self.stream()?);
            lanes.push(Arc::new(Mutex::new(lane)));
        }
        Ok(Arc::clone(&lanes[number]))
    }

    /// A new stream.
    pub(crate) fn stream(&self) -> Result<Arc<CudaStream>> {
        let stream = self.context().new_stream();
        stream.map_err(|error| Error::driver("creating a stream", error))
    }

    /// An instant on the GPU's clock: the completion of everything requested so far.
    pub fn instant(&self) -> Result<Instant> {
        self.flush_deferred()?;
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
        let (compute, mut others) = (self.compute(), self.attention[1..].iter());
        let joined = others.try_for_each(|stream| compute.wait(&stream.record_event(None)?));
        let event = joined.and_then(|()| compute.record_event(Some(flags)));
        let event = event.map_err(|error| Error::driver("recording a timing event", error))?;
        Ok(Instant(event))
    }

    /// Waits until all kernels and copies requested so far are done.
    pub fn synchronize(&self) -> Result<()> {
        self.flush_deferred()?;
        let mut streams = self.streams().into_iter();
        let done = streams.try_for_each(|stream| stream.synchronize());
        done.map_err(|error| Error::driver("waiting for the GPU", error))
    }

    /// An entry point of a program, compiled and loaded on first use.
    pub(crate) fn function(
        &self,
        program: &Program,
        entry: &'static str,
        shared_bytes: usize,
    ) -> Result<CudaFunction> {
        let loading = || self.refuse_first_use("loading a kernel");
        self.shared.function(program, entry, shared_bytes, loading)
    }

    /// Refuses what only the first call of a shape does, if a CUDA graph captures this call.
    pub(crate) fn refuse_first_use(&self, what: &str) -> Result<()> {
        match self.on_one_stream {
            true => {
                let what = format!("{what} for the first time (run the call once before)");
                self.refuse_capture(self.compute().cu_stream(), &what)
            }
            false => Ok(()),
        }
    }

    /// Waits until memory that other streams share is written, if no events order them.
    pub(crate) fn complete_first_use(&self) -> Result<()> {
        match self.on_one_stream {
            true => self.synchronize(),
            false => Ok(()),
        }
    }

    /// Enqueues work on a stream, after everything it depends on.
    pub(crate) fn enqueue(
        &self,
        stream: &Arc<CudaStream>,
        what: &str,
        reads: &[&DeviceAllocation],
        writes: &[&DeviceAllocation],
        work: impl FnOnce(&CudaStream) -> std::result::Result<(), DriverError>,
    ) -> Result<()> {
        let work = |stream: &CudaStream| work(stream).map_err(|error| Error::driver(what, error));
        self.enqueue_ordered(stream, reads, writes, what, work)
            .map(drop)
    }

    /// The same for work that may fail with any error; returns the event of its completion.
    pub(crate) fn enqueue_recorded(
        &self,
        stream: &Arc<CudaStream>,
        what: &str,
        reads: &[&DeviceAllocation],
        writes: &[&DeviceAllocation],
        work: impl FnOnce(&CudaStream) -> Result<()>,
    ) -> Result<Arc<CudaEvent>> {
        match self.enqueue_ordered(stream, reads, writes, what, work)? {
            Some(event) => Ok(event),
            None => {
                let event = stream.record_event(None);
                let event = event.map_err(|error| Error::driver(what, error))?;
                Ok(Arc::new(event))
            }
        }
    }

    /// The same; returns no event if all work is on one stream.
    fn enqueue_ordered(
        &self,
        stream: &Arc<CudaStream>,
        reads: &[&DeviceAllocation],
        writes: &[&DeviceAllocation],
        what: &str,
        work: impl FnOnce(&CudaStream) -> Result<()>,
    ) -> Result<Option<Arc<CudaEvent>>> {
        self.flush(FlushReason::BeforeUse(reads))?;
        self.flush(FlushReason::BeforeUse(writes))?;
        for memory in reads.iter().chain(writes) {
            memory.flush_fill(stream)?;
        }
        self.enqueue_filled(stream, what, reads, writes, work)
    }

    /// The same where no fill of `reads` and `writes` is pending.
    pub(crate) fn enqueue_filled(
        &self,
        stream: &Arc<CudaStream>,
        what: &str,
        reads: &[&DeviceAllocation],
        writes: &[&DeviceAllocation],
        work: impl FnOnce(&CudaStream) -> Result<()>,
    ) -> Result<Option<Arc<CudaEvent>>> {
        let failed = |error| Error::driver(what, error);
        self.context().bind_to_thread().map_err(failed)?;
        if self.on_one_stream {
            self.shared.enqueued.fetch_add(1, Ordering::Relaxed);
            return work(stream).map(|()| None);
        }
        for memory in reads {
            let uses = memory.last_uses();
            let mut events = uses.events_before_read(stream);
            let waits = events.try_for_each(|event| stream.wait(event));
            waits.map_err(failed)?;
        }
        for memory in writes {
            let uses = memory.last_uses();
            let mut events = uses.events_before_write(stream);
            let waits = events.try_for_each(|event| stream.wait(event));
            waits.map_err(failed)?;
        }
        let worked = work(stream);
        self.shared.enqueued.fetch_add(1, Ordering::Relaxed);
        // Recorded even if `work` failed: it may have enqueued a part.
        let recording = lock(&self.record_lock);
        let event = Arc::new(stream.record_event(None).map_err(failed)?);
        for memory in reads {
            memory.last_uses().record_read(stream, &event);
            memory.record_foreign_use(stream, &event);
        }
        for memory in writes {
            memory.last_uses().record_write(stream, &event);
            memory.record_foreign_use(stream, &event);
        }
        drop(recording);
        worked.map(|()| Some(event))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let spare = self.spare.get_mut();
        let spare = spare.unwrap_or_else(std::sync::PoisonError::into_inner);
        for pointer in spare.take_all() {
            // SAFETY: memory of this device that nothing refers to; a free waits for its uses.
            let _ = unsafe { result::free_sync(pointer) };
        }
    }
}

/// The attention enqueued last: the index of its stream, and the event of its completion.
#[derive(Default)]
struct LastAttention {
    stream: usize,
    event: Option<Arc<CudaEvent>>,
}

/// An instant on the GPU's own clock.
pub struct Instant(CudaEvent);

impl Instant {
    /// Milliseconds from an earlier instant to this one. Waits until this one has passed.
    pub fn since(&self, earlier: &Instant) -> Result<f64> {
        let waited = self.0.synchronize();
        let elapsed = waited.and_then(|()| earlier.0.elapsed_ms(&self.0));
        elapsed
            .map(f64::from)
            .map_err(|error| Error::driver("reading the GPU's clock", error))
    }
}
