//! Tensors of the caller, as this crate reads them: where they are, never a copy of them.
//!
//! A torch tensor and a NumPy array say the same things in different words; after this file nobody
//! asks which it was, but for the result, which goes back in the words the input came in.

use encke::{DType, Element, Slice, View};
use half::{bf16, f16};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString, PyTuple};

use crate::error::refused;
use crate::exchange;

/// Whose tensors they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// PyTorch.
    Torch,
    /// NumPy.
    NumPy,
}

/// Where the numbers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the memory of this process.
    Host,
    /// On the GPU with this number.
    Gpu(usize),
}

/// A tensor that the caller holds for as long as the call takes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lent {
    pub name: &'static str,
    pub kind: Kind,
    pub place: Place,
    pub dtype: DType,
    pub address: usize,
    pub dims: [usize; 4],
    pub strides: [usize; 4],
}

/// torch's types in the order of [`DType::ALL`].
static TORCH_TYPES: PyOnceLock<Vec<Py<PyAny>>> = PyOnceLock::new();

impl Lent {
    /// Reads `[b, n, h, d]`.
    pub fn rows(name: &'static str, tensor: &Bound<'_, PyAny>) -> PyResult<Lent> {
        Lent::read(name, tensor, "[batch, tokens, heads, dim]", 4)
    }

    /// Reads `[b, n, h]`: one number a cell.
    pub fn cells(name: &'static str, tensor: &Bound<'_, PyAny>) -> PyResult<Lent> {
        Lent::read(name, tensor, "[batch, tokens, heads]", 3)
    }

    fn read(
        name: &'static str,
        tensor: &Bound<'_, PyAny>,
        meaning: &str,
        rank: usize,
    ) -> PyResult<Lent> {
        let py = tensor.py();
        if let Some(told) = exchange::describe(tensor, rank) {
            refuse_negated(name, tensor)?;
            let lent = Lent {
                name,
                kind: Kind::Torch,
                place: told.gpu.map_or(Place::Host, Place::Gpu),
                dtype: told.dtype,
                address: told.address,
                dims: told.dims,
                strides: told.strides,
            };
            return lent.checked();
        }
        match tensor.getattr_opt(intern!(py, "data_ptr"))? {
            Some(data_ptr) => from_torch(name, tensor, &data_ptr, meaning, rank),
            None => from_numpy(name, tensor, meaning, rank),
        }
    }

    /// Refuses a tensor that is not of the same kind and place as another.
    pub fn beside(self, other: &Lent) -> PyResult<Lent> {
        if self.kind != other.kind {
            return Err(PyTypeError::new_err(format!(
                "{} is a {} and {} a {}; give all as one of them",
                other.name,
                other.kind.words(),
                self.name,
                self.kind.words()
            )));
        }
        if self.place != other.place {
            return Err(PyValueError::new_err(format!(
                "{} is on {} but {} is on {}; move them to one device",
                other.name,
                other.place.words(),
                self.name,
                self.place.words()
            )));
        }
        Ok(self)
    }

    /// How many numbers lie between the first and the last, both included.
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
    /// The numbers must be in the memory of this process, stay there and keep their values while
    /// the view lives.
    pub unsafe fn view<'a>(&self) -> PyResult<View<'a>> {
        // SAFETY: passed on to the caller.
        let data = unsafe {
            match self.dtype {
                DType::F64 => f64::wrap(self.numbers()),
                DType::F32 => f32::wrap(self.numbers()),
                DType::Bf16 => bf16::wrap(self.numbers()),
                DType::F16 => f16::wrap(self.numbers()),
            }
        };
        self.viewed(data)
    }

    fn viewed<'a>(&self, data: Slice<'a>) -> PyResult<View<'a>> {
        let view = View::from_slice(data, self.dims, self.strides);
        view.map_err(|error| refused(self.name, &error))
    }

    /// # Safety
    /// As for `view`, and the numbers are of this type.
    unsafe fn numbers<'a, T>(&self) -> &'a [T] {
        match self.extent() {
            0 => &[],
            // SAFETY: the address was checked to be aligned when it was read, and torch and NumPy
            // keep everything that shape and strides reach in one allocation.
            extent => unsafe { std::slice::from_raw_parts(self.address as *const T, extent) },
        }
    }

    /// The checks that do not depend on whose tensor it is.
    fn checked(self) -> PyResult<Lent> {
        if self.dims[3] > 1 && self.strides[3] != 1 {
            return Err(PyValueError::new_err(format!(
                "{}: the last dimension has stride {}; Encke reads tensors of any strides whose \
                 last dimension is contiguous (stride 1): make a contiguous copy",
                self.name, self.strides[3]
            )));
        }
        if !self.address.is_multiple_of(self.dtype.bytes()) {
            return Err(PyValueError::new_err(format!(
                "{} lies at address {:#x}, which is no multiple of the {} bytes of its numbers; \
                 make an aligned copy",
                self.name,
                self.address,
                self.dtype.bytes()
            )));
        }
        Ok(self)
    }
}

