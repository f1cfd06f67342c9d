//! `encke tune --check`: thirty decisions against the best of an exhaustive search.

use std::path::Path;

use anyhow::{Result, bail};
use encke::CpuKernel;
use encke::tune::{
    ChoiceCheck, GOOD_MARGIN, MachineId, MachineProfile, MachineSource, check, median_error,
    raw_median_error, threads_here,
};
use encke_lab::Verdict;
use encke_lab::format::seconds;
use encke_lab::output::OutputFile;
use encke_lab::process::MachineInfo;
use encke_lab::table::TextTable;
use encke_lab::terminal::{bar, say};
use serde::Serialize;

use crate::explain::name;

/// The largest median error of predictions that passes.
const LARGEST_ERROR: f64 = 0.15;

/// What `--record` writes.
#[derive(Debug, Serialize)]
struct TuneCheckRecord<'a> {
    machine: MachineInfo,
    source: String,
    repeats: usize,
    median_error: f64,
    raw_median_error: f64,
    configurations: &'a [ChoiceCheck],
}

/// Runs the check.
pub fn run(repeats: usize, record: Option<&Path>) -> Result<Verdict> {
    if repeats == 0 {
        bail!("--repeats 0 measures nothing; give 1 or more");
    }
    let file = OutputFile::create_optional(record, &[])?;
    let (machine, source) = threads_here()?;
    // Records are published, and the path of the profile means nothing elsewhere.
    let (source, profile) = match source {
        MachineSource::Measured(_) => (
            "measured here".to_string(),
            MachineProfile::load(&MachineId::current())?,
        ),
        source => (source.to_string(), None),
    };
    let yardstick_s = profile.and_then(|profile| profile.yardstick_s);
    let progress = bar(100);
    let mut show = |what: &str, part: f64| {
        progress.set_position((100.0 * part) as u64);
        progress.set_message(what.to_string());
    };
    let kernel = CpuKernel::new()?;
    let checked = check(kernel, &machine, yardstick_s, repeats, &mut show)?;
    progress.finish_and_clear();
    let error = median_error(&checked);
    let record = TuneCheckRecord {
        machine: MachineInfo::here(),
        source: source.clone(),
        repeats,
        median_error: error,
        raw_median_error: raw_median_error(&checked),
        configurations: &checked,
    };
    if let Some(mut file) = file {
        file.write(|to| Ok(serde_json::to_writer(to, &record)?))?;
        file.keep()?;
    }
    let good = checked
        .iter()
        .filter(|of| of.behind() <= 1.0 + GOOD_MARGIN)
        .count();
    let tried: usize = checked.iter().map(|of| of.tried.len()).sum();
    let mut text = format!(
        "{}; {repeats} runs of each alternative and more of the fastest, medians; behind: ratio of \
         each turn; pace: time of a calibration call relative to that in the profile; machine: \
         {source}\n\n{}",
        MachineInfo::here().processor,
        table(&checked)
    );
    text += &format!(
        "\n{good} of {} choices are within {:.0} % of the best of an exhaustive search; \
         median error of {tried} predictions {:.1} %, corrected for pace {:.1} %\n",
        checked.len(),
        100.0 * GOOD_MARGIN,
        100.0 * raw_median_error(&checked),
        100.0 * error,
    );
    say(&text)?;
    Ok(Verdict::of(good == checked.len() && error <= LARGEST_ERROR))
}

fn table(checked: &[ChoiceCheck]) -> TextTable {
    let headings = [
        "",
        "pace",
        "tried",
        "chosen",
        "predicted",
        "measured",
        "best",
        "measured",
        "behind",
    ];
    let mut table = TextTable::new(0, headings);
    for of in checked {
        let (chosen, best) = (&of.tried[of.chosen], of.best());
        table.row([
            of.name.clone(),
            format!("{:.2}", of.pace),
            of.tried.len().to_string(),
            name(&chosen.predicted),
            seconds(chosen.predicted.seconds),
            seconds(chosen.measured_s),
            name(&best.predicted),
            seconds(best.measured_s),
            format!("{:.1} %", 100.0 * (of.behind() - 1.0)),
        ]);
    }
    table
}
