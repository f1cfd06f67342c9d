//! The memory of a ring whose ranks are all in this process, compared with that of this machine.
//!
//! The decision here: inputs do not count. A rank binds them in place where it can, and a call that
//! fits must not be refused.

use anyhow::Result;
use encke::Plan;

use crate::process::check_memory;

/// Ranks whose programs are made; all of a ring have much the same buffers.
const SAMPLED: usize = 16;

/// Refuses a ring for whose buffers this machine has no memory, before anything is allocated.
pub fn check_ring_memory(plan: &Plan) -> Result<()> {
    let ranks = plan.ranks();
    let sampled = ranks.min(SAMPLED);
    let mut total = 0;
    for index in 0..sampled {
        let program = plan.rank(index * ranks / sampled)?;
        let is_input = |id: usize| program.inputs.iter().any(|port| port.buffer.0 == id);
        let buffers = program.buffers.iter().enumerate();
        let held = buffers.filter(|(id, _)| !is_input(*id));
        total += held.map(|(_, buffer)| buffer.bytes() as u128).sum::<u128>();
    }
    let total = total * ranks as u128 / sampled as u128;
    let total = usize::try_from(total).unwrap_or(usize::MAX);
    check_memory(&format!("the buffers of all {ranks} ranks"), total)
}
