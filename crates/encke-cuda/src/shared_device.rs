//! What all streams of a GPU share: its context, its properties, the programs loaded on it, and the
//! counters of its memory.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use cudarc::driver::{CudaContext, CudaFunction, DriverError, result, sys};

use crate::cache::Cache;
use crate::error::{Error, Result};
use crate::library;
use crate::lock::lock;
use crate::nvrtc::Nvrtc;
use crate::program::Program;

/// Dynamic shared memory a block may use without raising the function's limit.
const DEFAULT_SHARED_BYTES: usize = 48 * 1024;

/// The functions of a program's entry point by its macros, and their limits of shared memory.
type FunctionsByMacros = HashMap<String, (CudaFunction, usize)>;

/// A GPU without streams.
pub(crate) struct SharedDevice {
    pub context: Arc<CudaContext>,
    nvrtc: Nvrtc,
    cache: Cache,
    pub capability: (i32, i32),
    pub name: String,
    pub multiprocessors: u32,
    /// Dynamic shared memory that a block may use at most.
    pub shared_bytes: usize,
    /// By a program's name and entry point.
    functions: Mutex<HashMap<(&'static str, &'static str), FunctionsByMacros>>,
    allocated: AtomicUsize,
    peak: AtomicUsize,
    /// Launches and copies so far.
    pub enqueued: AtomicUsize,
}

impl SharedDevice {
    /// The number of GPUs.
    pub fn count() -> Result<usize> {
        // cudarc panics without a driver. Loading it here first turns that into an error, and
        // cudarc then finds it already loaded.
        let (driver, _) = library::find(&library::DRIVER)?;
        std::mem::forget(driver);
        result::init().map_err(|error| Error::driver("starting the CUDA driver", error))?;
        let found = CudaContext::device_count();
        Ok(found.map_err(|error| Error::driver("counting GPUs", error))? as usize)
    }

    /// Opens the GPU with this ordinal.
    pub fn open(ordinal: usize) -> Result<Arc<SharedDevice>> {
        let found = SharedDevice::count()?;
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
        Ok(Arc::new(SharedDevice {
            nvrtc: Nvrtc::load()?,
            cache: Cache::of_user(),
            capability: context.compute_capability().map_err(failed)?,
            name: context.name().map_err(failed)?,
            multiprocessors,
            shared_bytes,
            functions: Mutex::default(),
            allocated: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            enqueued: AtomicUsize::new(0),
            context,
        }))
    }

    /// Bytes that this process has allocated on it now, and the peak so far.
    pub fn allocated_bytes(&self) -> (usize, usize) {
        let load = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
        (load(&self.allocated), load(&self.peak))
    }

    /// Adds an allocation to the counters.
    pub fn count_allocated(&self, bytes: usize) {
        let now = self.allocated.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    /// Removes a freed allocation from the counters.
    pub fn count_freed(&self, bytes: usize) {
        self.allocated.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// An entry point of a program, compiled and loaded on first use, unless `before_loading`
    /// refuses.
    pub fn function(
        &self,
        program: &Program,
        entry: &'static str,
        shared_bytes: usize,
        before_loading: impl FnOnce() -> Result<()>,
    ) -> Result<CudaFunction> {
        let mut functions = lock(&self.functions);
        let functions = functions.entry((program.name, entry)).or_default();
        let failed = |error| Error::driver(format!("loading {} ({entry})", program.name), error);
        if !functions.contains_key(&program.defines) {
            before_loading()?;
            let built = program.build(&self.nvrtc, &self.cache, self.capability)?;
            let image = cudarc::nvrtc::Ptx::from_binary(built.cubin);
            let module = self.context.load_module(image).map_err(failed)?;
            let function = module.load_function(entry).map_err(failed)?;
            functions.insert(program.defines.clone(), (function, DEFAULT_SHARED_BYTES));
        }
        let (function, limit) = functions
            .get_mut(&program.defines)
            .expect("it is there or was just loaded");
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
