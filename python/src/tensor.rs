//! Address, type, shape and strides of the caller's tensors; nothing is copied.
//!
//! Torch tensors and NumPy arrays are read into the same [`TensorRef`]; after that only the export
//! of results depends on the library.

use encke::{DType, Element, View};
use half::{bf16, f16};
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString, PyTuple};

use crate::error::{UnreadableTensor, refused};
use crate::exchange;

/// The library of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TensorLibrary {
    /// PyTorch.
    Torch,
    /// NumPy.
    NumPy,
}

/// The device of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TensorDevice {
    /// Host memory.
    Host,
    /// The GPU with this number.
    Gpu(usize),
}

/// A tensor that the caller keeps alive until the call returns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TensorRef {
    pub name: &'static str,
    pub library: TensorLibrary,
    pub device: TensorDevice,
    pub dtype: DType,
    pub address: usize,
    pub dims: [usize; 4],
    pub strides: [usize; 4],
}

/// torch's types in the order of [`DType::ALL`].
static TORCH_TYPES: PyOnceLock<Vec<Py<PyAny>>> = PyOnceLock::new();

impl TensorRef {
    /// Reads `[b, n, h, d]`.
    pub fn rows(name: &'static str, tensor: &Bound<'_, PyAny>) -> PyResult<TensorRef> {
        let read = TensorRef::made_rows(name, tensor)?;
        refuse_freed(tensor, &read)?;
        Ok(read)
    }

    /// Reads `[b, n, h]`: one element per row and head.
    pub fn cells(name: &'static str, tensor: &Bound<'_, PyAny>) -> PyResult<TensorRef> {
        let read = TensorRef::made_cells(name, tensor)?;
        refuse_freed(tensor, &read)?;
        Ok(read)
    }

    /// The same for a tensor that this package has made, whose storage is as it was.
    pub fn made_rows(name: &'static str, tensor: &Bound<'_, PyAny>) -> PyResult<TensorRef> {
        TensorRef::read(name, tensor, "[batch, tokens, heads, dim]", 4)
    }

    /// The same for `[b, n, h]`.
    pub fn made_cells(name: &'static str, tensor: &Bound<'_, PyAny>) -> PyResult<TensorRef> {
        TensorRef::read(name, tensor, "[batch, tokens, heads]", 3)
    }

    fn read(
        name: &'static str,
        tensor: &Bound<'_, PyAny>,
        meaning: &str,
        rank: usize,
    ) -> PyResult<TensorRef> {
        let py = tensor.py();
        if let Some(read) = exchange::describe(tensor, rank) {
            refuse_negated(name, tensor)?;
            let tensor_ref = TensorRef {
                name,
                library: TensorLibrary::Torch,
                device: read.gpu.map_or(TensorDevice::Host, TensorDevice::Gpu),
                dtype: read.dtype,
                address: read.address,
                dims: read.dims,
                strides: read.strides,
            };
            return tensor_ref.checked();
        }
        match tensor.getattr_opt(intern!(py, "data_ptr"))? {
            Some(data_ptr) => from_torch(name, tensor, &data_ptr, meaning, rank)
                .map_err(|error| without_memory(name, tensor, error)),
            None => from_numpy(name, tensor, meaning, rank),
        }
    }

    /// Refuses a tensor of another library or device than `other`.
    pub fn beside(self, other: &TensorRef) -> PyResult<TensorRef> {
        if self.library != other.library {
            return Err(PyTypeError::new_err(format!(
                "{} is a {} and {} a {}; give all as one of them",
                other.name,
                other.library.to_text(),
                self.name,
                self.library.to_text()
            )));
        }
        if self.device != other.device {
            return Err(PyValueError::new_err(format!(
                "{} is on {} but {} is on {}; move them to one device",
                other.name,
                other.device.to_text(),
                self.name,
                self.device.to_text()
            )));
        }
        Ok(self)
    }

    /// Elements from the first to the last, both included.
    pub fn extent(&self) -> usize {
        if self.dims.contains(&0) {
            return 0;
        }
        let reach = self.dims.iter().zip(self.strides);
        1 + reach
            .map(|(size, stride)| (size - 1) * stride)
            .sum::<usize>()
    }

    /// The tensor as a view.
    ///
    /// # Safety
    /// The tensor must be in host memory, and stay allocated and unchanged while the view lives.
    pub unsafe fn view<'a>(&self) -> PyResult<View<'a>> {
        // SAFETY: passed on to the caller.
        let data = unsafe {
            match self.dtype {
                DType::F64 => f64::wrap(self.elements()),
                DType::F32 => f32::wrap(self.elements()),
                DType::Bf16 => bf16::wrap(self.elements()),
                DType::F16 => f16::wrap(self.elements()),
            }
        };
        let view = View::from_slice(data, self.dims, self.strides);
        view.map_err(|error| refused(self.name, &error))
    }

