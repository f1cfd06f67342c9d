//! `encke plan --explain`: the alternatives that `auto` considered, and its choice.

use anyhow::{Result, anyhow};
use encke::choose::{Alternative, Choice, Constraints, Threshold, Workload, one_device_until};
use encke::explain::bytes;
use encke::{Attention, Auto, CheckpointPolicy, Cut, DType, Pass, Queries, Rotating, Shape};
use encke_lab::Verdict;
use encke_lab::format::{self, seconds};
use encke_lab::table::TextTable;
use encke_lab::terminal::{Paint, say};
use serde::Serialize;

/// The number of alternatives that are shown.
const SHOWN: usize = 16;

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct ExplainRecord<'a> {
    source: String,
    choice: &'a Choice,
    one_device: Option<Threshold>,
}

/// Prints what `auto` chooses for a shape, and why.
pub fn run(
    attention: &Attention,
    shape: Shape,
    dtype: DType,
    pass: Pass,
    json: bool,
) -> Result<Verdict> {
    let choice = attention.choice(shape, dtype, pass)?;
    let (Some(choice), Some(auto)) = (choice, attention.auto()) else {
        return Err(anyhow!(
            "every option was given, so there is nothing to explain"
        ));
    };
    let one_device = threshold(attention, auto, shape, dtype, pass)?;
    let text = match json {
        true => {
            let record = ExplainRecord {
                source: auto.source.to_string(),
                choice: &choice,
                one_device,
            };
            serde_json::to_string_pretty(&record)? + "\n"
        }
        false => to_text(&choice, auto, one_device),
    };
    say(&text)?;
    Ok(Verdict::Fine)
}

/// The length from which on a ring is faster; `None` if the number of ranks was given.
fn threshold(
    attention: &Attention,
    auto: &Auto,
    shape: Shape,
    dtype: DType,
    pass: Pass,
) -> Result<Option<Threshold>> {
    if !auto.ranks || !auto.cut {
        return Ok(None);
    }
    let dtype = attention.compute_dtype(dtype);
    let constraints = Constraints {
        work: match pass {
            Pass::Forward => Workload::Forward,
            Pass::Backward { .. } | Pass::BackwardByBranch => Workload::Backward,
        },
        ..Constraints::new(shape, attention.pattern().clone(), dtype, auto.most_ranks)
    };
    Ok(Some(one_device_until(
        attention.kernel(),
        &constraints,
        &auto.machine,
    )?))
}

/// The table, the choice and its reason.
fn to_text(choice: &Choice, auto: &Auto, one_device: Option<Threshold>) -> String {
    let paint = Paint::stdout();
    let mut text = format!("{}\n", paint.bold("Alternatives"));
    text += &format!("  machine: {}\n", auto.source);
    if let Some(limit) = auto.memory_limit {
        text += &format!("  memory limit of a rank: {}\n", bytes(limit));
    }
    text += &table(choice).to_string();
    if choice.alternatives.len() > SHOWN {
        let more = choice.alternatives.len() - SHOWN;
        text += &format!("  … and {more} more, none of them faster\n");
    }
    text += &format!(
        "\n{} {}: {}\n",
        paint.bold("Chosen:"),
        name(choice.winner()),
        choice.reason
    );
    if let Some(threshold) = one_device {
        text += &match threshold {
            Threshold::Tokens(tokens) => format!(
                "With this pattern, these heads and this type one device is faster up to about \
                 {tokens} tokens.\n"
            ),
            Threshold::AlwaysRing => {
                "A ring is faster than one device at every length.\n".to_string()
            }
            Threshold::NeverRing { up_to } => format!(
                "No ring of up to {} ranks is faster than one device up to {up_to} tokens; \
                 a ring is for sequences that one device cannot hold.\n",
                auto.most_ranks
            ),
        };
    }
    text
}

fn table(choice: &Choice) -> TextTable {
    let both_passes = choice.alternatives.iter().any(|of| of.checkpoint.is_some());
    let mut headings = vec!["", "predicted"];
    if both_passes {
        headings.extend(["forward", "backward"]);
    }
    headings.extend(["per rank", "sent", "waiting", ""]);
    let mut table = TextTable::new(2, headings);
    for (at, of) in choice.alternatives.iter().take(SHOWN).enumerate() {
        let mut cells = vec![name(of), seconds(of.seconds)];
        if both_passes {
            let time = |time: Option<f64>| time.map_or("-".to_string(), seconds);
            cells.extend([time(of.forward_s), time(of.backward_s)]);
        }
        cells.extend([
            bytes(of.memory_bytes),
            bytes(usize::try_from(of.sent_bytes).unwrap_or(usize::MAX)),
            format!("{:.0} %", 100.0 * of.waiting),
        ]);
        cells.push(match (at == choice.chosen, of.fits) {
            (true, _) => "chosen".to_string(),
            (false, true) => String::new(),
            (false, false) => "too much memory".to_string(),
        });
        table.row(cells);
    }
    table
}

/// An alternative as text.
pub fn name(of: &Alternative) -> String {
    let mut name = match (of.ranks, &of.cut) {
        (1, _) => "one device".to_string(),
        (ranks, Cut::Firsts(_)) => format!("{ranks} ranks, cut as given"),
        (ranks, cut) => format!("{ranks} ranks, {}", format::cut(cut)),
    };
    if of.ranks > 1 && of.queries == Queries::Replicated {
        name += ", queries replicated";
    }
    match of.schedule.width {
        1 => {}
        width if width + 1 == of.ranks => name += ", gathered",
        width => name += &format!(", {width} at a time"),
    }
    if of.schedule.node > 1 {
        name += &format!(", two levels (nodes of {})", of.schedule.node);
    }
    if of.schedule.heads > 1 {
        name += &format!(", heads among {}", of.schedule.heads);
    }
    if of.schedule.backward == Rotating::Queries {
        name += ", queries rotate";
    }
    name + match of.checkpoint {
        None => "",
        Some(CheckpointPolicy::KeepOutput) => ", output kept",
        Some(CheckpointPolicy::Recompute) => ", recomputed",
        Some(CheckpointPolicy::Offload) => ", output in a file",
    }
}
