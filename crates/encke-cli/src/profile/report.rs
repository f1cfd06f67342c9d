//! What `encke profile` says: a table for each pass, and whether the plans were kept.

use std::collections::BTreeSet;

use encke::explain::{bytes, grouped};
use encke::plan::program::Component;
use encke::{Queries, Request};
use encke_sim::profile::{MemorySource, RingProfile, component_exponent, total_exponent};

use super::PassProfile;
use crate::table::Table;
use crate::terminal::Paint;
use crate::{pattern_options, process};

/// What was asked for, in two lines.
pub fn heading(request: &Request) -> String {
    let shape = &request.shape;
    format!(
        "{} tokens, {} heads ({} key heads), {} numbers a head, batch {}, {}\n{}; queries {}\n",
        grouped(shape.tokens as u128),
        shape.heads,
        shape.kv_heads,
        shape.dim,
        shape.batch,
        request.dtype,
        pattern_options::words(&request.pattern),
        match request.queries {
            Queries::Sharded => "sharded",
            Queries::Replicated => "replicated",
        },
    )
}

/// The table of one pass.
pub fn pass(paint: Paint, profile: &PassProfile) -> String {
    let PassProfile { pass, run, planned } = profile;
    let title = paint.bold(&format!("{pass}, bytes of the rank that holds most"));
    let mut headings = vec!["ranks".to_string(), String::new()];
    headings.extend(run.iter().map(|ring| ring.ranks.to_string()));
    headings.extend(planned.iter().map(|ring| ring.ranks.to_string()));
    headings.push("exponent".to_string());
    let mut table = Table::new(2, headings);
    for component in components(profile) {
        let of = |ring: &RingProfile, figure| ring.largest(component, figure);
        let fit = |figure| component_exponent(run, component, figure);
        lines(&mut table, component.name(), profile, of, fit);
    }
    let all = |ring: &RingProfile, figure| ring.fullest(figure);
    let fit = |figure| total_exponent(run, figure);
    lines(&mut table, "all", profile, all, fit);
    format!("\n{title}\n{table}")
}

/// The components that any ring has.
fn components(profile: &PassProfile) -> BTreeSet<Component> {
    let rings = profile.run.iter().chain(&profile.planned);
    rings.flat_map(RingProfile::components).collect()
}

/// Two lines: measured, and planned below it.
fn lines(
    table: &mut Table,
    name: &str,
    profile: &PassProfile,
    of: impl Fn(&RingProfile, MemorySource) -> Option<usize>,
    fit: impl Fn(MemorySource) -> Option<f64>,
) {
    for (figure, name, word) in [
        (MemorySource::Measured, name, "measured"),
        (MemorySource::Planned, "", "planned"),
    ] {
        let rings = profile.run.iter().chain(&profile.planned);
        let cells = rings.map(|ring| of(ring, figure).map_or("-".to_string(), bytes));
        let exponent = fit(figure).map_or("-".to_string(), |e| format!("{e:.3}"));
        let row = [name.to_string(), word.to_string()].into_iter();
        table.row(row.chain(cells).chain([exponent]));
    }
}

/// Whether no rank held more than was planned.
pub fn kept(profile: &PassProfile) -> bool {
    let shares = profile.run.iter().filter_map(RingProfile::shares);
    shares.into_iter().all(|(_, most)| most <= 1.0)
}

/// How close the ranks came to their plans, and what the process took.
pub fn summary(paint: Paint, passes: &[PassProfile]) -> String {
    let mut text = String::from("\n");
    for profile in passes {
        let shares: Vec<(f64, f64)> = profile.run.iter().filter_map(RingProfile::shares).collect();
        let Some(least) = shares.iter().map(|(least, _)| *least).reduce(f64::min) else {
            continue;
        };
        let most = shares.iter().fold(0.0, |most: f64, (_, m)| most.max(*m));
        let ranks: usize = profile.run.iter().map(|ring| ring.ranks).sum();
        let verdict = match kept(profile) {
            true => paint.green("no rank held more than was planned"),
            false => paint.red("a rank held more than was planned"),
        };
        text += &format!(
            "{}: {ranks} ranks held {:.1} % to {:.1} % of what was planned; {verdict}\n",
            profile.pass,
            100.0 * least,
            100.0 * most,
        );
    }
    if let Some(peak) = process::peak_resident_bytes() {
        text += &format!(
            "this process, all ranks of a ring and the tensors in it: at most {} resident\n",
            bytes(peak)
        );
    }
    text
}
