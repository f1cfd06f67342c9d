//! One GPU: its context, its streams, its loaded programs, and the order of operations on memory.
//!
//! Kernels run on one compute stream, except attentions, which rotate over several streams: the
//! next attention starts on multiprocessors that the previous one leaves idle, and an attention
//! that waits for a parcel does not delay those behind it. Copies to and from the host,
//! allocations and frees have streams of their own. Each allocation records its last uses (see
//! `last_uses.rs`); events made from these records are the only order between streams.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use cudarc::driver::{CudaContext, CudaEvent, CudaFunction, CudaStream, DriverError, result, sys};

use crate::allocation::DeviceAllocation;
use crate::cache::Cache;
use crate::error::{Error, Result};
use crate::hops::{Hops, StagingLane};
use crate::library;
use crate::nvrtc::Nvrtc;
use crate::program::Program;

/// Streams that attentions rotate over: enough that ranks whose parcels have arrived compute while
/// other ranks on the same GPU wait for theirs.
pub(crate) const ATTENTION_STREAMS: usize = 8;
/// Dynamic shared memory a block may use without raising the function's limit.
const DEFAULT_SHARED_BYTES: usize = 48 * 1024;

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

/// A program's name and macros, and one of its entry points.
type FunctionKey = (&'static str, Vec<String>, &'static str);

/// A GPU and everything loaded on it.
pub struct Device {
    context: Arc<CudaContext>,
    /// Streams of attentions. The first is the compute stream, which also runs all other kernels.
    attention: Vec<Arc<CudaStream>>,
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
    nvrtc: Nvrtc,
    cache: Cache,
    capability: (i32, i32),
    name: String,
    multiprocessors: u32,
    shared_bytes: usize,
    functions: Mutex<HashMap<FunctionKey, (CudaFunction, usize)>>,
    allocated: AtomicUsize,
    peak: AtomicUsize,
    enqueued: AtomicUsize,
}

