//! Attention on tensors of a GPU, as Python calls it: results are written into tensors that torch has
//! allocated, and nothing has been computed yet when a call returns.

use std::time::Duration;

use encke::plan::program::Role;
use encke::{DType, Pass, Shape};
use encke_core::Error as RequestError;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::attention::{Attention, Given};
use crate::error;
use crate::gpu::{Call, kernel};
use crate::tensor::{Lent, Place};

/// How long an exchange between ranks waits unless told otherwise, as in the library.
const DEADLINE: Duration = Duration::from_secs(600);

/// Tensors by what they are.
pub(crate) type Roles = Vec<(Role, Lent)>;

/// What a forward pass reads and writes.
pub(crate) fn forward_roles(
    [q, k, v]: [Given<'_, '_>; 3],
    [out, lse]: [Given<'_, '_>; 2],
) -> PyResult<(Roles, Roles)> {
    let q = Lent::rows("q", q)?;
    let rows = |name, tensor| Lent::rows(name, tensor)?.beside(&q);
    let (k, v, out) = (rows("k", k)?, rows("v", v)?, rows("out", out)?);
    let lse = Lent::cells("lse", lse)?.beside(&q)?;
    let inputs = vec![(Role::Q, q), (Role::K, k), (Role::V, v)];
    Ok((inputs, vec![(Role::Out, out), (Role::Lse, lse)]))
}

/// What a backward pass reads and writes.
pub(crate) fn backward_roles(
    [q, k, v]: [Given<'_, '_>; 3],
    [out, lse, dout]: [Given<'_, '_>; 3],
    dlse: Option<Given<'_, '_>>,
    [dq, dk, dv]: [Given<'_, '_>; 3],
) -> PyResult<(Roles, Roles)> {
    let q = Lent::rows("q", q)?;
    let rows = |name, tensor| Lent::rows(name, tensor)?.beside(&q);
    let cells = |name, tensor| Lent::cells(name, tensor)?.beside(&q);
    let mut inputs = vec![
        (Role::Q, q),
        (Role::K, rows("k", k)?),
        (Role::V, rows("v", v)?),
        (Role::Out, rows("out", out)?),
        (Role::Lse, cells("lse", lse)?),
        (Role::Dout, rows("dout", dout)?),
    ];
    if let Some(dlse) = dlse {
        inputs.push((Role::Dlse, cells("dlse", dlse)?));
    }
    let outputs = vec![
        (Role::Dq, rows("dq", dq)?),
        (Role::Dk, rows("dk", dk)?),
        (Role::Dv, rows("dv", dv)?),
    ];
    Ok((inputs, outputs))
}

/// Writes out and lse; returns how many bytes of the inputs are read where they are.
#[pyfunction]
#[expect(
    clippy::too_many_arguments,
    reason = "what a forward pass reads and writes"
)]
pub(crate) fn forward_gpu(
    py: Python<'_>,
    attention: &Bound<'_, Attention>,
    q: Given<'_, '_>,
    k: Given<'_, '_>,
    v: Given<'_, '_>,
    out: Given<'_, '_>,
    lse: Given<'_, '_>,
    stream: u64,
) -> PyResult<usize> {
    let (inputs, outputs) = forward_roles([q, k, v], [out, lse])?;
    attention
        .get()
        .enqueue(py, &inputs, &outputs, Pass::Forward, stream)
}

/// Writes dq, dk and dv; returns how many bytes of the inputs are read where they are.
#[pyfunction]
#[pyo3(signature = (attention, q, k, v, out, lse, dout, dlse, dq, dk, dv, stream))]
#[expect(
    clippy::too_many_arguments,
    reason = "what a backward pass reads and writes"
)]
pub(crate) fn backward_gpu(
    py: Python<'_>,
    attention: &Bound<'_, Attention>,
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
) -> PyResult<usize> {
    let (inputs, outputs) = backward_roles([q, k, v], [out, lse, dout], dlse, [dq, dk, dv])?;
    let pass = Pass::Backward {
        dlse: dlse.is_some(),
    };
    attention.get().enqueue(py, &inputs, &outputs, pass, stream)
}