    /// # Safety
    /// As for `view`, and the elements are of type `T`.
    unsafe fn elements<'a, T>(&self) -> &'a [T] {
        match self.extent() {
            0 => &[],
            // SAFETY: `checked` has checked the alignment, and in torch and NumPy everything that
            // shape and strides reach is in one allocation.
            extent => unsafe { std::slice::from_raw_parts(self.address as *const T, extent) },
        }
    }

    /// The checks that do not depend on the library.
    fn checked(self) -> PyResult<TensorRef> {
        if self.dims[3] > 1 && self.strides[3] != 1 {
            return Err(UnreadableTensor::new_err(format!(
                "{}: the last dimension has stride {}; Encke reads tensors of any strides whose \
                 last dimension is contiguous (stride 1): make a contiguous copy",
                self.name, self.strides[3]
            )));
        }
        if self.address == 0 && self.extent() > 0 {
            return Err(UnreadableTensor::new_err(no_memory(self.name)));
        }
        if !self.address.is_multiple_of(self.dtype.bytes()) {
            return Err(UnreadableTensor::new_err(format!(
                "{} is at address {:#x}, which is not a multiple of the {} bytes of an element; \
                 make an aligned copy",
                self.name,
                self.address,
                self.dtype.bytes()
            )));
        }
        Ok(self)
    }
}

impl TensorLibrary {
    fn to_text(self) -> &'static str {
        match self {
            TensorLibrary::Torch => "torch tensor",
            TensorLibrary::NumPy => "NumPy array",
        }
    }
}

impl TensorDevice {
    fn to_text(self) -> String {
        match self {
            TensorDevice::Host => "cpu".to_string(),
            TensorDevice::Gpu(number) => format!("cuda:{number}"),
        }
    }
}

fn from_torch(
    name: &'static str,
    tensor: &Bound<'_, PyAny>,
    data_ptr: &Bound<'_, PyAny>,
    meaning: &str,
    rank: usize,
) -> PyResult<TensorRef> {
    let py = tensor.py();
    let dtype = tensor.getattr(intern!(py, "dtype"))?;
    let dtype = torch_type(&dtype).ok_or_else(|| unknown_type(name, &dtype))?;
    let device = if tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()? {
        TensorDevice::Host
    } else if tensor.getattr(intern!(py, "is_cuda"))?.is_truthy()? {
        TensorDevice::Gpu(tensor.call_method0(intern!(py, "get_device"))?.extract()?)
    } else {
        let device = tensor.getattr(intern!(py, "device"))?;
        return Err(PyValueError::new_err(format!(
            "{name} is on {device}; Encke computes on cpu and cuda"
        )));
    };
    refuse_negated(name, tensor)?;
    let shape = tensor
        .getattr(intern!(py, "shape"))?
        .cast_into::<PyTuple>()?;
    let strides = tensor
        .call_method0(intern!(py, "stride"))?
        .cast_into::<PyTuple>()?;
    let dims = four(name, &shape, meaning, rank)?;
    let strides = four(name, &strides, meaning, rank)?;
    let tensor = TensorRef {
        name,
        library: TensorLibrary::Torch,
        device,
        dtype,
        address: data_ptr.call0()?.extract()?,
        dims,
        strides,
    };
    tensor.checked()
}

/// The error of a tensor that has shapes but no elements to read.
fn no_memory(name: &str) -> String {
    format!(
        "{name} has no memory: its storage was freed, or it is a zero tensor; give a tensor that \
         holds its elements"
    )
}

/// Refuses a tensor whose storage was freed, all of it or in part.
fn refuse_freed(tensor: &Bound<'_, PyAny>, read: &TensorRef) -> PyResult<()> {
    if read.library == TensorLibrary::NumPy {
        return Ok(());
    }
    let py = tensor.py();
    let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
    let bytes: usize = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
    let first: usize = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
    let end = read.address + read.extent() * read.dtype.bytes();
    match read.extent() == 0 || first != 0 && end <= first + bytes {
        true => Ok(()),
        false => Err(UnreadableTensor::new_err(no_memory(read.name))),
    }
}

/// An error of torch while it was asked for memory: sparse and nested tensors, and classes that
/// hold other tensors, have none. Errors of this crate stay as they are.
fn without_memory(name: &str, tensor: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    let py = tensor.py();
    if !error.is_instance_of::<PyRuntimeError>(py) {
        return error;
    }
    let of = |attribute| tensor.getattr(attribute).map(|found| found.to_string());
    let mut layout = of("layout").unwrap_or_default();
    if of("is_nested").is_ok_and(|nested| nested == "True") {
        layout += ", nested";
    }
    let class = tensor.get_type();
    let class = class.name().map(|name| name.to_string());
    PyTypeError::new_err(format!(
        "{name} is a {} with layout {layout}, which has no memory of rows that Encke could read; \
         give a dense tensor ({name}.to_dense(), or encke.varlen_attention for sequences of \
         different lengths)",
        class.unwrap_or_default()
    ))
}

