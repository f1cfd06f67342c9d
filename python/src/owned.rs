//! Results, handed to torch or NumPy without a copy.
//!
//! The memory a rank computed into becomes the tensor's: it is given away whole, and whoever got it
//! lets it go, back to the attention it came from where that is still there. torch takes DLPack, which knows bfloat16, by a table of functions or in a capsule; NumPy
//! takes an array interface, which all its versions let one write to.

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
use crate::tensor::Kind;

const NAME: &CStr = c"dltensor";
/// `DLManagedTensor` of dlpack.h.
#[repr(C)]
struct DlManaged {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManaged)>,
}

/// A managed tensor, in both forms there are, together with what it points to. One of them is used.
struct Parting {
    managed: DlManaged,
    versioned: DlVersioned,
    shape: [i64; 4],
    strides: [i64; 4],
    _tensor: Tensor,
}

static FROM_DLPACK: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static AS_ARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// A tensor out of a shared one, which is not copied where nobody else holds it.
pub(crate) fn alone(tensor: Arc<Tensor>) -> Tensor {
    Arc::try_unwrap(tensor).unwrap_or_else(|shared| (*shared).clone())
}

/// A result as the kind of tensor its inputs were: `[b, n, h, d]`, or `[b, n, h]` for cells.
pub(crate) fn give(py: Python<'_>, kind: Kind, tensor: Tensor, cells: bool) -> PyResult<Py<PyAny>> {
    let dimensions = if cells { 3 } else { 4 };
    match kind {
        Kind::Torch => to_torch(py, tensor, dimensions),
        Kind::NumPy => to_numpy(py, tensor, dimensions),
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
    let parting = Box::into_raw(Box::new(Parting {
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
    // SAFETY: just boxed, and nobody else has it; a box does not move, so it may point into itself.
    let (managed, versioned) = unsafe {
        let (shape, strides) = (&raw mut (*parting).shape, &raw mut (*parting).strides);
        for tensor in [
            &raw mut (*parting).managed.tensor,
            &raw mut (*parting).versioned.tensor,
        ] {
            (*tensor).shape = shape.cast();
            (*tensor).strides = strides.cast();
        }
        (*parting).managed.context = parting.cast();
        (*parting).versioned.context = parting.cast();
        (&raw mut (*parting).managed, &raw mut (*parting).versioned)
    };
    // SAFETY: nobody else has it; where there is no table it is not taken.
    if let Some(made) = unsafe { exchange::import(py, versioned) } {
        return made;
    }
    // SAFETY: the name is static; the destructor frees what nobody took.
    let capsule = unsafe {
        let raw = ffi::PyCapsule_New(managed.cast(), NAME.as_ptr(), Some(forget));
        Bound::from_owned_ptr_or_err(py, raw)
    };
    let capsule = capsule.inspect_err(|_| {
        // SAFETY: no capsule came to own it.
        unsafe { delete(managed) }
    })?;
    let from_dlpack = FROM_DLPACK.get_or_try_init(py, || {
        // What torch.utils.dlpack.from_dlpack comes to for a capsule, without its questions.
        let quick = py
            .import("torch")?
            .getattr("_C")?
            .getattr_opt("_from_dlpack")?;
        let found = match quick {
            Some(quick) => quick,
            None => py.import("torch.utils.dlpack")?.getattr("from_dlpack")?,
        };
        Ok::<_, PyErr>(found.unbind())
    })?;
    from_dlpack.call1(py, (capsule,))
}

/// Frees a tensor that was taken over, when its new owner is done with it.
///
/// # Safety
/// Called once, with the managed tensor of a `Parting`.
unsafe extern "C" fn delete(managed: *mut DlManaged) {
    // SAFETY: the context is the box the managed tensor is part of.
    drop(unsafe { Box::from_raw((*managed).context.cast::<Parting>()) });
}

/// The same for the other form.
///
/// # Safety
/// As for `delete`.
unsafe extern "C" fn delete_versioned(managed: *mut DlVersioned) {
    // SAFETY: as in `delete`.
    drop(unsafe { Box::from_raw((*managed).context.cast::<Parting>()) });
}

/// Frees a tensor in a capsule that nobody took over; whoever does renames the capsule.
///
/// # Safety
/// Called by Python with the capsule that ends.
unsafe extern "C" fn forget(capsule: *mut ffi::PyObject) {
    // SAFETY: the capsule is alive, and holds a managed tensor while it has our name.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast());
        }
    }
}

/// The memory of an array: what NumPy keeps as its base.
#[pyclass(frozen, module = "encke._encke")]
pub(crate) struct Memory {
    address: usize,
    dims: [usize; 4],
    dimensions: usize,
    typestr: &'static str,
    _tensor: Tensor,
}

#[pymethods]
impl Memory {
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
        // NumPy has no such type; arrays come in as none, so this is a precision that was asked for.
        DType::Bf16 => {
            return Err(pyo3::exceptions::PyTypeError::new_err(
                "NumPy has no bfloat16; ask for another precision, or give torch tensors",
            ));
        }
    };
    let memory = Memory {
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
