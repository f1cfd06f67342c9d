//! Passes on torch tensors that are on a GPU, of all ranks or of one rank of several processes.
//!
//! Inputs are read and outputs written in torch's memory, ordered with torch's current stream (see
//! `GpuCall` in encke); torch allocates the outputs, and a call returns before the GPU has computed
//! them. The decision here: kernels are loaded once per process and GPU and shared by all calls.
//!
//! The hops of a rank go from GPU to GPU where Python's wire can do that (NCCL); otherwise parcels
//! are staged in page-locked host memory and sent from there while the GPU computes. A rank's call
//! returns when its last hop is complete; the last round may still be running on the GPU.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use encke::plan::Plan;
use encke::plan::program::Role;
use encke::{
    CudaKernel, DType, DeviceView, Error, ForeignStream, GpuCall, KernelError, Pass, Shape,
};
use encke_core::Error as RequestError;
use encke_cuda::{ExternalTransport, Staged, Summation};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::attention::Attention;
use crate::error;
use crate::host_passes::PyTensor;
use crate::shard::PyShard;
use crate::tensor::{TensorDevice, TensorRef};
use crate::wire::{PyErrorSlot, PythonWire, raise};

/// Default limit for an exchange between ranks, as in the library.
const DEADLINE: Duration = Duration::from_secs(600);

/// The kernels of this process, by GPU and by whether gradients are summed in a fixed order.
static KERNELS: Mutex<Option<KernelCache>> = Mutex::new(None);

type KernelCache = HashMap<(usize, bool), Arc<CudaKernel>>;

/// The kernel of a GPU; the first call loads it.
fn kernel(number: usize, deterministic: bool) -> PyResult<Arc<CudaKernel>> {
    let mut kernels = KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
    let kernels = kernels.get_or_insert_default();
    if let Some(kernel) = kernels.get(&(number, deterministic)) {
        return Ok(Arc::clone(kernel));
    }
    let loaded = CudaKernel::new(number);
    let loaded = loaded.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
    let kernel = Arc::new(loaded.summation(match deterministic {
        true => Summation::Deterministic,
        false => Summation::Fast,
    }));
    kernels.insert((number, deterministic), Arc::clone(&kernel));
    Ok(kernel)
}

/// The kernel of a GPU on one stream of torch's.
///
/// # Safety
/// As for [`CudaKernel::on_stream`].
pub(crate) unsafe fn kernel_on(number: usize, stream: u64) -> PyResult<Arc<CudaKernel>> {
    // SAFETY: passed on to the caller.
    let kernel = unsafe { kernel(number, true)?.on_stream(stream) };
    kernel.map_err(|error| PyRuntimeError::new_err(error.to_string()))
}

/// Enqueues a pass of all ranks on one GPU. `inputs` are (q, k, v) for the forward pass and, for
/// the backward pass, (q, k, v, out, lse, dout, dlse or None) or, with the delta of each branch,
/// (q, k, v, lse, dout, delta); `outputs` are (out, lse) or (dq, dk, dv). Rows of out that no
/// head selects become 0 if the call `clears`. Returns how many bytes of the inputs are read in
/// place.
#[pyfunction]
#[pyo3(signature = (attention, inputs, outputs, stream, clears=true))]
pub(crate) fn enqueue(
    py: Python<'_>,
    attention: &Bound<'_, Attention>,
    inputs: Vec<Option<PyTensor<'_>>>,
    outputs: Vec<PyTensor<'_>>,
    stream: u64,
    clears: bool,
) -> PyResult<usize> {
    check_process()?;
    let tensors = GpuTensors::read(&inputs, &outputs)?;
    let attention = attention.get();
    refuse_on_gpu(attention)?;
    let (shape, gpu) = tensors.check()?;
    let limits = (clears, attention.ring().deadline()?.unwrap_or(DEADLINE));
    py.detach(|| {
        let kernel = kernel(gpu, attention.ring().deterministic)?;
        let plan = attention.gpu_plan(shape, tensors.dtype(), tensors.pass);
        let plan = plan.map_err(|error| error::call(&error))?;
        let checked = tensors.check_delta(&plan);
        checked.map_err(|error| error::request(&error))?;
        let kernel = match plan.ranks() {
            // SAFETY: torch's current stream.
            1 => unsafe { kernel.on_stream(stream) }
                .map_err(|error| PyRuntimeError::new_err(error.to_string()))?,
            _ => kernel,
        };
        // SAFETY: torch gives the addresses of its tensors, and keeps and reuses their memory in
        // the order of this stream; outputs were checked to be contiguous.
        let ran = unsafe { tensors.run(&kernel, &plan, stream, limits, |call, to| call.run(to)) };
        ran.map_err(|error| error::call(&error))
    })
}

