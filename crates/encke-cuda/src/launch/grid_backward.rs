//! Gradients of jobs on a grid by Hopper's kernel, in the order of the grid.

use encke_core::job::Job;

use super::{LaunchContext, grid_jobs, hopper_backward};
use crate::error::{Error, Result};
use crate::operands::{BackwardOperands, DeviceInputs, Rounds};

/// Adds the job's contributions to dq, dk and dv.
pub(crate) fn backward(
    context: &LaunchContext,
    job: &Job,
    inputs: DeviceInputs<'_>,
    gradients: BackwardOperands<'_>,
) -> Result<()> {
    let (device, dtype) = (&context.device, inputs.dtype());
    let memory = gradients.into_memory(dtype, Rounds::Allowed)?;
    for part in grid_jobs::aligned_parts(job) {
        let launch = hopper_backward::plan(device, &part, dtype);
        let launch = launch.ok_or_else(|| Error::Unsupported {
            what: format!("a job of {dtype} on a grid that is not laid out for tensor maps"),
        })?;
        hopper_backward::backward_into(context, &part, &launch, true, inputs, &memory)?;
    }
    Ok(())
}
