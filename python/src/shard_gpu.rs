//! One rank of a ring over processes, on tensors of a GPU.
//!
//! Jobs run on the GPU and on behalf of torch's stream, as in `on_gpu`. Hops go from GPU to GPU where
//! Python's wire can (NCCL); else they are staged: parcels go to page-locked memory of the host and
//! from there over the wire, while the GPU computes. A call returns when its last hop has landed; what
//! the last round computes may still be under way.

use std::sync::Mutex;
use std::time::Duration;

use encke::plan::program::Role;
use encke::{Pass, Shape};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::attention::Given;
use crate::distributed::{Shard, Wire, told};
use crate::error;
use crate::gpu::{Call, ShardWire, kernel};
use crate::on_gpu::{backward_roles, check_outputs, forward_roles, shape_of};
use crate::tensor::{Lent, Place};

/// How long an exchange waits for the GPU itself; for other ranks it waits as long as the wire does.
const DEADLINE: Duration = Duration::from_secs(600);

/// Writes out and lse of this rank's rows of a sequence of so many tokens.
#[pyfunction]
#[expect(
    clippy::too_many_arguments,
    reason = "what a forward pass reads and writes"
)]
pub(crate) fn forward_shard_gpu(
    py: Python<'_>,
    shard: &Bound<'_, Shard>,
    tokens: usize,
    q: Given<'_, '_>,
    k: Given<'_, '_>,
    v: Given<'_, '_>,
    out: Given<'_, '_>,
    lse: Given<'_, '_>,
    stream: u64,
    wire: Py<PyAny>,
) -> PyResult<()> {
    let (inputs, outputs) = forward_roles([q, k, v], [out, lse])?;
    let pass = (Pass::Forward, tokens);
    shard
        .get()
        .enqueue(py, &inputs, &outputs, pass, stream, &wire)
}

/// Writes dq, dk and dv of this rank's rows.
#[pyfunction]
#[pyo3(signature = (shard, tokens, q, k, v, out, lse, dout, dlse, dq, dk, dv, stream, wire))]
#[expect(
    clippy::too_many_arguments,
    reason = "what a backward pass reads and writes"
)]
pub(crate) fn backward_shard_gpu(
    py: Python<'_>,
    shard: &Bound<'_, Shard>,
    tokens: usize,
    q: Given<'_, '_>,
    k: Given<'_, '_>,
    v: Given<'_, '_>,
    out: Given<'_, '_>,
    lse: Given<'_, '_>,
    dout: Given<'_, '_>,
    dlse: Option<Given<'_, '_>>,
    dq: Given<'_, '_>,
    dk: Given<'_, '_>,
    dv: Given<'_, '_>,
    stream: u64,
    wire: Py<PyAny>,
) -> PyResult<()> {
    let (inputs, outputs) = backward_roles([q, k, v], [out, lse, dout], dlse, [dq, dk, dv])?;
    let dlse = dlse.is_some();
    let pass = (Pass::Backward { dlse }, tokens);
    shard
        .get()
        .enqueue(py, &inputs, &outputs, pass, stream, &wire)
}

impl Shard {
    fn enqueue(
        &self,
        py: Python<'_>,
        inputs: &[(Role, Lent)],
        outputs: &[(Role, Lent)],
        (pass, tokens): (Pass, usize),
        stream: u64,
        wire: &Py<PyAny>,
    ) -> PyResult<()> {
        let here = shape_of(inputs).map_err(|error| error::request(&error))?;
        check_outputs(outputs, &here)?;
        let shape = Shape { tokens, ..here };
        let (_, q) = inputs[0];
        let Place::Gpu(number) = q.place else {
            return Err(PyValueError::new_err(
                "q is on the cpu, but a GPU was asked for",
            ));
        };
        let raised = Mutex::new(None);
        let on_gpu: bool = wire.getattr(py, "on_gpu")?.extract(py)?;
        let wire = Wire::new(wire, self.library().rank(), &raised);
        let wire = match on_gpu {
            true => ShardWire::OnGpu(wire),
            false => ShardWire::OnHost(wire),
        };
        let ran = py.detach(|| {
            let kernel = kernel(number, self.deterministic())?;
            let plan = self.library().plan(shape, q.dtype, pass);
            let plan = plan.map_err(|error| error::call(&error))?;
            let call = Call {
                kernel: &kernel,
                plan: &plan,
                stream,
                inputs,
                outputs,
                deadline: DEADLINE,
            };
            // SAFETY: torch tells where its tensors are; it keeps and reuses their memory in the
            // order of the stream it has told, and outputs were checked to be contiguous.
            Ok::<_, PyErr>(unsafe { call.run_shard(self.library().rank(), wire) })
        });
        told(&raised, ran?)
    }
}