/// Enqueues a pass of one rank with its rows of a sequence of `tokens` tokens. Tensors are as for
/// `enqueue`.
#[pyfunction]
pub(crate) fn enqueue_shard(
    py: Python<'_>,
    shard: &Bound<'_, PyShard>,
    tokens: usize,
    inputs: Vec<Option<PyTensor<'_>>>,
    outputs: Vec<PyTensor<'_>>,
    stream: u64,
    wire: Py<PyAny>,
) -> PyResult<()> {
    check_process()?;
    let tensors = GpuTensors::read(&inputs, &outputs)?;
    let (local, gpu) = tensors.check()?;
    let shape = local.with_tokens(tokens);
    let shard = shard.get();
    let rank = shard.library().rank();
    let raised = PyErrorSlot::default();
    let on_gpu: bool = wire.getattr(py, "on_gpu")?.extract(py)?;
    let wire = PythonWire::new(&wire, rank, &raised);
    let ran = py.detach(|| {
        let kernel = kernel(gpu, shard.deterministic())?;
        let plan = shard.library().plan(shape, tensors.dtype(), tensors.pass);
        let plan = plan.map_err(|error| error::call(&error))?;
        let checked = tensors.check_delta(&plan);
        checked.map_err(|error| error::request(&error))?;
        let device = kernel.device();
        let run = |call: &GpuCall<'_>, stream: ForeignStream| match on_gpu {
            true => {
                let mut transport = ExternalTransport::new(wire, device, rank);
                call.run_shard(stream, rank, &mut transport)
            }
            false => {
                let mut staged = Staged::new(wire, device, rank, DEADLINE);
                let ran = call.run_shard(stream, rank, &mut staged);
                if ran.is_err() {
                    // A failed wire may still access the memory in which its parcels are staged.
                    std::mem::forget(staged);
                }
                ran
            }
        };
        // SAFETY: as in `enqueue`.
        Ok::<_, PyErr>(unsafe { tensors.run(&kernel, &plan, stream, (true, DEADLINE), run) })
    });
    raise(&raised, ran?)
}

/// Refuses a forked process, which has neither the GPU's context nor the locks of its parent.
pub(crate) fn check_process() -> PyResult<()> {
    encke_pool::check().map_err(|error| error::call(&Error::Pool(error)))
}

/// Refuses settings that need tensors on the host.
fn refuse_on_gpu(attention: &Attention) -> PyResult<()> {
    if attention.splits_slots() {
        return Err(PyValueError::new_err(
            "mode=\"fkodom\" divides by sums over the sequence, on the cpu only; use \
             mode=\"group\", or move the tensors to the cpu",
        ));
    }
    if attention.ring().is_auto() {
        return Err(PyValueError::new_err(
            "\"auto\" chooses a ring of threads on the cpu; on a GPU, give the number of ranks",
        ));
    }
    match attention.ring().redundancy {
        0 => Ok(()),
        more => Err(PyValueError::new_err(format!(
            "redundancy {more} is for ranks that can die one by one; those of one GPU cannot: \
             use redundancy 0"
        ))),
    }
}

/// The tensors of a pass by role.
struct GpuTensors {
    pass: Pass,
    inputs: Vec<(Role, TensorRef)>,
    outputs: Vec<(Role, TensorRef)>,
}

/// Inputs of a backward pass in order; a forward pass has the first three.
const INPUTS: [(Role, &str); 7] = [
    (Role::Q, "q"),
    (Role::K, "k"),
    (Role::V, "v"),
    (Role::Out, "out"),
    (Role::Lse, "lse"),
    (Role::Dout, "dout"),
    (Role::Dlse, "dlse"),
];

