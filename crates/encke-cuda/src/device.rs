//! One GPU: its context, its streams, its loaded programs, and the order in which memory is used.
//!
//! Everything computed goes to one stream, but for attentions, which take turns on several: at the end
//! of one, when multiprocessors fall idle, the next begins, and one that waits for a parcel does not
//! hold up those behind it. Copies to and from the host, allocating and freeing have streams of their
//! own. Each piece of memory remembers who used it last (see `order.rs`), and that
//! is all the order there is.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use cudarc::driver::{CudaContext, CudaEvent, CudaFunction, CudaStream, DriverError, result, sys};

use crate::cache::Cache;
use crate::error::{Error, Result};
use crate::hops::{Hops, Way};
use crate::library;
use crate::memory::Memory;
use crate::nvrtc::Nvrtc;
use crate::program::Program;

/// Streams that attentions take turns on: as many as ranks may have to wait for their parcels while
/// another one can compute.
pub(crate) const LANES: usize = 8;
/// Shared memory a block has without asking for more.
const ALWAYS_SHARED: usize = 48 * 1024;

/// What is enqueued later than it was asked for: nobody can tell, if only it is told in time.
pub(crate) trait Deferred: Send + Sync {
    /// Enqueues what may not be put off any longer.
    fn catch_up(&self, reason: Reason<'_>) -> Result<()>;
}

/// Why something may not be put off any longer.
#[derive(Clone, Copy)]
pub(crate) enum Reason<'a> {
    /// This memory is about to be used: whatever writes it.
    Used(&'a [&'a Memory]),
    /// This memory is about to be written: whatever reads it.
    Written(&'a Memory),
    /// The thread is about to wait for others: whatever it has asked for.
    Leaving,
    /// The thread is about to hand in this memory to be overwritten, in this round: whatever it has
    /// asked for that had better not wait for the next parcel.
    Vacated { memory: &'a Memory, round: usize },
    /// The GPU is waited for: everything.
    Waited,
}

/// A program's name and macros, and one of its entry points.
type Key = (&'static str, Vec<String>, &'static str);

/// A GPU and everything loaded on it.
pub struct Device {
    context: Arc<CudaContext>,
    compute: Arc<CudaStream>,
    /// All lanes but the first, which is the stream that everything else is computed on.
    beside: Vec<Arc<CudaStream>>,
    last_attention: Mutex<LastAttention>,
    outward: Arc<CudaStream>,
    inward: Arc<CudaStream>,
    taking: Arc<CudaStream>,
    freeing: Arc<CudaStream>,
    /// Held while an event is recorded and noted, so that a later event of a stream is never
    /// overwritten by an earlier one where several ranks use the same memory.
    noting: Mutex<()>,
    late: OnceLock<Weak<dyn Deferred>>,
    pinned_hops: AtomicBool,
    ways: Mutex<Vec<Arc<Mutex<Way>>>>,
    nvrtc: Nvrtc,
    cache: Cache,
    capability: (i32, i32),
    name: String,
    processors: u32,
    shared_bytes: usize,
    functions: Mutex<HashMap<Key, (CudaFunction, usize)>>,
    allocated: AtomicUsize,
    peak: AtomicUsize,
    enqueued: AtomicUsize,
}

impl Device {
    /// The GPU with this number.
    pub fn open(ordinal: usize) -> Result<Arc<Device>> {
        // cudarc panics where there is no driver, so it is found first; the loader then has it.
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
        // SAFETY: this crate orders streams itself, by the events of `Memory`.
        unsafe { context.disable_event_tracking() };
        use sys::CUdevice_attribute as Attribute;
        let number = |attribute| context.attribute(attribute).map_err(failed);
        let processors = number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let shared_bytes =
            number(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize;
        keep_freed_memory(&context).map_err(failed)?;
        let beside: std::result::Result<_, _> = (1..LANES).map(|_| context.new_stream()).collect();
        Ok(Arc::new(Device {
            compute: context.new_stream().map_err(failed)?,
            beside: beside.map_err(failed)?,
            last_attention: Mutex::default(),
            outward: context.new_stream().map_err(failed)?,
            inward: context.new_stream().map_err(failed)?,
            taking: context.new_stream().map_err(failed)?,
            freeing: context.new_stream().map_err(failed)?,
            noting: Mutex::default(),
            late: OnceLock::new(),
            pinned_hops: AtomicBool::new(false),
            ways: Mutex::default(),
            nvrtc: Nvrtc::load()?,
            cache: Cache::of_user(),
            capability: context.compute_capability().map_err(failed)?,
            name: context.name().map_err(failed)?,
            processors,
            shared_bytes,
            context,
            functions: Mutex::default(),
            allocated: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            enqueued: AtomicUsize::new(0),
        }))
    }

    /// What it calls itself.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its compute capability: (9, 0) for a Hopper.
    pub fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// How many multiprocessors it has.
    pub fn processors(&self) -> u32 {
        self.processors
    }

    /// Shared memory a block may ask for.
    pub(crate) fn shared_bytes(&self) -> usize {
        self.shared_bytes
    }

    /// Bytes free and in all.
    pub fn memory(&self) -> Result<(usize, usize)> {
        let told = self.context.mem_get_info();
        told.map_err(|error| Error::driver("asking for free memory", error))
    }

    /// Bytes that this process has allocated on it now, and the most it ever had.
    pub fn allocated_bytes(&self) -> (usize, usize) {
        let told = |of: &AtomicUsize| of.load(Ordering::Relaxed);
        (told(&self.allocated), told(&self.peak))
    }

    /// Launches and copies enqueued so far.
    pub fn enqueued(&self) -> usize {
        self.enqueued.load(Ordering::Relaxed)
    }

    /// Books memory that was taken.
    pub(crate) fn take(&self, bytes: usize) {
        let now = self.allocated.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    /// Books memory that was given back.
    pub(crate) fn give_back(&self, bytes: usize) {
        self.allocated.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// The stream everything is computed on.
    pub(crate) fn compute(&self) -> &Arc<CudaStream> {
        &self.compute
    }

    /// Names who enqueues late, once.
    pub(crate) fn set_late(&self, late: Weak<dyn Deferred>) {
        let _ = self.late.set(late);
    }

    /// Has everything enqueued that may not be put off any longer.
    pub(crate) fn catch_up(&self, reason: Reason<'_>) -> Result<()> {
        let late = self.late.get().and_then(Weak::upgrade);
        late.map_or(Ok(()), |late| late.catch_up(reason))
    }

    /// Has everything enqueued that was asked for: attentions may wait for others to join them.
    pub fn launch_waiting(&self) -> Result<()> {
        self.catch_up(Reason::Waited)
    }

    /// Enqueues an attention on the next lane, after everything it depends on; `work` is told where
    /// it may count. Lanes take turns: where ranks share a GPU, one's job begins
    /// on the multiprocessors that another's has left. Only what continues the last attention stays
    /// on its lane: it has to wait for that one anyway. Strictly in turn, because a lane that has got
    /// more of the work ends alone, and nothing begins where its jobs leave multiprocessors idle.
    pub(crate) fn attend(
        &self,
        reads: &[&Memory],
        writes: &[&Memory],
        counters: &[Memory],
        work: impl FnOnce(&CudaStream, u64) -> std::result::Result<(), DriverError>,
    ) -> Result<()> {
        let last = || {
            let last = self.last_attention.lock();
            last.unwrap_or_else(PoisonError::into_inner)
        };
        let lane = {
            let last = last();
            let continues = |event| writes.iter().any(|memory| memory.marks().ends_with(event));
            match last.event.as_ref().is_some_and(continues) {
                true => last.lane,
                false => (last.lane + 1) % LANES,
            }
        };
        let mut writes = writes.to_vec();
        writes.push(&counters[lane]);
        let what = "attention";
        let event = self.place(self.lane(lane), what, reads, &writes, |stream| {
            work(stream, counters[lane].pointer()).map_err(|error| Error::driver(what, error))
        })?;
        *last() = LastAttention {
            lane,
            event: Some(event),
        };
        Ok(())
    }

    fn lane(&self, number: usize) -> &Arc<CudaStream> {
        match number {
            0 => &self.compute,
            _ => &self.beside[number - 1],
        }
    }

    /// The stream for copies to the host.
    pub(crate) fn outward(&self) -> &Arc<CudaStream> {
        &self.outward
    }

    /// The stream for copies from the host.
    pub(crate) fn inward(&self) -> &Arc<CudaStream> {
        &self.inward
    }

    /// The stream that memory is allocated on. Not one that computes, which would wait with it until
    /// memory that is handed out again is used no longer.
    pub(crate) fn taking(&self) -> &Arc<CudaStream> {
        &self.taking
    }

    /// The stream that memory is freed on, which waits for its last use.
    pub(crate) fn freeing(&self) -> &Arc<CudaStream> {
        &self.freeing
    }

    /// All streams that anything is computed or copied on.
    pub(crate) fn streams(&self) -> Vec<Arc<CudaStream>> {
        let own = [&self.outward, &self.inward, &self.compute];
        let mut all: Vec<_> = own.into_iter().chain(&self.beside).cloned().collect();
        let ways = self.ways.lock().unwrap_or_else(PoisonError::into_inner);
        for way in ways.iter() {
            let way = way.lock().unwrap_or_else(PoisonError::into_inner);
            all.extend(way.streams().map(Arc::clone));
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

    /// One of the ways through the host, made if it was not.
    pub(crate) fn way(&self, number: usize) -> Result<Arc<Mutex<Way>>> {
        let mut ways = self.ways.lock().unwrap_or_else(PoisonError::into_inner);
        while ways.len() <= number {
            ways.push(Arc::new(Mutex::new(Way::new(self)?)));
        }
        Ok(Arc::clone(&ways[number]))
    }

    /// A stream of one's own.
    pub(crate) fn stream(&self) -> Result<Arc<CudaStream>> {
        let made = self.context.new_stream();
        made.map_err(|error| Error::driver("making a stream", error))
    }

    /// The moment at which everything asked for so far is computed.
    pub fn instant(&self) -> Result<Instant> {
        self.launch_waiting()?;
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
        let mut beside = self.beside.iter();
        let waited = beside.try_for_each(|lane| self.compute.wait(&lane.record_event(None)?));
        let event = waited.and_then(|()| self.compute.record_event(Some(flags)));
        let event = event.map_err(|error| Error::driver("marking a moment", error))?;
        Ok(Instant(event))
    }

    /// Waits until everything computed is there, and every parcel has arrived.
    pub fn synchronize(&self) -> Result<()> {
        self.launch_waiting()?;
        let mut streams = self.streams().into_iter();
        let done = streams.try_for_each(|stream| stream.synchronize());
        done.map_err(|error| Error::driver("waiting for the GPU", error))
    }

    /// An entry point of a program, compiled and loaded if it was not.
    pub(crate) fn function(
        &self,
        program: &Program,
        entry: &'static str,
        shared_bytes: usize,
    ) -> Result<CudaFunction> {
        let mut functions = self
            .functions
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let key = (program.name, program.defines.clone(), entry);
        let failed = |error| Error::driver(format!("loading {} ({entry})", program.name), error);
        let (function, allowed) = match functions.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                let built = program.build(&self.nvrtc, &self.cache, self.capability)?;
                let image = cudarc::nvrtc::Ptx::from_binary(built.cubin);
                let module = self.context.load_module(image).map_err(failed)?;
                let function = module.load_function(entry).map_err(failed)?;
                place.insert((function, ALWAYS_SHARED))
            }
        };
        if shared_bytes > *allowed {
            if shared_bytes > self.shared_bytes {
                return Err(Error::Unsupported {
                    what: format!(
                        "{} on {}: it needs {shared_bytes} bytes of shared memory, a block has {}",
                        program.name, self.name, self.shared_bytes
                    ),
                });
            }
            self.context.bind_to_thread().map_err(failed)?;
            let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let set = function.set_attribute(most, shared_bytes as i32);
            set.map_err(failed)?;
            *allowed = shared_bytes;
        }
        Ok(function.clone())
    }

    /// Enqueues work on a stream, after everything it depends on.
    pub(crate) fn enqueue(
        &self,
        stream: &Arc<CudaStream>,
        what: &str,
        reads: &[&Memory],
        writes: &[&Memory],
        work: impl FnOnce(&CudaStream) -> std::result::Result<(), DriverError>,
    ) -> Result<()> {
        let work = |stream: &CudaStream| work(stream).map_err(|error| Error::driver(what, error));
        self.place(stream, what, reads, writes, work).map(|_| ())
    }

    /// The same for work that fails in other ways than a driver's, and the event of its end.
    pub(crate) fn place(
        &self,
        stream: &Arc<CudaStream>,
        what: &str,
        reads: &[&Memory],
        writes: &[&Memory],
        work: impl FnOnce(&CudaStream) -> Result<()>,
    ) -> Result<Arc<CudaEvent>> {
        self.catch_up(Reason::Used(reads))?;
        self.catch_up(Reason::Used(writes))?;
        for memory in reads.iter().chain(writes) {
            memory.settle(stream)?;
        }
        self.place_settled(stream, what, reads, writes, work)
    }

    /// The same where nothing is left to be cleared.
    pub(crate) fn place_settled(
        &self,
        stream: &Arc<CudaStream>,
        what: &str,
        reads: &[&Memory],
        writes: &[&Memory],
        work: impl FnOnce(&CudaStream) -> Result<()>,
    ) -> Result<Arc<CudaEvent>> {
        let failed = |error| Error::driver(what, error);
        self.context.bind_to_thread().map_err(failed)?;
        for memory in reads {
            let marks = memory.marks();
            let mut waits = marks.before_reading(stream);
            waits
                .try_for_each(|event| stream.wait(event))
                .map_err(failed)?;
        }
        for memory in writes {
            let marks = memory.marks();
            let mut waits = marks.before_writing(stream);
            waits
                .try_for_each(|event| stream.wait(event))
                .map_err(failed)?;
        }
        let worked = work(stream);
        self.enqueued.fetch_add(1, Ordering::Relaxed);
        // Noted even where it failed: a part of it may be on its way.
        let noting = self.noting.lock().unwrap_or_else(PoisonError::into_inner);
        let event = Arc::new(stream.record_event(None).map_err(failed)?);
        for memory in reads {
            memory.marks().read(stream, &event);
            memory.note(stream, &event);
        }
        for memory in writes {
            memory.marks().written(stream, &event);
            memory.note(stream, &event);
        }
        drop(noting);
        worked.map(|()| event)
    }
}

/// The attention that was enqueued last: its lane, and the event of its end.
#[derive(Default)]
struct LastAttention {
    lane: usize,
    event: Option<Arc<CudaEvent>>,
}

/// A moment on the GPU's own clock.
pub struct Instant(CudaEvent);

impl Instant {
    /// Milliseconds from an earlier moment to this one, once both have come.
    pub fn since(&self, earlier: &Instant) -> Result<f64> {
        let waited = self.0.synchronize();
        let told = waited.and_then(|()| earlier.0.elapsed_ms(&self.0));
        told.map(f64::from)
            .map_err(|error| Error::driver("reading the GPU's clock", error))
    }
}

/// Freed memory stays with the process, so that buffers are taken from a pool and not from the
/// system.
fn keep_freed_memory(
    context: &Arc<CudaContext>,
) -> std::result::Result<(), cudarc::driver::DriverError> {
    let mut threshold = u64::MAX;
    // SAFETY: the device is open, and the attribute is a 64-bit number as documented.
    unsafe {
        let pool = result::device::get_default_mem_pool(context.cu_device())?;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut threshold).cast()).result()
    }
}
