//! Arguments and results of passes on host memory, shared by `Attention` and `Shard`.
//!
//! Inputs are read in place. The decision here: what the backward pass needs is returned to Python
//! as tensors, so that torch saves and frees them, and detects in-place changes.

use std::sync::Arc;

use encke::denominator::Denominator;
use encke::sharding::Run;
use encke::{
    Backward, Error, MixingGradient, Mode, Padding, Pass, Pattern, SavedOutput, Shape, Tensor,
    View, sinks,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error;
use crate::owned::{export, unshare};
use crate::tensor::{TensorDevice, TensorLibrary, TensorRef};

/// A tensor as Python passes it.
pub(crate) type PyTensor<'py> = Bound<'py, PyAny>;

/// out, lse, slot_out and slot_lse of a forward pass, each of which may be None.
pub(crate) type PySaved<'py> = [Option<PyTensor<'py>>; 4];

/// What a forward pass returns to Python: out, lse, and both by slot where branches keep slots.
pub(crate) type PyForwardOutput = (Py<PyAny>, Py<PyAny>, Option<Py<PyAny>>, Option<Py<PyAny>>);

/// What a backward pass returns to Python: dq, dk, dv, and the gradient of the sinks if it has any.
pub(crate) type PyGradients = (Py<PyAny>, Py<PyAny>, Py<PyAny>, Option<Vec<f64>>);

/// q, k and v of one library on the host.
pub(crate) struct QkvInputs {
    pub q: TensorRef,
    pub k: TensorRef,
    pub v: TensorRef,
}

impl QkvInputs {
    pub fn read([q, k, v]: [&PyTensor<'_>; 3]) -> PyResult<QkvInputs> {
        let q = TensorRef::rows("q", q)?;
        let k = TensorRef::rows("k", k)?.beside(&q)?;
        let v = TensorRef::rows("v", v)?.beside(&q)?;
        on_host(&q)?;
        Ok(QkvInputs { q, k, v })
    }

    /// # Safety
    /// As for [`TensorRef::view`].
    pub unsafe fn views<'a>(&self) -> PyResult<[View<'a>; 3]> {
        // SAFETY: passed on to the caller; all are on the host, which was checked.
        unsafe { Ok([self.q.view()?, self.k.view()?, self.v.view()?]) }
    }
}

/// What a backward pass reads beside q, k and v.
pub(crate) struct PyBackwardInputs {
    saved: Option<[TensorRef; 3]>,
    dout: TensorRef,
    dlse: Option<TensorRef>,
}

impl PyBackwardInputs {
    /// Reads the saved (out, lse) by head, or by slot if the pattern `splits` heads into slots.
    pub fn read(
        q: &TensorRef,
        splits: bool,
        [out, lse, slot_out, slot_lse]: &PySaved<'_>,
        dout: &PyTensor<'_>,
        dlse: Option<&PyTensor<'_>>,
    ) -> PyResult<PyBackwardInputs> {
        let rows = |name, tensor: &PyTensor<'_>| TensorRef::rows(name, tensor)?.beside(q);
        let cells = |name, tensor: &PyTensor<'_>| TensorRef::cells(name, tensor)?.beside(q);
        let lse = lse.as_ref().map(|lse| cells("lse", lse)).transpose()?;
        let (slot_out, slot_lse) = match splits {
            true => {
                let slot_out = slot_out.as_ref().map(|x| rows("out by slot", x));
                let slot_lse = slot_lse.as_ref().map(|x| cells("lse by slot", x));
                (slot_out.transpose()?, slot_lse.transpose()?)
            }
            false => (out.as_ref().map(|x| rows("out", x)).transpose()?, lse),
        };
        let saved = slot_out.zip(slot_lse).zip(lse);
        Ok(PyBackwardInputs {
            saved: saved.map(|((slot_out, slot_lse), lse)| [slot_out, slot_lse, lse]),
            dout: rows("dout", dout)?,
            dlse: dlse.map(|dlse| cells("dlse", dlse)).transpose()?,
        })
    }

    /// The saved forward output, if any; dout; dlse.
    ///
    /// # Safety
    /// As for [`TensorRef::view`].
    pub unsafe fn views<'a>(
        &self,
    ) -> PyResult<(Option<SavedOutput<'a>>, View<'a>, Option<View<'a>>)> {
        // SAFETY: passed on to the caller.
        let view = |tensor: &TensorRef| unsafe { tensor.view() };
        let saved = self.saved.as_ref().map(|[slot_out, slot_lse, lse]| {
            Ok::<_, PyErr>(SavedOutput {
                slot_out: view(slot_out)?,
                slot_lse: view(slot_lse)?,
                lse: view(lse)?,
            })
        });
        let dlse = self.dlse.as_ref().map(view);
        Ok((saved.transpose()?, view(&self.dout)?, dlse.transpose()?))
    }
}