/// The same with the delta of each branch.
const INPUTS_BY_BRANCH: [(Role, &str); 6] = [
    (Role::Q, "q"),
    (Role::K, "k"),
    (Role::V, "v"),
    (Role::Lse, "lse"),
    (Role::Dout, "dout"),
    (Role::Delta, "delta"),
];

impl GpuTensors {
    fn read(inputs: &[Option<PyTensor<'_>>], outputs: &[PyTensor<'_>]) -> PyResult<GpuTensors> {
        let read = |(role, name): (Role, &'static str), tensor: &PyTensor<'_>| {
            let tensor = match role {
                Role::Lse | Role::Dlse | Role::Delta => TensorRef::cells(name, tensor)?,
                _ => TensorRef::rows(name, tensor)?,
            };
            Ok::<_, PyErr>((role, tensor))
        };
        // The package has just made them.
        let made = |(role, name): (Role, &'static str), tensor: &PyTensor<'_>| {
            let tensor = match role {
                Role::Lse => TensorRef::made_cells(name, tensor)?,
                _ => TensorRef::made_rows(name, tensor)?,
            };
            Ok::<_, PyErr>((role, tensor))
        };
        let gradients = || vec![(Role::Dq, "dq"), (Role::Dk, "dk"), (Role::Dv, "dv")];
        let (pass, roles, expected) = match (inputs, outputs.len()) {
            ([_, _, _], 2) => {
                let results = vec![(Role::Out, "out"), (Role::Lse, "lse")];
                (Pass::Forward, &INPUTS[..3], results)
            }
            ([_, _, _, _, _, _, dlse], 3) => {
                let dlse = dlse.is_some();
                (Pass::Backward { dlse }, &INPUTS[..], gradients())
            }
            ([_, _, _, _, _, _], 3) => (Pass::BackwardByBranch, &INPUTS_BY_BRANCH[..], gradients()),
            (_, count) => {
                return Err(PyValueError::new_err(format!(
                    "a forward pass has 3 inputs and 2 outputs, a backward pass 7 (or 6) and 3, \
                     not {} and {count}",
                    inputs.len()
                )));
            }
        };
        let mut tensors = GpuTensors {
            pass,
            inputs: Vec::with_capacity(inputs.len()),
            outputs: Vec::with_capacity(expected.len()),
        };
        for (&role, tensor) in roles.iter().zip(inputs) {
            match tensor {
                Some(tensor) => tensors.inputs.push(read(role, tensor)?),
                None if role.0 == Role::Dlse => {}
                None => return Err(PyValueError::new_err(format!("{} is None", role.1))),
            }
        }
        for (role, tensor) in expected.into_iter().zip(outputs) {
            tensors.outputs.push(made(role, tensor)?);
        }
        let q = tensors.inputs[0].1;
        for (_, tensor) in tensors.inputs.iter().chain(&tensors.outputs) {
            tensor.beside(&q)?;
        }
        Ok(tensors)
    }

    fn dtype(&self) -> DType {
        self.inputs[0].1.dtype
    }

    /// The shape of the rows given and the number of the GPU, if all tensors fit together.
    fn check(&self) -> PyResult<(Shape, usize)> {
        let shape = self.shape().map_err(|error| error::request(&error))?;
        let TensorDevice::Gpu(gpu) = self.inputs[0].1.device else {
            return Err(PyValueError::new_err(
                "q is on the cpu, but the call is for a GPU",
            ));
        };
        for (role, tensor) in &self.outputs {
            let expected = dims(*role, &shape);
            let [_, n, h, d] = expected;
            let dense = [n * h * d, h * d, d, 1];
            // The stride of a dimension of size 1 does not matter.
            let mut strides = tensor.strides.iter().zip(dense).zip(expected);
            let contiguous = strides.all(|((&stride, dense), size)| size <= 1 || stride == dense);
            if tensor.dims != expected || !contiguous {
                return Err(PyValueError::new_err(format!(
                    "{} is {:?} with strides {:?}; it must be contiguous and {expected:?}",
                    tensor.name, tensor.dims, tensor.strides
                )));
            }
        }
        Ok((shape, gpu))
    }

    /// Refuses deltas that are not those of the plan's branches.
    fn check_delta(&self, plan: &Plan) -> Result<(), RequestError> {
        let found = self.inputs.iter().find(|(role, _)| *role == Role::Delta);
        let shape = &plan.request().shape;
        let expected = [shape.batch, shape.queries, plan.delta_slots(), 1];
        match found {
            Some((_, tensor)) if tensor.dims != expected => Err(RequestError::ShapeMismatch {
                tensor: tensor.name,
                got: tensor.dims.to_vec(),
                expected: expected.to_vec(),
            }),
            _ => Ok(()),
        }
    }

    fn shape(&self) -> Result<Shape, RequestError> {
        let [(_, q), (_, k), (_, v), ..] = self.inputs[..] else {
            unreachable!("a pass has q, k and v")
        };
        let ([batch, queries, heads, dim], [_, tokens, kv_heads, _]) = (q.dims, k.dims);
        let shape = Shape::new(batch, tokens, heads, kv_heads, dim)?
            .with_queries(queries)?
            .with_value_dim(v.dims[3])?;
        // How many deltas a row has is the pattern's: the plan says it.
        let inputs = self.inputs.iter().filter(|(role, _)| *role != Role::Delta);
        for (role, tensor) in inputs {
            let expected = dims(*role, &shape);
            if tensor.dims != expected {
                return Err(RequestError::ShapeMismatch {
                    tensor: tensor.name,
                    got: tensor.dims.to_vec(),
                    expected: expected.to_vec(),
                });
            }
            if matches!(role, Role::K | Role::V) && tensor.dtype != q.dtype {
                return Err(RequestError::DTypeMismatch {
                    tensor: tensor.name,
                    got: tensor.dtype,
                    expected: q.dtype,
                });
            }
        }
        Ok(shape)
    }

    /// Calls `run` with the call on these tensors and the stream it is ordered with.
    ///
    /// # Safety
    /// All tensors are on the kernel's GPU and stay allocated in the order of the stream; outputs
    /// are contiguous and not shared; the stream is one of that GPU.
    unsafe fn run<T>(
        &self,
        kernel: &CudaKernel,
        plan: &Plan,
        stream: u64,
        (clears, deadline): (bool, Duration),
        run: impl FnOnce(&GpuCall<'_>, ForeignStream) -> Result<T, Error>,
    ) -> Result<T, Error> {
        // SAFETY: passed on to the caller.
        let stream = unsafe { ForeignStream::begin(kernel.device(), stream) };
        let stream = stream.map_err(KernelError::from)?;
        let views =
            |tensors: &[(Role, TensorRef)], writable: bool| -> Vec<(Role, DeviceView<'_>)> {
                let view = |(role, tensor): &(Role, TensorRef)| {
                    let address = tensor.address as u64;
                    let (dims, strides) = (tensor.dims, tensor.strides);
                    // SAFETY: passed on to the caller.
                    let view =
                        unsafe { DeviceView::new(tensor.dtype, address, dims, strides, writable) };
                    (*role, view)
                };
                tensors.iter().map(view).collect()
            };
        let call = GpuCall {
            kernel,
            plan,
            inputs: &views(&self.inputs, false),
            outputs: &views(&self.outputs, true),
            clears,
            deadline,
        };
        run(&call, stream)
    }
}

/// The dimensions of a tensor by its role.
fn dims(role: Role, shape: &Shape) -> [usize; 4] {
    let queries = |dim: usize| [shape.batch, shape.queries, shape.heads, dim];
    let keys = |dim: usize| [shape.batch, shape.tokens, shape.kv_heads, dim];
    match role {
        Role::K | Role::Dk => keys(shape.dim),
        Role::V | Role::Dv => keys(shape.value_dim),
        Role::Lse | Role::Dlse => queries(1),
        Role::Out | Role::Dout => queries(shape.value_dim),
        _ => queries(shape.dim),
    }
}
