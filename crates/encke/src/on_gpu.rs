//! Passes on tensors that stay on a GPU: the checks before the call is enqueued.
//!
//! The decision here: the caller allocates all tensors, outputs too, because its own library must
//! own them; their shapes and types follow from the plan.

use std::sync::Arc;

use encke_core::kernel::KernelError;
use encke_core::memory::Memory;
use encke_core::plan::program::Role;
use encke_core::plan::{Pass, Plan};
use encke_core::{DType, Padding, Shape};
use encke_cuda::{CudaKernel, DeviceView, ForeignStream};
use encke_ring::RingError as Error;
use encke_ring::call;

use crate::attention::Attention;
use crate::checkpoint::CheckpointPolicy;
use crate::gpu_call::{EnqueueReport, GpuCall};
use crate::passes::{same_shape, shape_of};
use crate::results::Report;

impl Attention<CudaKernel> {
    /// Enqueues a pass on tensors that are on the kernel's GPU already. It runs after the work that
    /// is on `stream` now and before the work enqueued on it after this returns; on return the GPU
    /// may not have started. The caller gives all outputs, contiguous and in the shapes of
    /// [`Attention::plan`]. The backward pass reads the forward pass's out and lse.
    pub fn enqueue(
        &self,
        stream: ForeignStream,
        pass: Pass,
        inputs: &[(Role, DeviceView<'_>)],
        outputs: &[(Role, DeviceView<'_>)],
    ) -> Result<Report, Error> {
        let (shape, dtype) = shape_of_inputs(inputs)?;
        let plan = self.plan_on_gpu(shape, dtype, pass)?;
        check(&plan, inputs, outputs)?;
        let call = GpuCall {
            kernel: self.kernel(),
            plan: &plan,
            inputs,
            outputs,
            clears: true,
            deadline: self.settings.deadline,
        };
        let EnqueueReport { trace, memory } = call.run_reported(stream)?;
        Ok(Report {
            plan,
            trace,
            memory,
            deaths: Vec::new(),
        })
    }

    /// The plan of such a pass; an error for settings that need tensors on the host.
    pub fn plan_on_gpu(&self, shape: Shape, dtype: DType, pass: Pass) -> Result<Arc<Plan>, Error> {
        let refused = |what: &str| {
            let (kernel, what) = (self.kernel().name(), what.to_string());
            Err(KernelError::Unsupported { kernel, what }.into())
        };
        let settings = &self.settings;
        if settings.pattern.splits_slots() {
            return refused(
                "a pattern whose branches are combined after attention, on tensors that stay on a \
                 GPU: branches are combined on the host; use an exact mixing gradient or groups, \
                 or move the tensors to the CPU",
            );
        }
        if settings.pattern.padding_rule() != Padding::None {
            return refused(
                "torchscale's padding on tensors that stay on a GPU: its extra terms are added on \
                 the host; move the tensors to the CPU",
            );
        }
        if settings.auto.is_some() {
            return Err(Error::Undecided {
                reason: "settings can be chosen automatically for a ring of CPU threads only; for \
                         tensors that stay on a GPU, give the number of ranks"
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

    /// What the forward pass saves for the backward pass.
    pub fn checkpoint_policy(&self) -> CheckpointPolicy {
        self.settings.policy
    }
}

fn find<'a>(
    tensors: &'a [(Role, DeviceView<'a>)],
    role: Role,
) -> Result<&'a DeviceView<'a>, Error> {
    let found = tensors.iter().find(|(of, _)| *of == role);
    found
        .map(|(_, view)| view)
        .ok_or(Error::MissingInput { role })
}

/// The shape and type of the call, if q, k and v agree with one another.
fn shape_of_inputs(inputs: &[(Role, DeviceView<'_>)]) -> Result<(Shape, DType), Error> {
    let signature = |role| find(inputs, role).map(|view| (view.dims(), view.dtype()));
    let q = signature(Role::Q)?;
    let shape = shape_of([q, signature(Role::K)?, signature(Role::V)?])?;
    Ok((shape, q.1))
}

/// Refuses missing tensors, shapes that differ from the plan's, and outputs that are not contiguous
/// or not writable.
fn check(
    plan: &Plan,
    inputs: &[(Role, DeviceView<'_>)],
    outputs: &[(Role, DeviceView<'_>)],
) -> Result<(), Error> {
    for (role, tensor, expected) in call::inputs(plan) {
        same_shape(tensor, find(inputs, role)?.dims(), expected)?;
    }
    for (role, expected, _) in call::outputs(plan) {
        let view = find(outputs, role)?;
        same_shape("an output", view.dims(), expected)?;
        let [_, n, h, d] = expected;
        // The stride of a dimension of size 1 does not matter.
        let mut strides = view
            .strides()
            .into_iter()
            .zip([n * h * d, h * d, d, 1])
            .zip(expected);
        let contiguous = strides.all(|((stride, dense), size)| size <= 1 || stride == dense);
        if !contiguous || !view.is_writable() {
            let what = format!(
                "{role:?} in a tensor with strides {:?}: outputs must be contiguous and writable",
                view.strides()
            );
            let kernel = "cuda";
            return Err(KernelError::Unsupported { kernel, what }.into());
        }
    }
    Ok(())
}
