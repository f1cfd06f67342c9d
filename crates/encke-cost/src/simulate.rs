//! The entry point: a plan and a machine in, a simulated run out.

use std::ops::Range;

use encke_core::plan::Plan;

use crate::engine::Engine;
use crate::error::CostError;
use crate::machine::Machine;
use crate::rank_costs::rank_costs;
use crate::simulated_run::SimulatedRun;

/// Simulates a plan on a machine. For ranks in `recorded`, every interval and every transfer is
/// kept; for the others only sums.
pub fn simulate(
    plan: &Plan,
    machine: &Machine,
    recorded: Range<usize>,
) -> Result<SimulatedRun, CostError> {
    machine.check(plan.ranks())?;
    let ranks = rank_costs(plan, machine)?;
    let engine = Engine::new(&ranks, machine, recorded);
    Ok(engine.run(plan.request().pass))
}
