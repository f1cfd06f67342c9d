//! Memory profiles as text: a table for each pass, a summary, and the optional measurements.

use std::collections::BTreeSet;

use encke::explain::bytes;
use encke::plan::program::Component;
use encke_lab::format::seconds;
use encke_lab::process::peak_resident_bytes;
use encke_lab::profile::{CacheProfile, PassProfile, PolicyProfile};
use encke_lab::table::TextTable;
use encke_lab::terminal::Paint;
use encke_sim::profile::{MemorySource, RingProfile, component_exponent, total_exponent};

/// The table of one pass.
pub fn pass(paint: Paint, profile: &PassProfile) -> String {
    let PassProfile { pass, run, planned } = profile;
    let title = paint.bold(&format!("{pass}, bytes of the rank that holds most"));
    let mut headings = vec!["ranks".to_string(), String::new()];
    headings.extend(run.iter().map(|ring| ring.ranks.to_string()));
    headings.extend(planned.iter().map(|ring| ring.ranks.to_string()));
    headings.push("exponent".to_string());
    let mut table = TextTable::new(2, headings);
    for component in components(profile) {
        let of = |ring: &RingProfile, figure| ring.largest(component, figure);
        let fit = |figure| component_exponent(run, component, figure);
        add_rows(&mut table, component.name(), profile, of, fit);
    }
    let all = |ring: &RingProfile, figure| ring.fullest(figure);
    let fit = |figure| total_exponent(run, figure);
    add_rows(&mut table, "all", profile, all, fit);
    format!("\n{title}\n{table}")
}

/// The components that any ring has.
fn components(profile: &PassProfile) -> BTreeSet<Component> {
    let rings = profile.run.iter().chain(&profile.planned);
    rings.flat_map(RingProfile::components).collect()
}

/// Adds two rows: measured, and planned below it.
fn add_rows(
    table: &mut TextTable,
    name: &str,
    profile: &PassProfile,
    of: impl Fn(&RingProfile, MemorySource) -> Option<usize>,
    fit: impl Fn(MemorySource) -> Option<f64>,
) {
    for (figure, name, kind) in [
        (MemorySource::Measured, name, "measured"),
        (MemorySource::Planned, "", "planned"),
    ] {
        let rings = profile.run.iter().chain(&profile.planned);
        let cells = rings.map(|ring| of(ring, figure).map_or("-".to_string(), bytes));
        let exponent = fit(figure).map_or("-".to_string(), |e| format!("{e:.3}"));
        let row = [name.to_string(), kind.to_string()].into_iter();
        table.row(row.chain(cells).chain([exponent]));
    }
}

/// The measured bytes of all ranks relative to their plans, and the resident memory of the process.
pub fn summary(paint: Paint, passes: &[PassProfile]) -> String {
    let mut text = String::from("\n");
    for profile in passes {
        let Some((least, most)) = profile.fractions_of_plan() else {
            continue;
        };
        let ranks: usize = profile.run.iter().map(|ring| ring.ranks).sum();
        let verdict = match profile.is_within_plan() {
            true => paint.green("no rank held more than planned"),
            false => paint.red("a rank held more than planned"),
        };
        text += &format!(
            "{}: {ranks} ranks held {:.1} % to {:.1} % of their plans; {verdict}\n",
            profile.pass,
            100.0 * least,
            100.0 * most,
        );
    }
    if let Some(peak) = peak_resident_bytes() {
        text += &format!(
            "this process, with all ranks of a ring and the tensors: at most {} resident\n",
            bytes(peak)
        );
    }
    text
}

/// The checkpoint policies, a row for each.
pub fn policies(paint: Paint, policies: &[PolicyProfile]) -> String {
    let headings = [
        "",
        "in memory",
        "in a file",
        "sent",
        "forward",
        "backward",
        "together",
    ];
    let mut table = TextTable::new(2, headings);
    for policy in policies {
        table.row([
            policy.name.to_string(),
            bytes(policy.memory_bytes),
            bytes(policy.file_bytes),
            bytes(policy.sent_bytes),
            seconds(policy.forward_s),
            seconds(policy.backward_s),
            seconds(policy.forward_s + policy.backward_s),
        ]);
    }
    let title = paint.bold("between the passes, all ranks together");
    format!("\n{title}\n{table}")
}

