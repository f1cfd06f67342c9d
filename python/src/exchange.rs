//! DLPack's C exchange API: torch's function table for reading and making tensors without Python
//! calls.
//!
//! torch has it since 2.10 (`__dlpack_c_exchange_api__` of the type). One call replaces five
//! attribute reads and takes as long as one; without the table, or for an unusual tensor, the
//! attributes are read.

use std::ffi::{CStr, c_int, c_void};

use encke::{DType, Data};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

const TABLE: &CStr = c"dlpack_exchange_api";
/// The supported major version of the table; later minor versions only add to it.
const MAJOR: u32 = 1;
/// DLPack's device types: host memory, GPU memory, page-locked host memory.
pub(crate) const HOST: i32 = 1;
const CUDA: i32 = 2;
const PINNED: i32 = 3;

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DlDevice {
    pub kind: i32,
    pub number: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DlType {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

/// `DLTensor` of dlpack.h.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DlTensor {
    pub data: *mut c_void,
    pub device: DlDevice,
    pub dimensions: i32,
    pub dtype: DlType,
    pub shape: *mut i64,
    pub strides: *mut i64,
    pub byte_offset: u64,
}

/// `DLManagedTensorVersioned` of dlpack.h.
#[repr(C)]
pub(crate) struct DlVersioned {
    pub version: [u32; 2],
    pub context: *mut c_void,
    pub deleter: Option<unsafe extern "C" fn(*mut DlVersioned)>,
    pub flags: u64,
    pub tensor: DlTensor,
}

/// The version of exported tensors.
pub(crate) const VERSION: [u32; 2] = [MAJOR, 0];

/// `DLPackExchangeAPI` of dlpack.h.
#[repr(C)]
struct DlPackExchangeApi {
    major: u32,
    minor: u32,
    earlier: *const c_void,
    allocate: *const c_void,
    export: *const c_void,
    import: Option<ImportFn>,
    describe: Option<DescribeFn>,
    stream: *const c_void,
}

type DescribeFn = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;
type ImportFn = unsafe extern "C" fn(*mut DlVersioned, *mut *mut c_void) -> c_int;

/// The types that the table supports, and its functions: `describe` reads a tensor, `import` makes
/// one.
struct TorchExchange {
    types: [Py<PyAny>; 2],
    describe: Option<DescribeFn>,
    import: Option<ImportFn>,
}

static TORCH_EXCHANGE: PyOnceLock<TorchExchange> = PyOnceLock::new();

/// Device, type, address and layout of a tensor.
pub(crate) struct TensorDescription {
    /// The number of the GPU; `None` on the host.
    pub gpu: Option<usize>,
    pub dtype: DType,
    pub address: usize,
    pub dims: [usize; 4],
    pub strides: [usize; 4],
}

impl TorchExchange {
    fn load(py: Python<'_>) -> PyResult<TorchExchange> {
        let torch = py.import("torch")?;
        let tensor = torch.getattr("Tensor")?;
        let parameter = torch.getattr("nn")?.getattr("Parameter")?;
        let capsule = tensor.getattr_opt("__dlpack_c_exchange_api__")?;
        let functions = capsule.and_then(|capsule| {
            // SAFETY: the name is checked; by its specification the table lives as long as the
            // process.
            let table = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), TABLE.as_ptr()) };
            if table.is_null() {
                // SAFETY: the GIL is held; a capsule of another name is not an error here.
                unsafe { ffi::PyErr_Clear() };
                return None;
            }
            // SAFETY: a table starts with its version, and has these functions in this version.
            unsafe {
                let table = table.cast::<DlPackExchangeApi>();
                ((*table).major == MAJOR).then(|| ((*table).describe, (*table).import))
            }
        });
        let (describe, import) = functions.unwrap_or_default();
        Ok(TorchExchange {
            types: [tensor.unbind(), parameter.unbind()],
            describe,
            import,
        })
    }
}

/// The description of a tensor with this many dimensions; `None` without a table, or for a tensor
/// of an unsupported class, type or device.
pub(crate) fn describe(tensor: &Bound<'_, PyAny>, dimensions: usize) -> Option<TensorDescription> {
    let exchange = TORCH_EXCHANGE
        .get_or_try_init(tensor.py(), || TorchExchange::load(tensor.py()))
        .ok()?;
    let describe = exchange.describe?;
    let class = tensor.get_type();
    if !exchange.types.iter().any(|supported| supported.is(&class)) {
        return None;
    }
    let mut read = std::mem::MaybeUninit::<DlTensor>::uninit();
    // SAFETY: the object is of a type that the table supports, and `read` has room for the result.
    if unsafe { describe(tensor.as_ptr().cast(), read.as_mut_ptr()) } != 0 {
        // SAFETY: the GIL is held. Reading the attributes instead raises its own error.
        unsafe { ffi::PyErr_Clear() };
        return None;
    }
    // SAFETY: `describe` returned 0, so it has filled in `read`.
    let read = unsafe { read.assume_init() };
    if read.dimensions as usize != dimensions || read.strides.is_null() || read.dtype.lanes != 1 {
        return None;
    }
    let dtype = match (read.dtype.code, read.dtype.bits) {
        (2, 64) => DType::F64,
        (2, 32) => DType::F32,
        (2, 16) => DType::F16,
        (4, 16) => DType::Bf16,
        _ => return None,
    };
    let gpu = match read.device.kind {
        HOST | PINNED => None,
        CUDA => Some(usize::try_from(read.device.number).ok()?),
        _ => return None,
    };
    // SAFETY: there are `dimensions` of them, which the tensor keeps while the GIL is held.
    let sizes = |from: *const i64| unsafe { four(from, dimensions) };
    Some(TensorDescription {
        gpu,
        dtype,
        address: read.data as usize + usize::try_from(read.byte_offset).ok()?,
        dims: sizes(read.shape)?,
        strides: sizes(read.strides)?,
    })
}

/// A torch tensor that takes ownership of `managed`; `None` without a table.
///
/// # Safety
/// The caller owns `managed`, and its deleter frees it.
pub(crate) unsafe fn import(
    py: Python<'_>,
    managed: *mut DlVersioned,
) -> Option<PyResult<Py<PyAny>>> {
    let exchange = TORCH_EXCHANGE
        .get_or_try_init(py, || TorchExchange::load(py))
        .ok()?;
    let import = exchange.import?;
    let mut made = std::ptr::null_mut();
    // SAFETY: `managed` is complete, ownership passes to torch, and `made` has room for the result.
    Some(match unsafe { import(managed, &mut made) } {
        // SAFETY: a new reference, owned by this function.
        0 => Ok(unsafe { Bound::from_owned_ptr(py, made.cast()) }.unbind()),
        _ => Err(PyErr::fetch(py)),
    })
}

/// Four sizes; those beyond `count` are 1.
///
/// # Safety
/// `from` points to `count` numbers, at most 4.
unsafe fn four(from: *const i64, count: usize) -> Option<[usize; 4]> {
    let mut sizes = [1; 4];
    for (at, size) in sizes.iter_mut().enumerate().take(count) {
        // SAFETY: below `count`.
        *size = usize::try_from(unsafe { *from.add(at) }).ok()?;
    }
    Some(sizes)
}

/// The DLPack type of some data.
pub(crate) fn dl_type(data: &Data) -> DlType {
    let (code, bits) = match data.as_slice().dtype() {
        DType::F64 => (2, 64),
        DType::F32 => (2, 32),
        DType::Bf16 => (4, 16),
        DType::F16 => (2, 16),
    };
    DlType {
        code,
        bits,
        lanes: 1,
    }
}
