//! Results as torch tensors or NumPy arrays, without a copy.
//!
//! The memory that a rank computed into becomes the tensor's. When the tensor is freed, the memory
//! returns to the pool of its attention, if that still exists. torch takes DLPack, which has
//! bfloat16, by the exchange API or in a capsule; NumPy takes an array interface, which is writable
//! in all versions.

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::Arc;

use encke::{DType, Tensor};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

use crate::exchange::{self, DlDevice, DlTensor, DlVersioned, HOST, VERSION, dl_type};
use crate::tensor::TensorLibrary;

const NAME: &CStr = c"dltensor";

/// `DLManagedTensor` of dlpack.h.
#[repr(C)]
struct DlManaged {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManaged)>,
}

/// A tensor with both of DLPack's managed forms, of which one is used, and what they point to.
struct ExportedTensor {
    managed: DlManaged,
    versioned: DlVersioned,
    shape: [i64; 4],
    strides: [i64; 4],
    _tensor: Tensor,
}

static FROM_DLPACK: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static AS_ARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// The tensor of an `Arc`; a copy if there are other references.
pub(crate) fn unshare(tensor: Arc<Tensor>) -> Tensor {
    Arc::try_unwrap(tensor).unwrap_or_else(|shared| (*shared).clone())
}

/// A result as a tensor of the library of its inputs: `[b, n, h, d]`, or `[b, n, h]` for cells.
pub(crate) fn export(
    py: Python<'_>,
    library: TensorLibrary,
    tensor: Tensor,
    cells: bool,
) -> PyResult<Py<PyAny>> {
    let dimensions = if cells { 3 } else { 4 };
    match library {
        TensorLibrary::Torch => to_torch(py, tensor, dimensions),
        TensorLibrary::NumPy => to_numpy(py, tensor, dimensions),
    }
}

fn to_torch(py: Python<'_>, mut owned: Tensor, dimensions: usize) -> PyResult<Py<PyAny>> {
    let dims = owned.dims();
    let [_, n, h, d] = dims;
    let signed = |sizes: [usize; 4]| sizes.map(|size| size as i64);
    let address = owned.data_mut().bytes_mut().as_mut_ptr();
    let tensor = DlTensor {
        data: address.cast(),
        device: DlDevice {
            kind: HOST,
            number: 0,
        },
        dimensions: dimensions as i32,
        dtype: dl_type(owned.data()),
        shape: ptr::null_mut(),
        strides: ptr::null_mut(),
        byte_offset: 0,
    };
    let exported = Box::into_raw(Box::new(ExportedTensor {
        managed: DlManaged {
            tensor,
            context: ptr::null_mut(),
            deleter: Some(delete),
        },
        versioned: DlVersioned {
            version: VERSION,
            context: ptr::null_mut(),
            deleter: Some(delete_versioned),
            flags: 0,
            tensor,
        },
        shape: signed(dims),
        // Cells are [b, n, h, 1] here, so the last stride of three is that of h: d = 1.
        strides: signed([n * h * d, h * d, d, 1]),
        _tensor: owned,
    }));
    // SAFETY: just boxed, and the only reference; a box does not move, so it may point into itself.
    let (managed, versioned) = unsafe {
        let (shape, strides) = (&raw mut (*exported).shape, &raw mut (*exported).strides);
        for tensor in [
            &raw mut (*exported).managed.tensor,
            &raw mut (*exported).versioned.tensor,
        ] {
            (*tensor).shape = shape.cast();
            (*tensor).strides = strides.cast();
        }
        (*exported).managed.context = exported.cast();
        (*exported).versioned.context = exported.cast();
        (&raw mut (*exported).managed, &raw mut (*exported).versioned)
    };
    // SAFETY: the only reference; without a table `import` does not take it.
    if let Some(made) = unsafe { exchange::import(py, versioned) } {
        return made;
    }
    // SAFETY: the name is static; the destructor frees a tensor that was not consumed.
    let capsule = unsafe {
        let raw = ffi::PyCapsule_New(managed.cast(), NAME.as_ptr(), Some(delete_unconsumed));
        Bound::from_owned_ptr_or_err(py, raw)
    };
    let capsule = capsule.inspect_err(|_| {
        // SAFETY: there is no capsule that owns it.
        unsafe { delete(managed) }
    })?;
    let from_dlpack = FROM_DLPACK.get_or_try_init(py, || {
        // What torch.utils.dlpack.from_dlpack calls for a capsule, without its checks.
        let direct = py
            .import("torch")?
            .getattr("_C")?
            .getattr_opt("_from_dlpack")?;
        let function = match direct {
            Some(direct) => direct,
            None => py.import("torch.utils.dlpack")?.getattr("from_dlpack")?,
        };
        Ok::<_, PyErr>(function.unbind())
    })?;
    from_dlpack.call1(py, (capsule,))
}

/// Frees an exported tensor when its owner is done with it.
///
/// # Safety
/// Called once, with the managed tensor of a `ExportedTensor`.
unsafe extern "C" fn delete(managed: *mut DlManaged) {
    // SAFETY: the context is the box the managed tensor is part of.
    drop(unsafe { Box::from_raw((*managed).context.cast::<ExportedTensor>()) });
}

/// The same for the versioned form.
///
/// # Safety
/// As for `delete`.
unsafe extern "C" fn delete_versioned(managed: *mut DlVersioned) {
    // SAFETY: as in `delete`.
    drop(unsafe { Box::from_raw((*managed).context.cast::<ExportedTensor>()) });
}

/// Frees the tensor of a capsule that was not consumed; a consumer renames the capsule.
///
/// # Safety
/// Called by Python with the capsule that it destroys.
unsafe extern "C" fn delete_unconsumed(capsule: *mut ffi::PyObject) {
    // SAFETY: the capsule is alive, and holds a managed tensor while it has this name.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast());
        }
    }
}

/// The memory of a NumPy array: its base object.
#[pyclass(frozen, module = "encke._encke")]
pub(crate) struct ArrayMemory {
    address: usize,
    dims: [usize; 4],
    dimensions: usize,
    typestr: &'static str,
    _tensor: Tensor,
}

#[pymethods]
impl ArrayMemory {
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        let [b, n, h, d] = self.dims;
        match self.dimensions {
            3 => interface.set_item(intern!(py, "shape"), (b, n, h))?,
            _ => interface.set_item(intern!(py, "shape"), (b, n, h, d))?,
        }
        interface.set_item(intern!(py, "typestr"), self.typestr)?;
        interface.set_item(intern!(py, "data"), (self.address, false))?;
        interface.set_item(intern!(py, "version"), 3)?;
        Ok(interface)
    }
}

fn to_numpy(py: Python<'_>, mut owned: Tensor, dimensions: usize) -> PyResult<Py<PyAny>> {
    let typestr = match owned.dtype() {
        DType::F64 => "<f8",
        DType::F32 => "<f4",
        DType::F16 => "<f2",
        // NumPy has no bfloat16, so the inputs had another type and this is an explicit precision.
        DType::Bf16 => {
            return Err(pyo3::exceptions::PyTypeError::new_err(
                "NumPy has no bfloat16; use another precision, or torch tensors",
            ));
        }
    };
    let memory = ArrayMemory {
        address: owned.data_mut().bytes_mut().as_mut_ptr() as usize,
        dims: owned.dims(),
        dimensions,
        typestr,
        _tensor: owned,
    };
    let import = || Ok::<_, PyErr>(py.import("numpy")?.getattr("asarray")?.unbind());
    let as_array = AS_ARRAY.get_or_try_init(py, import)?;
    as_array.call1(py, (Bound::new(py, memory)?,))
}
