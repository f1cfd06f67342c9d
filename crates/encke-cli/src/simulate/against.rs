//! `encke simulate --against threads`: what the clock says beside what the wall says.

use anyhow::{Result, bail};
use encke::{DType, Shape};
use encke_cost::{ComparisonReport, RingComparison, compare, median, rings_to_compare};
use encke_cpu::CpuKernel;

use super::options::Options;
use super::report::{flops, seconds};
use crate::Verdict;
use crate::output::OutputFile;
use crate::table::Table;
use crate::terminal::{Paint, say, spinner};

/// Tokens of the rings unless told otherwise: seconds a run on two cores.
const TOKENS: usize = 4096;
/// Heads and numbers a head of the rings: the command's defaults are a GPU's.
const HEADS: usize = 4;
const DIM: usize = 64;
/// What the clock aims at.
const AIM: f64 = 0.15;

/// Runs the rings and predicts them.
pub fn run(options: &Options) -> Result<Verdict> {
    let view = &options.view;
    if view.repeats == 0 {
        bail!("--repeats 0 leaves nothing to compare with; give 1 or more");
    }
    let json = match &view.json {
        Some(path) => Some(OutputFile::create(path, &[])?),
        None => None,
    };
    let dtype = options.dtype(DType::F32);
    let tokens = options.sizes.tokens.unwrap_or(TOKENS);
    let shape = Shape::new(1, tokens, HEADS, HEADS, DIM)?;
    let progress = spinner("starting");
    let found = compare(
        CpuKernel::new()?,
        &rings_to_compare(shape, dtype)?,
        view.repeats,
        &mut |what| progress.set_message(what.to_string()),
    )?;
    progress.finish_and_clear();
    if let Some(mut json) = json {
        json.write(|to| Ok(serde_json::to_writer_pretty(to, &found)?))?;
        json.keep()?;
    }
    say(&words(shape, dtype, view.repeats, &found))?;
    Ok(Verdict::Fine)
}

fn words(shape: Shape, dtype: DType, repeats: usize, found: &ComparisonReport) -> String {
    let ComparisonReport {
        rings,
        machine,
        misfit,
        ..
    } = found;
    let paint = Paint::stdout();
    let device = &machine.device;
    let mut text = format!(
        "{}\n{} tokens x {} heads x {} numbers, {dtype}; {repeats} runs of each; {} cores\n",
        paint.bold("Rings of threads, predicted from the kernel alone and measured"),
        shape.tokens,
        shape.heads,
        shape.dim,
        device.shared_cores.unwrap_or(1),
    );
    if let Some(rate) = device.rates.first() {
        text += &format!(
            "the kernel: {} forward, {} backward, its readings told within {:.1} %; \
             a hop {} and {:.1} GB/s\n\n",
            flops(rate.forward.flops),
            flops(rate.backward.flops),
            100.0 * misfit,
            seconds(machine.intra_node.latency_s),
            machine.intra_node.bytes_per_s / 1e9,
        );
    }
    text += &format!("{:>56}{:>34}\n", "medians", "fastest");
    let times = ["predicted", "measured", "error"];
    let headings = ["ring"].into_iter().chain(times).chain(times);
    let mut table = Table::new(2, headings);
    for ring in rings {
        let mut cells = vec![ring.name.clone()];
        for times in [ring.median, ring.fastest] {
            cells.extend([
                seconds(times.predicted_s),
                seconds(times.measured_s),
                format!("{:+.1} %", 100.0 * times.error()),
            ]);
        }
        table.row(cells);
    }
    text += &table.to_string();
    for (name, fastest) in [("medians", false), ("fastest", true)] {
        let times = |ring: &RingComparison| if fastest { ring.fastest } else { ring.median };
        let errors: Vec<f64> = rings.iter().map(|ring| times(ring).error().abs()).collect();
        let within = errors.iter().filter(|error| **error <= AIM).count();
        text += &format!(
            "\n{name}: median error {:.1} %, {within} of {} rings within {:.0} %",
            100.0 * median(&errors),
            rings.len(),
            100.0 * AIM,
        );
    }
    text + "\n"
}