impl Kind {
    fn words(self) -> &'static str {
        match self {
            Kind::Torch => "torch tensor",
            Kind::NumPy => "NumPy array",
        }
    }
}

impl Place {
    fn words(self) -> String {
        match self {
            Place::Host => "cpu".to_string(),
            Place::Gpu(number) => format!("cuda:{number}"),
        }
    }
}

fn from_torch(
    name: &'static str,
    tensor: &Bound<'_, PyAny>,
    data_ptr: &Bound<'_, PyAny>,
    meaning: &str,
    rank: usize,
) -> PyResult<Lent> {
    let py = tensor.py();
    let dtype = tensor.getattr(intern!(py, "dtype"))?;
    let dtype = torch_type(&dtype).ok_or_else(|| unknown_type(name, &dtype))?;
    let place = if tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()? {
        Place::Host
    } else if tensor.getattr(intern!(py, "is_cuda"))?.is_truthy()? {
        Place::Gpu(tensor.call_method0(intern!(py, "get_device"))?.extract()?)
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
    let lent = Lent {
        name,
        kind: Kind::Torch,
        place,
        dtype,
        address: data_ptr.call0()?.extract()?,
        dims,
        strides,
    };
    lent.checked()
}

/// A tensor may say that its numbers are to be read with the other sign.
fn refuse_negated(name: &str, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
    let negated = tensor.call_method0(intern!(tensor.py(), "is_neg"))?;
    match negated.is_truthy()? {
        false => Ok(()),
        true => Err(PyValueError::new_err(format!(
            "{name} is a lazily negated view; give {name}.resolve_neg()"
        ))),
    }
}

fn from_numpy(
    name: &'static str,
    array: &Bound<'_, PyAny>,
    meaning: &str,
    rank: usize,
) -> PyResult<Lent> {
    let py = array.py();
    let Some(interface) = array.getattr_opt(intern!(py, "__array_interface__"))? else {
        let kind = array.get_type();
        return Err(PyTypeError::new_err(format!(
            "{name} is a {}; Encke takes torch tensors and NumPy arrays",
            kind.name()?
        )));
    };
    let interface = interface.cast_into::<PyDict>()?;
    let item = |key| entry(name, &interface, key);
    let words = item(intern!(py, "typestr"))?.cast_into::<PyString>()?;
    let dtype = match &*words.to_cow()? {
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
    let lent = Lent {
        name,
        kind: Kind::NumPy,
        place: Place::Host,
        dtype,
        address,
        dims,
        strides,
    };
    lent.checked()
}

/// What an array interface says.
fn entry<'py>(
    name: &str,
    interface: &Bound<'py, PyDict>,
    key: &Bound<'py, PyString>,
) -> PyResult<Bound<'py, PyAny>> {
    let missing = || PyTypeError::new_err(format!("{name}: its array interface has no {key}"));
    interface.get_item(key)?.ok_or_else(missing)
}

/// Strides in numbers from those in bytes.
fn element_strides(name: &str, bytes: &Bound<'_, PyTuple>, dtype: DType) -> PyResult<[usize; 4]> {
    let mut strides = [1; 4];
    for (to, from) in strides.iter_mut().zip(bytes.iter()) {
        let from: isize = from.extract()?;
        let whole = usize::try_from(from)
            .ok()
            .filter(|x| x.is_multiple_of(dtype.bytes()));
        *to = whole.map(|bytes| bytes / dtype.bytes()).ok_or_else(|| {
            PyValueError::new_err(format!(
                "{name} has a stride of {from} bytes; strides must not be negative and be \
                 multiples of the {} bytes of a number: make a contiguous copy",
                dtype.bytes()
            ))
        })?;
    }
    Ok(strides)
}

/// Four sizes, the last of which is 1 where a tensor has only three.
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
