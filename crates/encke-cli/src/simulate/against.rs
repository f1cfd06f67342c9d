//! `encke simulate --against threads`: predicted and measured times of rings of threads.

use anyhow::{Result, bail};
use encke::{DType, Shape};
use encke_cost::{ComparisonReport, RingComparison, compare, median, rings_to_compare};
use encke_cpu::CpuKernel;
use encke_lab::Verdict;
use encke_lab::format::{flops, seconds};
use encke_lab::output::OutputFile;
use encke_lab::table::TextTable;
use encke_lab::tensors::check_measured;
use encke_lab::terminal::{Paint, say, spinner};

use super::options::Options;

/// Tokens of the rings unless given: each run takes seconds on two cores.
const TOKENS: usize = 4096;
/// Heads and head dimension of the rings; the defaults of the command are for a GPU.
const HEADS: usize = 4;
const DIM: usize = 64;
/// The relative error within which predictions count as good.
const GOOD_ERROR: f64 = 0.15;

/// Runs the rings, predicts them, and prints the comparison.
pub fn run(options: &Options) -> Result<Verdict> {
    let repeats = options.repeats;
    if repeats == 0 {
        bail!("--repeats 0 measures nothing; give 1 or more");
    }
    let json = OutputFile::create_optional(options.json.as_deref(), &[])?;
    let dtype = options.dtype(DType::F32);
    let tokens = options.sizes.tokens.unwrap_or(TOKENS);
    let shape = Shape::new(1, tokens, HEADS, HEADS, DIM)?;
    check_measured(&shape)?;
    let progress = spinner("starting");
    let found = compare(
        CpuKernel::new()?,
        &rings_to_compare(shape, dtype)?,
        repeats,
        &mut |what| progress.set_message(what.to_string()),
    )?;
    progress.finish_and_clear();
    OutputFile::write_json(json, &found)?;
    say(&to_text(shape, dtype, repeats, &found))?;
    Ok(Verdict::Fine)
}

fn to_text(shape: Shape, dtype: DType, repeats: usize, found: &ComparisonReport) -> String {
    let ComparisonReport {
        rings,
        machine,
        misfit,
        ..
    } = found;
    let paint = Paint::stdout();
    let device = &machine.device;
    let mut text = format!(
        "{}\n{} tokens, {} heads, head dimension {}, {dtype}; {repeats} runs of each; {} cores\n",
        paint.bold(
            "Rings of threads, predicted from measurements of the kernel alone, and measured"
        ),
        shape.tokens,
        shape.heads,
        shape.dim,
        device.shared_cores.unwrap_or(1),
    );
    if let Some(rate) = device.rates.first() {
        text += &format!(
            "the kernel: {} forward, {} backward, fitted within {:.1} %; a hop {} \
             and {:.1} GB/s\n\n",
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
    let mut table = TextTable::new(2, headings);
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
        let within = errors.iter().filter(|error| **error <= GOOD_ERROR).count();
        text += &format!(
            "\n{name}: median error {:.1} %, {within} of {} rings within {:.0} %",
            100.0 * median(&errors),
            rings.len(),
            100.0 * GOOD_ERROR,
        );
    }
    text + "\n"
}