/// The results of a forward pass as tensors of the library of its inputs.
pub(crate) fn export_forward(
    py: Python<'_>,
    library: TensorLibrary,
    (out, lse): (Arc<Tensor>, Arc<Tensor>),
    slots: Option<(Arc<Tensor>, Arc<Tensor>)>,
) -> PyResult<PyForwardOutput> {
    let (slot_out, slot_lse) = slots.unzip();
    let export = |tensor, cells| export(py, library, unshare(tensor), cells);
    Ok((
        export(out, false)?,
        export(lse, true)?,
        slot_out.map(|x| export(x, false)).transpose()?,
        slot_lse.map(|x| export(x, true)).transpose()?,
    ))
}

/// The gradients of a backward pass as tensors of the library of its inputs.
pub(crate) fn export_gradients(
    py: Python<'_>,
    library: TensorLibrary,
    Backward {
        dq, dk, dv, dsinks, ..
    }: Backward,
) -> PyResult<PyGradients> {
    let export = |tensor| export(py, library, tensor, false);
    Ok((export(dq)?, export(dk)?, export(dv)?, dsinks))
}

/// A backward pass with the gradient of its sinks, from the output and lse that have them.
pub(crate) fn with_dsinks(
    mut backward: Backward,
    of: Option<&[f64]>,
    saved: &SavedOutput<'_>,
    (dout, dlse): (&View<'_>, Option<&View<'_>>),
) -> Result<Backward, Error> {
    if let Some(of) = of {
        let results = [&saved.slot_out, &saved.slot_lse, dout];
        backward.dsinks = Some(sinks::gradient(of, results, dlse)?);
    }
    Ok(backward)
}

/// Whether a call with this pattern on a GPU needs more than its kernels (see `_gpu_mixing.py`).
pub(crate) fn mixes(pattern: &Pattern) -> bool {
    let detached = matches!(
        pattern.mode(),
        Mode::Mix {
            gradient: MixingGradient::Detached,
            ..
        }
    );
    detached || pattern.padding_rule() != Padding::None
}

/// The logarithms of the phantom keys of these queries and each slot, as float64; None if there are
/// none.
pub(crate) fn phantoms<'py>(
    py: Python<'py>,
    pattern: &Pattern,
    shape: &Shape,
    queries: &[Run],
) -> PyResult<Option<Bound<'py, PyBytes>>> {
    let refused = |error| error::request(&error);
    pattern.check(shape).map_err(refused)?;
    let terms = Denominator::new(pattern, shape, None).map_err(refused)?;
    if terms.is_empty() {
        return Ok(None);
    }
    let slots = pattern.slots(shape.heads).len();
    let logarithms = py.detach(|| terms.logarithms(queries, slots));
    let bytes: Vec<u8> = logarithms.iter().flat_map(|x| x.to_le_bytes()).collect();
    Ok(Some(PyBytes::new(py, &bytes)))
}

/// Sizes of a call: (batch, tokens, heads, kv_heads, dim), and the number of queries and the head
/// dimension of the values if they differ from tokens and dim.
#[derive(FromPyObject)]
pub(crate) enum PySizes {
    /// As many queries as tokens, and values as wide as keys.
    Plain(usize, usize, usize, usize, usize),
    /// The same with queries and value_dim.
    Full(usize, usize, usize, usize, usize, usize, usize),
}

/// The shape of these sizes.
pub(crate) fn shape(sizes: &PySizes) -> PyResult<Shape> {
    let shape = match *sizes {
        PySizes::Plain(b, n, h, kv, d) => Shape::new(b, n, h, kv, d),
        PySizes::Full(b, n, h, kv, d, queries, value_dim) => Shape::new(b, n, h, kv, d)
            .and_then(|shape| shape.with_queries(queries)?.with_value_dim(value_dim)),
    };
    shape.map_err(|error| error::request(&error))
}

pub(crate) fn pass(backward: bool) -> Pass {
    match backward {
        true => Pass::Backward { dlse: false },
        false => Pass::Forward,
    }
}

fn on_host(q: &TensorRef) -> PyResult<()> {
    match q.device {
        TensorDevice::Host => Ok(()),
        TensorDevice::Gpu(_) => Err(PyValueError::new_err(
            "the tensors are on a GPU, but this attention was made for the cpu",
        )),
    }
}