/// Locks, also after another thread panicked while it held the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device {
    /// Opens the GPU with this ordinal.
    pub fn open(ordinal: usize) -> Result<Arc<Device>> {
        // cudarc panics without a driver. Loading it here first turns that into an error, and
        // cudarc then finds it already loaded.
        let (driver, _) = library::find(&library::DRIVER)?;
        std::mem::forget(driver);
        result::init().map_err(|error| Error::driver("starting the CUDA driver", error))?;
        let found = CudaContext::device_count();
        let found = found.map_err(|error| Error::driver("counting GPUs", error))? as usize;
        if ordinal >= found {
            return Err(Error::NoDevice {
                asked: ordinal,
                found,
            });
        }
        let failed = |error| Error::driver(format!("opening GPU {ordinal}"), error);
        let context = CudaContext::new(ordinal).map_err(failed)?;
        // SAFETY: this crate orders streams itself, by the events that allocations record.
        unsafe { context.disable_event_tracking() };
        use sys::CUdevice_attribute as Attribute;
        let attribute = |attribute| context.attribute(attribute).map_err(failed);
        let multiprocessors =
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let shared_bytes =
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize;
        keep_freed_memory_in_pool(&context).map_err(failed)?;
        let stream = || context.new_stream().map_err(failed);
        Ok(Arc::new(Device {
            attention: (0..ATTENTION_STREAMS)
                .map(|_| stream())
                .collect::<Result<_>>()?,
            last_attention: Mutex::default(),
            device_to_host: stream()?,
            host_to_device: stream()?,
            allocation_stream: stream()?,
            free_stream: stream()?,
            record_lock: Mutex::default(),
            deferred: OnceLock::new(),
            pinned_hops: AtomicBool::new(false),
            staging_lanes: Mutex::default(),
            nvrtc: Nvrtc::load()?,
            cache: Cache::of_user(),
            capability: context.compute_capability().map_err(failed)?,
            name: context.name().map_err(failed)?,
            multiprocessors,
            shared_bytes,
            context: Arc::clone(&context),
            functions: Mutex::default(),
            allocated: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            enqueued: AtomicUsize::new(0),
        }))
    }

    /// Its name, as the driver reports it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its compute capability: (9, 0) for a Hopper.
    pub fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// The number of its multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Dynamic shared memory that a block may use at most.
    pub(crate) fn shared_bytes(&self) -> usize {
        self.shared_bytes
    }

    /// Free and total bytes of its memory.
    pub fn memory(&self) -> Result<(usize, usize)> {
        let info = self.context.mem_get_info();
        info.map_err(|error| Error::driver("asking for free memory", error))
    }

    /// Bytes that this process has allocated on it now, and the peak so far.
    pub fn allocated_bytes(&self) -> (usize, usize) {
        let load = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
        (load(&self.allocated), load(&self.peak))
    }

    /// Launches and copies enqueued so far.
    pub fn enqueued(&self) -> usize {
        self.enqueued.load(Ordering::Relaxed)
    }

    /// Adds an allocation to the counters.
    pub(crate) fn count_allocated(&self, bytes: usize) {
        let now = self.allocated.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    /// Removes a freed allocation from the counters.
    pub(crate) fn count_freed(&self, bytes: usize) {
        self.allocated.fetch_sub(bytes, Ordering::Relaxed);
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
                false => (last.stream + 1) % ATTENTION_STREAMS,
            }
        };
        let mut writes = writes.to_vec();
        writes.push(&counters[index]);
        let what = "attention";
        let stream = &self.attention[index];
        let event = self.enqueue_recorded(stream, what, reads, &writes, |stream| {
            work(stream, counters[index].pointer()).map_err(|error| Error::driver(what, error))
        })?;
        *lock(&self.last_attention) = LastAttention {
            stream: index,
            event: Some(event),
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
        &self.context
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
        let stream = self.context.new_stream();
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
        let mut functions = lock(&self.functions);
        let key = (program.name, program.defines.clone(), entry);
        let failed = |error| Error::driver(format!("loading {} ({entry})", program.name), error);
        let (function, limit) = match functions.entry(key) {
            Entry::Occupied(loaded) => loaded.into_mut(),
            Entry::Vacant(vacant) => {
                let built = program.build(&self.nvrtc, &self.cache, self.capability)?;
                let image = cudarc::nvrtc::Ptx::from_binary(built.cubin);
                let module = self.context.load_module(image).map_err(failed)?;
                let function = module.load_function(entry).map_err(failed)?;
                vacant.insert((function, DEFAULT_SHARED_BYTES))
            }
        };
        if shared_bytes > *limit {
            if shared_bytes > self.shared_bytes {
                return Err(Error::Unsupported {
                    what: format!(
                        "{} on {}: it needs {shared_bytes} bytes of shared memory, a block has {}",
                        program.name, self.name, self.shared_bytes
                    ),
                });
            }
            self.context.bind_to_thread().map_err(failed)?;
            let attribute =
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let set = function.set_attribute(attribute, shared_bytes as i32);
            set.map_err(failed)?;
            *limit = shared_bytes;
        }
        Ok(function.clone())
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
        self.enqueue_recorded(stream, what, reads, writes, work)
            .map(|_| ())
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
        self.flush(FlushReason::BeforeUse(reads))?;
        self.flush(FlushReason::BeforeUse(writes))?;
        for memory in reads.iter().chain(writes) {
            memory.flush_zero_fill(stream)?;
        }
        self.enqueue_zero_filled(stream, what, reads, writes, work)
    }

    /// The same where no zero-fill of `reads` and `writes` is pending.
    pub(crate) fn enqueue_zero_filled(
        &self,
        stream: &Arc<CudaStream>,
        what: &str,
        reads: &[&DeviceAllocation],
        writes: &[&DeviceAllocation],
        work: impl FnOnce(&CudaStream) -> Result<()>,
    ) -> Result<Arc<CudaEvent>> {
        let failed = |error| Error::driver(what, error);
        self.context.bind_to_thread().map_err(failed)?;
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
        self.enqueued.fetch_add(1, Ordering::Relaxed);
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
        worked.map(|()| event)
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

/// Keeps freed memory in the driver's pool, so that later allocations do not go to the system.
fn keep_freed_memory_in_pool(context: &Arc<CudaContext>) -> std::result::Result<(), DriverError> {
    let mut threshold = u64::MAX;
    // SAFETY: the device is open, and the attribute is a 64-bit number as documented.
    unsafe {
        let pool = result::device::get_default_mem_pool(context.cu_device())?;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut threshold).cast()).result()
    }
}
