//! `encke tune --check`: thirty decisions beside the best of an exhaustive search, in a table.

use std::path::Path;

use anyhow::{Result, bail};
use encke::CpuKernel;
use encke::tune::{
    ChoiceCheck, GOOD_MARGIN, MachineId, MachineProfile, MachineSource, check, median_error,
    raw_median_error, threads_here,
};
use serde::Serialize;

use crate::Verdict;
use crate::explain::name;
use crate::output::OutputFile;
use crate::process::Machine;
use crate::simulate::report::seconds;
use crate::table::Table;
use crate::terminal::{bar, say};

/// What predictions aim at, in the middle.
const AIM: f64 = 0.15;

/// What `--record` writes.
#[derive(Debug, Serialize)]
struct Record<'a> {
    machine: Machine,
    source: String,
    repeats: usize,
    median_error: f64,
    raw_median_error: f64,
    configurations: &'a [ChoiceCheck],
}

/// Runs the check.
pub fn run(repeats: usize, record: Option<&Path>) -> Result<Verdict> {
    if repeats == 0 {
        bail!("--repeats 0 leaves nothing to compare; give 1 or more");
    }
    let mut file = match record {
        Some(path) => Some(OutputFile::create(path, &[])?),
        None => None,
    };
    let (machine, source) = threads_here()?;
    // A record goes to other people, to whom the place of a file means nothing.
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
    if let Some(file) = &mut file {
        let record = Record {
            machine: Machine::here(),
            source: source.clone(),
            repeats,
            median_error: error,
            raw_median_error: raw_median_error(&checked),
            configurations: &checked,
        };
        file.write(|to| Ok(serde_json::to_writer(to, &record)?))?;
    }
    if let Some(file) = file {
        file.keep()?;
    }
    let good = checked
        .iter()
        .filter(|of| of.behind() <= 1.0 + GOOD_MARGIN)
        .count();
    let tried: usize = checked.iter().map(|of| of.tried.len()).sum();
    let mut text = format!(
        "{}; {repeats} runs of each alternative and more of those in front, medians; behind: turn by \
         turn; pace: how many times as long a yardstick took as when the machine was measured; machine: \
         {source}\n\n{}",
        Machine::here().processor,
        table(&checked)
    );
    text += &format!(
        "\n{good} of {} choices are within {:.0} % of the best of an exhaustive search; \
         median error of {tried} predictions {:.1} %, at the pace of their time {:.1} %\n",
        checked.len(),
        100.0 * GOOD_MARGIN,
        100.0 * raw_median_error(&checked),
        100.0 * error,
    );
    say(&text)?;
    Ok(match good == checked.len() && error <= AIM {
        true => Verdict::Fine,
        false => Verdict::CheckFailed,
    })
}

fn table(checked: &[ChoiceCheck]) -> Table {
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
    let mut table = Table::new(0, headings);
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