/// Refuses a lazily negated view, whose memory has the opposite signs.
fn refuse_negated(name: &str, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
    let negated = tensor.call_method0(intern!(tensor.py(), "is_neg"))?;
    match negated.is_truthy()? {
        false => Ok(()),
        true => Err(UnreadableTensor::new_err(format!(
            "{name} is a lazily negated view; give {name}.resolve_neg()"
        ))),
    }
}

fn from_numpy(
    name: &'static str,
    array: &Bound<'_, PyAny>,
    meaning: &str,
    rank: usize,
) -> PyResult<TensorRef> {
    let py = array.py();
    let Some(interface) = array.getattr_opt(intern!(py, "__array_interface__"))? else {
        let class = array.get_type();
        return Err(PyTypeError::new_err(format!(
            "{name} is a {}; Encke takes torch tensors and NumPy arrays",
            class.name()?
        )));
    };
    let interface = interface.cast_into::<PyDict>()?;
    let item = |key| entry(name, &interface, key);
    let typestr = item(intern!(py, "typestr"))?.cast_into::<PyString>()?;
    let dtype = match &*typestr.to_cow()? {
        "<f8" => DType::F64,
        "<f4" => DType::F32,
        "<f2" => DType::F16,
        _ => return Err(unknown_type(name, &array.getattr("dtype")?)),
    };
    let dims = four(
        name,
        &item(intern!(py, "shape"))?.cast_into::<PyTuple>()?,
        meaning,
        rank,
    )?;
    let strides = match item(intern!(py, "strides"))?.cast_into::<PyTuple>() {
        Ok(bytes) => element_strides(name, &bytes, dtype)?,
        // None: the array is contiguous.
        Err(_) => {
            let [_, n, h, d] = dims;
            [n * h * d, h * d, d, 1]
        }
    };
    let (address, _read_only): (usize, bool) = item(intern!(py, "data"))?.extract()?;
    let tensor = TensorRef {
        name,
        library: TensorLibrary::NumPy,
        device: TensorDevice::Host,
        dtype,
        address,
        dims,
        strides,
    };
    tensor.checked()
}

/// An item of an array interface.
fn entry<'py>(
    name: &str,
    interface: &Bound<'py, PyDict>,
    key: &Bound<'py, PyString>,
) -> PyResult<Bound<'py, PyAny>> {
    let missing = || PyTypeError::new_err(format!("{name}: its array interface has no {key}"));
    interface.get_item(key)?.ok_or_else(missing)
}

/// Strides in elements from those in bytes.
fn element_strides(name: &str, bytes: &Bound<'_, PyTuple>, dtype: DType) -> PyResult<[usize; 4]> {
    let mut strides = [1; 4];
    for (to, from) in strides.iter_mut().zip(bytes.iter()) {
        let from: isize = from.extract()?;
        let whole = usize::try_from(from)
            .ok()
            .filter(|x| x.is_multiple_of(dtype.bytes()));
        *to = whole.map(|bytes| bytes / dtype.bytes()).ok_or_else(|| {
            UnreadableTensor::new_err(format!(
                "{name} has a stride of {from} bytes; strides must not be negative and be \
                 multiples of the {} bytes of an element: make a contiguous copy",
                dtype.bytes()
            ))
        })?;
    }
    Ok(strides)
}

/// Four sizes; the last is 1 if a tensor has only three.
fn four(
    name: &str,
    sizes: &Bound<'_, PyTuple>,
    meaning: &str,
    rank: usize,
) -> PyResult<[usize; 4]> {
    if sizes.len() != rank {
        return Err(PyValueError::new_err(format!(
            "{name} has {} dimensions, {sizes}; it must have {rank}, {meaning}",
            sizes.len()
        )));
    }
    let mut four = [1; 4];
    for (to, from) in four.iter_mut().zip(sizes.iter()) {
        *to = from.extract()?;
    }
    Ok(four)
}

fn torch_type(dtype: &Bound<'_, PyAny>) -> Option<DType> {
    let py = dtype.py();
    let known = TORCH_TYPES.get_or_try_init(py, || {
        let torch = py.import("torch")?;
        let names = ["float64", "float32", "bfloat16", "float16"];
        let types = names.iter().map(|name| Ok(torch.getattr(*name)?.unbind()));
        types.collect::<PyResult<Vec<_>>>()
    });
    let at = known.ok()?.iter().position(|known| known.is(dtype))?;
    Some(DType::ALL[at])
}

fn unknown_type(name: &str, dtype: &Bound<'_, PyAny>) -> PyErr {
    PyTypeError::new_err(format!(
        "{name} is of type {dtype}; Encke computes float64, float32, float16 and (torch) bfloat16"
    ))
}
