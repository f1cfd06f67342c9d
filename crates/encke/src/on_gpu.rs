//! Passes on tensors that stay on a GPU: what is refused, and what the tensors must look like.
//!
//! The decision here: whoever calls brings all tensors, outputs too, since they are to be the caller's
//! own; which there are, and of which types, is in the plan.

use std::sync::Arc;

use encke_core::kernel::KernelError;
use encke_core::memory::Memory;
use encke_core::plan::program::Role;
use encke_core::plan::{Pass, Plan};
use encke_core::{DType, Error as RequestError, Shape};
use encke_cuda::{CudaKernel, DeviceView, ForeignStream};
use encke_ring::RingError as Error;
use encke_ring::call;

use crate::attention::{Attention, Report};
use crate::checkpoint::CheckpointPolicy;
use crate::gpu_call::{Enqueued, GpuCall};

impl Attention<CudaKernel> {
    /// Carries out a pass on tensors that are on the kernel's GPU already, on behalf of a guest.
    /// Nothing has been computed yet when it returns, and the guest's call has ended: what its owner
    /// enqueues from then on comes after it. All outputs are given, contiguous and in the shapes that
    /// [`Attention::plan`] says; the log-sum-exp of the forward pass is what its backward pass reads.
    pub fn enqueue(
        &self,
        guest: ForeignStream,
        pass: Pass,
        inputs: &[(Role, DeviceView<'_>)],
        outputs: &[(Role, DeviceView<'_>)],
    ) -> Result<Report, Error> {
        let (shape, dtype) = shape_of(inputs)?;
        let plan = self.plan_on_gpu(shape, dtype, pass)?;
        check(&plan, inputs, outputs)?;
        let call = GpuCall {
            kernel: self.kernel(),
            plan: &plan,
            inputs,
            outputs,
            deadline: self.settings.deadline,
        };
        let Enqueued { trace, memory, .. } = call.run(guest)?;
        Ok(Report {
            plan,
            trace,
            memory,
            deaths: Vec::new(),
        })
    }

    /// The plan of such a pass, or what is done with tensors of the host only.
    pub fn plan_on_gpu(&self, shape: Shape, dtype: DType, pass: Pass) -> Result<Arc<Plan>, Error> {
        let refused = |what: &str| {
            let (kernel, what) = (self.kernel().name(), what.to_string());
            Err(KernelError::Unsupported { kernel, what }.into())
        };
        let settings = &self.settings;
        if settings.pattern.splits_slots() {
            return refused(
                "branches that are combined after attention, on tensors that stay on a GPU: they are \
                 combined on the host; use an exact mixing gradient or groups, or move the tensors \
                 to the CPU",
            );
        }
        if settings.auto.is_some() {
            return Err(Error::Undecided {
                reason: "a ring of threads on the CPU is what can be left open; for tensors that \
                         stay on a GPU, give the number of ranks"
                    .into(),
            });
        }
        if settings.redundancy > 0 {
            return refused(
                "redundancy on tensors that stay on a GPU: its ranks cannot die one by one; use \
                 redundancy 0",
            );
        }
        self.plan(shape, dtype, pass)
    }

    /// What its forward pass keeps for its backward pass.
    pub fn checkpoint_policy(&self) -> CheckpointPolicy {
        self.settings.policy
    }
}

/// The shape and type that q, k and v amount to, if they agree with one another.
fn shape_of(inputs: &[(Role, DeviceView<'_>)]) -> Result<(Shape, DType), Error> {
    let of = |wanted: Role| {
        let found = inputs.iter().find(|(role, _)| *role == wanted);
        found
            .map(|(_, lent)| lent)
            .ok_or(Error::MissingInput { role: wanted })
    };
    let (q, k, v) = (of(Role::Q)?, of(Role::K)?, of(Role::V)?);
    let [batch, tokens, heads, dim] = q.dims();
    let kv_heads = k.dims()[2];
    let shape = Shape::new(batch, tokens, heads, kv_heads, dim)?;
    for (tensor, lent) in [("k", k), ("v", v)] {
        same_shape(tensor, lent.dims(), [batch, tokens, kv_heads, dim])?;
        if lent.dtype() != q.dtype() {
            let mismatch = RequestError::DTypeMismatch {
                tensor,
                got: lent.dtype(),
                expected: q.dtype(),
            };
            return Err(mismatch.into());
        }
    }
    Ok((shape, q.dtype()))
}

/// Refuses tensors that are missing or of another shape than the plan was made for, and outputs that
/// cannot be written as they lie.
fn check(
    plan: &Plan,
    inputs: &[(Role, DeviceView<'_>)],
    outputs: &[(Role, DeviceView<'_>)],
) -> Result<(), Error> {
    let of = |given: &'_ [(Role, DeviceView<'_>)], wanted: Role| {
        let at = given.iter().position(|(role, _)| *role == wanted);
        at.ok_or(Error::MissingInput { role: wanted })
    };
    for (role, tensor, expected) in call::inputs(plan) {
        let (_, lent) = &inputs[of(inputs, role)?];
        same_shape(tensor, lent.dims(), expected)?;
    }
    for (role, expected, _) in call::outputs(plan) {
        let (_, lent) = &outputs[of(outputs, role)?];
        same_shape("an output", lent.dims(), expected)?;
        let [_, n, h, d] = expected;
        // What there is one of has any stride.
        let mut steps = lent
            .strides()
            .into_iter()
            .zip([n * h * d, h * d, d, 1])
            .zip(expected);
        let lies_so = steps.all(|((stride, wanted), size)| size <= 1 || stride == wanted);
        if !lies_so || !lent.is_writable() {
            let what = format!(
                "{role:?} in a tensor with strides {:?}: outputs are contiguous, and lent to be \
                 written",
                lent.strides()
            );
            let kernel = "cuda";
            return Err(KernelError::Unsupported { kernel, what }.into());
        }
    }
    Ok(())
}

fn same_shape(
    tensor: &'static str,
    got: [usize; 4],
    expected: [usize; 4],
) -> Result<(), RequestError> {
    if got == expected {
        return Ok(());
    }
    Err(RequestError::ShapeMismatch {
        tensor,
        got: got.to_vec(),
        expected: expected.to_vec(),
    })
}