/// The caches between calls, a row for each.
pub fn caches(paint: Paint, profile: &CacheProfile) -> String {
    let CacheProfile {
        lengths,
        stats,
        peak,
        limits,
    } = profile;
    let mut table = TextTable::new(
        2,
        ["", "hits", "misses", "hit rate", "kept at most", "limit"],
    );
    table.row([
        "plans".to_string(),
        stats.plan_hits.to_string(),
        stats.plan_misses.to_string(),
        format!("{:.0} %", 100.0 * stats.plan_hit_rate()),
        peak.plans.to_string(),
        limits.plans.to_string(),
    ]);
    table.row([
        "buffers, by plan".to_string(),
        stats.buffer_hits.to_string(),
        stats.buffer_misses.to_string(),
        format!("{:.0} %", 100.0 * stats.buffer_hit_rate()),
        format!("{} with {}", peak.pools, bytes(peak.pool_bytes)),
        format!("{} with {}", limits.pools, bytes(limits.pool_bytes)),
    ]);
    table.row([
        "outputs, dropped".to_string(),
        String::new(),
        String::new(),
        String::new(),
        bytes(peak.pooled_bytes),
        bytes(limits.pool_bytes),
    ]);
    let title = format!("kept between {} calls of {lengths} lengths", 2 * lengths);
    format!("\n{}\n{table}", paint.bold(&title))
}

/// The profile of an MPI job.
#[cfg(feature = "mpi")]
pub fn job(paint: Paint, profile: &encke_lab::profile::processes::JobProfile) -> String {
    let mut text = encke_lab::format::request(&profile.request);
    text += &format!("{} processes, {}\n", profile.processes, profile.library);
    for pass in &profile.passes {
        text += &job_pass(paint, pass);
    }
    text
}

/// One pass of an MPI job: a row for each rank, and the hidden fraction of the messages.
#[cfg(feature = "mpi")]
fn job_pass(paint: Paint, pass: &encke_lab::profile::processes::JobPass) -> String {
    let planned = pass.ranks.iter().flat_map(|rank| &rank.memory.planned);
    let components: BTreeSet<Component> = planned
        .filter(|(_, count)| **count > 0)
        .map(|(component, _)| *component)
        .collect();
    let names = components.iter().map(|component| component.name());
    let headings = ["rank"].into_iter().chain(names);
    let headings = headings.chain(["held", "planned", "resident", "compute", "waited"]);
    let mut table = TextTable::new(2, headings);
    for rank in &pass.ranks {
        let total = rank.memory.ledger.total();
        let of = |component: &Component| total.peak.get(component).copied().unwrap_or(0);
        let mut cells = vec![rank.memory.rank.to_string()];
        cells.extend(components.iter().map(|component| bytes(of(component))));
        cells.push(bytes(total.peak_bytes));
        cells.push(bytes(rank.memory.planned_bytes()));
        let growth = rank.resident_growth_bytes;
        cells.push(growth.map_or("-".to_string(), |growth| format!("+{}", bytes(growth))));
        cells.push(format!("{:.3} s", rank.compute_seconds));
        cells.push(format!("{:.1} ms", 1e3 * rank.wait_seconds));
        table.row(cells);
    }
    let title = paint.bold(&format!("{}, measured", pass.pass));
    let hidden = match pass.hidden {
        Some(hidden) => format!(
            "messages alone take {:.1} ms over all ranks; they explain {:.1} ms of the waiting \
             in the run: {:.1} % hidden\n",
            1e3 * pass.hop_seconds,
            1e3 * pass.exposed_seconds,
            100.0 * hidden.max(0.0),
        ),
        None => "no messages\n".to_string(),
    };
    format!("\n{title}\n{table}  {hidden}")
}
