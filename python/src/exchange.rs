//! DLPack's table of functions, by which a library tells where its tensors are without Python's help.
//!
//! torch has it since 2.10 (`__dlpack_c_exchange_api__` of the type). One call into it is as much as
//! five questions to the object, and as fast as one; where there is no table, or a tensor is out of
//! the ordinary, the questions are asked.

use std::ffi::{CStr, c_int, c_void};

use encke::{DType, Data};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

const TABLE: &CStr = c"dlpack_exchange_api";
/// The version of the table that is known here; later minor ones only add to it.
const MAJOR: u32 = 1;
/// DLPack's numbers for memory of the host, of a GPU, and of the host where a GPU reaches it.
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

/// The version that is written there.
pub(crate) const VERSION: [u32; 2] = [MAJOR, 0];

/// `DLPackExchangeAPI` of dlpack.h.
#[repr(C)]
struct Table {
    major: u32,
    minor: u32,
    earlier: *const c_void,
    allocate: *const c_void,
    export: *const c_void,
    import: Option<Import>,
    describe: Option<Describe>,
    stream: *const c_void,
}

type Describe = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;
type Import = unsafe extern "C" fn(*mut DlVersioned, *mut *mut c_void) -> c_int;

/// The types that the table is for, and its functions: one tells where a tensor is, the other makes
/// a tensor of what was given away.
struct Known {
    types: [Py<PyAny>; 2],
    describe: Option<Describe>,
    import: Option<Import>,
}

static KNOWN: PyOnceLock<Known> = PyOnceLock::new();

/// Where the numbers of a tensor are and how they lie.
pub(crate) struct Described {
    /// The number of the GPU; none on the host.
    pub gpu: Option<usize>,
    pub dtype: DType,
    pub address: usize,
    pub dims: [usize; 4],
    pub strides: [usize; 4],
}

impl Known {
    fn look(py: Python<'_>) -> PyResult<Known> {
        let torch = py.import("torch")?;
        let tensor = torch.getattr("Tensor")?;
        let parameter = torch.getattr("nn")?.getattr("Parameter")?;
        let capsule = tensor.getattr_opt("__dlpack_c_exchange_api__")?;
        let functions = capsule.and_then(|capsule| {
            // SAFETY: the name is checked; a table lives as long as the process, by its definition.
            let table = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), TABLE.as_ptr()) };
            if table.is_null() {
                // SAFETY: the lock is held; that it is no such capsule is an answer, no error.
                unsafe { ffi::PyErr_Clear() };
                return None;
            }
            // SAFETY: a table begins with its version, and has these functions if that is known.
            unsafe {
                let table = table.cast::<Table>();
                ((*table).major == MAJOR).then(|| ((*table).describe, (*table).import))
            }
        });
        let (describe, import) = functions.unwrap_or_default();
        Ok(Known {
            types: [tensor.unbind(), parameter.unbind()],
            describe,
            import,
        })
    }
}

/// What the table says of a tensor with so many dimensions; nothing where there is no table, or it
/// is no ordinary tensor of a type and place that is computed in.
pub(crate) fn describe(tensor: &Bound<'_, PyAny>, dimensions: usize) -> Option<Described> {
    let known = KNOWN
        .get_or_try_init(tensor.py(), || Known::look(tensor.py()))
        .ok()?;
    let describe = known.describe?;
    let kind = tensor.get_type();
    if !known.types.iter().any(|known| known.is(&kind)) {
        return None;
    }
    let mut told = std::mem::MaybeUninit::<DlTensor>::uninit();
    // SAFETY: the object is of a type that the table is for, and there is room for the answer.
    if unsafe { describe(tensor.as_ptr().cast(), told.as_mut_ptr()) } != 0 {
        // SAFETY: the lock is held. The questions that are asked instead have an error of their own.
        unsafe { ffi::PyErr_Clear() };
        return None;
    }
    // SAFETY: it said that it has filled it in.
    let told = unsafe { told.assume_init() };
    if told.dimensions as usize != dimensions || told.strides.is_null() || told.dtype.lanes != 1 {
        return None;
    }
    let dtype = match (told.dtype.code, told.dtype.bits) {
        (2, 64) => DType::F64,
        (2, 32) => DType::F32,
        (2, 16) => DType::F16,
        (4, 16) => DType::Bf16,
        _ => return None,
    };
    let gpu = match told.device.kind {
        HOST | PINNED => None,
        CUDA => Some(usize::try_from(told.device.number).ok()?),
        _ => return None,
    };
    // SAFETY: as many as there are dimensions, which the tensor keeps until the lock is given up.
    let sizes = |from: *const i64| unsafe { four(from, dimensions) };
    Some(Described {
        gpu,
        dtype,
        address: told.data as usize + usize::try_from(told.byte_offset).ok()?,
        dims: sizes(told.shape)?,
        strides: sizes(told.strides)?,
    })
}

/// A tensor of torch out of what was given away, where there is a table; it is the tensor's then.
///
/// # Safety
/// `managed` is nobody else's, and frees itself by its deleter.
pub(crate) unsafe fn import(
    py: Python<'_>,
    managed: *mut DlVersioned,
) -> Option<PyResult<Py<PyAny>>> {
    let known = KNOWN.get_or_try_init(py, || Known::look(py)).ok()?;
    let import = known.import?;
    let mut made = std::ptr::null_mut();
    // SAFETY: the tensor is whole, and given away; there is room for the answer.
    Some(match unsafe { import(managed, &mut made) } {
        // SAFETY: a new reference, which is ours.
        0 => Ok(unsafe { Bound::from_owned_ptr(py, made.cast()) }.unbind()),
        _ => Err(PyErr::fetch(py)),
    })
}

/// Four sizes, the last of which are 1 where there are fewer.
///
/// # Safety
/// `count` numbers, 4 at most, can be read from there.
unsafe fn four(from: *const i64, count: usize) -> Option<[usize; 4]> {
    let mut sizes = [1; 4];
    for (at, size) in sizes.iter_mut().enumerate().take(count) {
        // SAFETY: below `count`.
        *size = usize::try_from(unsafe { *from.add(at) }).ok()?;
    }
    Some(sizes)
}

/// The type of some numbers in DLPack's words.
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
