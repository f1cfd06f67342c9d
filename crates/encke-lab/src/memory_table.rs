//! Memory of ranks as a text table: planned bytes by component, borrowed and allocated bytes.
//!
//! Borrowed bytes are the caller's tensors, read in place and not allocated again. The kernel's
//! workspace has a column of its own: it belongs to the kernel, which keeps it for the next call,
//! and not to a buffer of the rank.

use std::collections::BTreeSet;

use encke::RankMemory;
use encke::explain::bytes;
use encke::plan::program::Component;

use crate::table::TextTable;

/// A table with a row for each (name, memory); components that no rank has are left out.
pub fn by_rank(indent: usize, what: &str, ranks: &[(String, &RankMemory)]) -> TextTable {
    let mut table = TextTable::new(
        indent,
        [what.to_string()].into_iter().chain(headings(ranks)),
    );
    for (name, memory) in ranks {
        let cells = cells(ranks, memory);
        table.row([name.clone()].into_iter().chain(cells));
    }
    table
}

/// The transposed table, with a column for each (name, memory).
pub fn by_component(indent: usize, what: &str, ranks: &[(String, &RankMemory)]) -> TextTable {
    let names = ranks.iter().map(|(name, _)| name.clone());
    let mut table = TextTable::new(indent, [what.to_string()].into_iter().chain(names));
    let columns: Vec<Vec<String>> = ranks.iter().map(|(_, m)| cells(ranks, m)).collect();
    for (line, heading) in headings(ranks).into_iter().enumerate() {
        let cells = columns.iter().map(|column| column[line].clone());
        table.row([heading].into_iter().chain(cells));
    }
    table
}

/// The components that any rank has, without the workspace.
fn components(ranks: &[(String, &RankMemory)]) -> BTreeSet<Component> {
    let held = ranks.iter().flat_map(|(_, memory)| &memory.planned);
    held.filter(|(component, count)| **count > 0 && **component != Component::Workspace)
        .map(|(component, _)| *component)
        .collect()
}

fn headings(ranks: &[(String, &RankMemory)]) -> Vec<String> {
    let components = components(ranks);
    let names = components.iter().map(|component| component.name());
    let totals = ["all planned", "borrowed", "allocated", "+ workspace"];
    names.chain(totals).map(str::to_string).collect()
}

fn cells(ranks: &[(String, &RankMemory)], memory: &RankMemory) -> Vec<String> {
    let of = |component| memory.planned.get(&component).copied().unwrap_or(0);
    let workspace = of(Component::Workspace);
    let planned = memory.planned_bytes() - workspace;
    let parts = components(ranks).into_iter().map(of);
    let totals = [
        planned,
        memory.borrowed_bytes,
        memory.allocated_bytes,
        workspace,
    ];
    parts.chain(totals).map(bytes).collect()
}
