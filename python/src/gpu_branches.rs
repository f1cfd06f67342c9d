//! What patterns of branches need around the calls on a GPU: extra terms of finished rows, and the
//! delta of each branch where mixing weights are constants (see `_gpu_mixing.py`).

use encke::{DType, DeviceView, ForeignStream, KernelError};
use encke_cuda::{BranchDeltas, CudaKernel};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::attention::Attention;
use crate::error;
use crate::gpu::{check_process, kernel_on};
use crate::host_passes::PyTensor;
use crate::tensor::{TensorDevice, TensorRef};

/// Adds terms to the rows of out and lse, in place. `terms` are their logarithms, `[1, n, heads]`
/// or `[1, 1, heads]`, in the type of lse.
#[pyfunction]
pub(crate) fn add_terms(
    py: Python<'_>,
    out: PyTensor<'_>,
    lse: PyTensor<'_>,
    terms: PyTensor<'_>,
    stream: u64,
) -> PyResult<()> {
    let tensors = [
        TensorRef::made_rows("out", &out)?,
        TensorRef::made_cells("lse", &lse)?,
        TensorRef::made_cells("extra terms", &terms)?,
    ];
    run(py, &tensors, stream, |kernel, stream| {
        let [out, lse, terms] = &tensors;
        // SAFETY: torch keeps the memory of these tensors in the order of this stream.
        let views = unsafe { [view(out, true), view(lse, true), view(terms, false)] };
        kernel.add_terms(stream, views.each_ref())
    })
}

/// The tensors of [`BranchDeltas`], in its order.
#[derive(FromPyObject)]
pub(crate) struct PyDeltas<'py>(
    PyTensor<'py>,
    Option<PyTensor<'py>>,
    PyTensor<'py>,
    PyTensor<'py>,
    PyTensor<'py>,
    PyTensor<'py>,
);

struct DeltaTensors {
    dout: TensorRef,
    dlse: Option<TensorRef>,
    lse: TensorRef,
    delta: TensorRef,
    rest: TensorRef,
    weight: TensorRef,
}

impl DeltaTensors {
    fn read(PyDeltas(dout, dlse, lse, delta, rest, weight): &PyDeltas<'_>) -> PyResult<Self> {
        let dlse = dlse.as_ref();
        Ok(DeltaTensors {
            dout: TensorRef::rows("dout", dout)?,
            dlse: dlse.map(|of| TensorRef::cells("dlse", of)).transpose()?,
            lse: TensorRef::made_cells("lse", lse)?,
            delta: TensorRef::made_cells("delta", delta)?,
            rest: TensorRef::made_cells("the rest of delta", rest)?,
            weight: TensorRef::made_cells("the weight that is left", weight)?,
        })
    }

    fn all(&self) -> Vec<TensorRef> {
        let fixed = [self.dout, self.lse, self.delta, self.rest, self.weight];
        fixed.into_iter().chain(self.dlse).collect()
    }

    /// # Safety
    /// As for [`view`].
    unsafe fn views(&self) -> BranchDeltas<'_> {
        // SAFETY: passed on to the caller.
        unsafe {
            BranchDeltas {
                dout: view(&self.dout, false),
                dlse: self.dlse.as_ref().map(|of| view(of, false)),
                lse: view(&self.lse, false),
                delta: view(&self.delta, true),
                rest: view(&self.rest, true),
                weight: view(&self.weight, true),
            }
        }
    }
}

/// Begins the deltas of branches with the whole output.
#[pyfunction]
pub(crate) fn start_deltas(
    py: Python<'_>,
    deltas: PyDeltas<'_>,
    out: PyTensor<'_>,
    stream: u64,
) -> PyResult<()> {
    let out = TensorRef::made_rows("out", &out)?;
    let tensors = DeltaTensors::read(&deltas)?;
    let mut all = tensors.all();
    all.push(out);
    run(py, &all, stream, |kernel, stream| {
        // SAFETY: torch keeps the memory of these tensors in the order of this stream.
        let (views, out) = unsafe { (tensors.views(), view(&out, false)) };
        kernel.start_deltas(stream, &views, &out)
    })
}

/// Computes the delta of a branch, from (out, lse, extra terms or None) that it alone computes or,
/// without, from what all other branches have left.
#[pyfunction]
pub(crate) fn add_delta(
    py: Python<'_>,
    attention: &Bound<'_, Attention>,
    branch: usize,
    deltas: PyDeltas<'_>,
    own: Option<(PyTensor<'_>, PyTensor<'_>, Option<PyTensor<'_>>)>,
    stream: u64,
) -> PyResult<()> {
    let tensors = DeltaTensors::read(&deltas)?;
    let own = own.as_ref().map(|(out, lse, terms)| {
        let terms = terms.as_ref();
        let terms = terms.map(|of| TensorRef::made_cells("extra terms", of));
        Ok::<_, PyErr>((
            TensorRef::made_rows("the out of a branch", out)?,
            TensorRef::made_cells("the lse of a branch", lse)?,
            terms.transpose()?,
        ))
    });
    let own = own.transpose()?;
    let mut all = tensors.all();
    if let Some((out, lse, terms)) = &own {
        all.extend([*out, *lse]);
        all.extend(*terms);
    }
    let pattern = attention.get().pattern();
    run(py, &all, stream, |kernel, stream| {
        // SAFETY: torch keeps the memory of these tensors in the order of this stream.
        let (views, own) = unsafe {
            let own = own.as_ref().map(|(out, lse, terms)| {
                let terms = terms.as_ref().map(|of| view(of, false));
                (view(out, false), view(lse, false), terms)
            });
            (tensors.views(), own)
        };
        let own = own.as_ref();
        let own = own.map(|(out, lse, terms)| (out, lse, terms.as_ref()));
        kernel.add_delta(stream, &views, (pattern, branch), own)
    })
}

/// Enqueues an operation on tensors of one GPU, on torch's current stream.
fn run(
    py: Python<'_>,
    tensors: &[TensorRef],
    stream: u64,
    operation: impl FnOnce(&CudaKernel, &ForeignStream) -> encke_cuda::Result<()> + Send,
) -> PyResult<()> {
    check_process()?;
    let [first, others @ ..] = tensors else {
        unreachable!("an operation has tensors")
    };
    others
        .iter()
        .try_for_each(|of| of.beside(first).map(|_| ()))?;
    let TensorDevice::Gpu(gpu) = first.device else {
        let what = format!("{} is on the cpu, but the call is for a GPU", first.name);
        return Err(PyValueError::new_err(what));
    };
    py.detach(|| {
        // SAFETY: torch's current stream.
        let kernel = unsafe { kernel_on(gpu, stream) }?;
        // SAFETY: as above.
        let stream = unsafe { ForeignStream::begin(kernel.device(), stream) };
        let ran = stream.and_then(|stream| {
            operation(&kernel, &stream)?;
            stream.end()
        });
        ran.map_err(|error| error::call(&KernelError::from(error).into()))
    })
}

/// # Safety
/// The tensor is on the call's GPU and stays allocated in the order of its stream; if `writable`,
/// it is not shared.
unsafe fn view(tensor: &TensorRef, writable: bool) -> DeviceView<'_> {
    let address = tensor.address as u64;
    let dtype: DType = tensor.dtype;
    // SAFETY: passed on to the caller.
    unsafe { DeviceView::new(dtype, address, tensor.dims, tensor.strides, writable) }
}
