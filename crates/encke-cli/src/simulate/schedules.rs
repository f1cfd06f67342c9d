//! The table of schedules that ends a prediction for several nodes.

use anyhow::Result;
use encke::explain::bytes;
use encke::{Queries, Request};
use encke_cost::Machine;
use encke_lab::format::{percent, seconds};
use encke_lab::schedules::{self, ScheduleTimes};
use encke_lab::table::TextTable;
use encke_lab::terminal::{Paint, spinner};

/// The largest ring that is predicted with every schedule.
const MOST_RANKS: usize = 256;

/// The schedules of a request, if its ranks lie in several nodes and can have more than one.
pub fn compare(request: &Request, machine: &Machine, grad: bool) -> Result<Vec<ScheduleTimes>> {
    let (ranks, node) = (request.sharding.ranks(), machine.ranks_per_node);
    let several = node > 1 && ranks > node && ranks <= MOST_RANKS;
    let open = request.queries == Queries::Sharded && request.redundancy == 0;
    if !several || !open || !request.bits.is_planned() {
        return Ok(Vec::new());
    }
    let progress = spinner("schedules");
    let each = schedules::compared(request, node).into_iter();
    let times = each.map(|of| schedules::times(request, of, machine, grad));
    let times = times.collect::<Result<Vec<ScheduleTimes>>>();
    progress.finish_and_clear();
    times
}

/// The table, and which schedule is the fastest.
pub fn to_text(all: &[ScheduleTimes]) -> String {
    let Some(best) = all.get(schedules::fastest(all, None)) else {
        return String::new();
    };
    let headings = [
        "",
        "time",
        "efficiency",
        "inside nodes",
        "between nodes",
        "buffers of a rank",
    ];
    let mut table = TextTable::new(2, headings);
    for of in all {
        table.row([
            of.name.to_string(),
            seconds(of.seconds()),
            percent(of.efficiency),
            bytes(of.inside_bytes as usize),
            bytes(of.between_bytes as usize),
            bytes(of.memory_bytes),
        ]);
    }
    let title = Paint::stdout().bold("Schedules (--schedule)");
    format!("\n{title}\n{table}  fastest: {}\n", best.name)
}