impl Attention {
    fn enqueue(
        &self,
        py: Python<'_>,
        inputs: &[(Role, Lent)],
        outputs: &[(Role, Lent)],
        pass: Pass,
        stream: u64,
    ) -> PyResult<usize> {
        self.refuse_on_gpu()?;
        let shape = shape_of(inputs).map_err(|error| error::request(&error))?;
        let (_, q) = inputs[0];
        let Place::Gpu(number) = q.place else {
            return Err(PyValueError::new_err(
                "q is on the cpu, but a GPU was asked for",
            ));
        };
        check_outputs(outputs, &shape)?;
        let deadline = self.ring().deadline()?.unwrap_or(DEADLINE);
        py.detach(|| {
            let kernel = kernel(number, self.ring().deterministic)?;
            let plan = self.library().plan(shape, q.dtype, pass);
            let plan = plan.map_err(|error| error::call(&error))?;
            let call = Call {
                kernel: &kernel,
                plan: &plan,
                stream,
                inputs,
                outputs,
                deadline,
            };
            // SAFETY: torch tells where its tensors are; it keeps and reuses their memory in the
            // order of the stream it has told, and outputs were checked to be contiguous.
            unsafe { call.run() }.map_err(|error| error::call(&error))
        })
    }

    /// Refuses what is done on the host only.
    fn refuse_on_gpu(&self) -> PyResult<()> {
        if self.splits_slots() {
            return Err(PyValueError::new_err(
                "branches that are combined after attention (mixing_gradient=\"detached\", \
                 mode=\"fkodom\") are combined on the cpu only; use mixing_gradient=\"exact\" or \
                 mode=\"group\", or move the tensors to the cpu",
            ));
        }
        if self.ring().is_auto() {
            return Err(PyValueError::new_err(
                "\"auto\" chooses a ring of threads on the cpu; on a GPU, give the number of ranks",
            ));
        }
        match self.ring().redundancy {
            0 => Ok(()),
            more => Err(PyValueError::new_err(format!(
                "redundancy {more} is for ranks that can die one by one; those of one GPU cannot: \
                 use redundancy 0"
            ))),
        }
    }
}

/// Refuses outputs that are not contiguous, or of another shape.
pub(crate) fn check_outputs(outputs: &[(Role, Lent)], shape: &Shape) -> PyResult<()> {
    for (role, lent) in outputs {
        let expected = dims(*role, shape);
        let [_, n, h, d] = expected;
        let contiguous = [n * h * d, h * d, d, 1];
        // What there is one of has any stride.
        let mut steps = lent.strides.iter().zip(contiguous).zip(expected);
        let lies_so = steps.all(|((&stride, wanted), size)| size <= 1 || stride == wanted);
        if lent.dims != expected || !lies_so {
            return Err(PyValueError::new_err(format!(
                "{} is {:?} with strides {:?}; it must be contiguous and {expected:?}",
                lent.name, lent.dims, lent.strides
            )));
        }
    }
    Ok(())
}

/// The shape that tensors amount to, if they agree with one another.
pub(crate) fn shape_of(inputs: &[(Role, Lent)]) -> Result<Shape, RequestError> {
    let of = |wanted: Role| inputs.iter().find(|(role, _)| *role == wanted);
    let [batch, tokens, heads, dim] = inputs[0].1.dims;
    let kv_heads = of(Role::K).map_or(heads, |(_, k)| k.dims[2]);
    let shape = Shape::new(batch, tokens, heads, kv_heads, dim)?;
    for (role, lent) in inputs {
        let expected = dims(*role, &shape);
        if lent.dims != expected {
            return Err(RequestError::ShapeMismatch {
                tensor: lent.name,
                got: lent.dims.to_vec(),
                expected: expected.to_vec(),
            });
        }
        let q: DType = inputs[0].1.dtype;
        if matches!(role, Role::K | Role::V) && lent.dtype != q {
            return Err(RequestError::DTypeMismatch {
                tensor: lent.name,
                got: lent.dtype,
                expected: q,
            });
        }
    }
    Ok(shape)
}

/// The shape of a tensor by its role.
fn dims(role: Role, shape: &Shape) -> [usize; 4] {
    let of = |heads: usize, dim: usize| [shape.batch, shape.tokens, heads, dim];
    match role {
        Role::K | Role::V | Role::Dk | Role::Dv => of(shape.kv_heads, shape.dim),
        Role::Lse | Role::Dlse => of(shape.heads, 1),
        _ => of(shape.heads, shape.dim),
    }
}
