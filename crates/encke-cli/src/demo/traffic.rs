//! The third table: bytes sent, against a dense ring and an all-gather.

use anyhow::Result;
use encke::explain::bytes;
use encke::{Attention, DType, GroupScale, Mode, Pattern, Shape};
use encke_lab::longnet;
use encke_lab::table::TextTable;
use encke_lab::tensors::RandomTensors;
use encke_lab::terminal::{Paint, bar, say};

use super::{SEED, answer, print_question};

/// Ranks of the ring.
const RANKS: usize = 8;

const INTRODUCTION: &str = "\
One forward pass on 8 ranks, f32, causal, 4 heads over 2 key heads, head dimension 16:
  A  4,096 tokens, dense
  B  65,536 tokens, head groups with segments 2048,4096,8192 and dilations 1,2,4
  C  65,536 tokens, all heads with segments 2048,16384,65536 and dilations 1,8,32
A dense ring rotates every shard all the way round; an all-gather sends as much.
";

const RESULT: &str = "\
Causal attention sends half of a dense
  ring (A): no rank needs later tokens. In B every segment lies inside the 8,192
  tokens of one rank, so nothing is sent. In C segments span ranks, but only the rows
  that dilation selects are packed and sent.
";

/// Prints the table; false if the bytes sent differ from the bytes planned.
pub fn show(paint: Paint) -> Result<bool> {
    print_question(paint, "3. What is sent?", INTRODUCTION)?;
    let runs = runs()?;
    let progress = bar(runs.len());
    let mut rows = Vec::new();
    for (shape, pattern) in runs {
        progress.set_message("three patterns");
        rows.push(run(&shape, pattern.causal(true))?);
        progress.inc(1);
    }
    progress.finish_and_clear();
    let counted = rows.iter().all(|row| row.sent == row.planned);
    let (table, yes) = (table(&rows), answer(paint, counted));
    say(&format!(
        "\n{table}\n  Sent as planned, to the byte? {yes}. {RESULT}"
    ))?;
    Ok(counted)
}

/// The shapes and patterns that run.
fn runs() -> Result<[(Shape, Pattern); 3]> {
    let group = Mode::Group {
        scale: GroupScale::One,
    };
    let (small, large) = (
        Shape::new(1, 4096, 4, 2, 16)?,
        Shape::new(1, 65536, 4, 2, 16)?,
    );
    let local = Pattern::dilated(&[2048, 4096, 8192], &[1, 2, 4], group)?;
    let remote = longnet::pattern(&[2048, 16384, 65536], &[1, 8, 32])?;
    Ok([(small, Pattern::dense()), (large, local), (large, remote)])
}

fn table(rows: &[TrafficRow]) -> TextTable {
    let mut table = TextTable::new(2, ["", "A", "B", "C"]);
    let mut line = |name: &str, of: fn(&TrafficRow) -> usize| {
        let cells = rows.iter().map(|row| bytes(of(row)));
        table.row([name.to_string()].into_iter().chain(cells));
    };
    line("sent by all ranks, counted", |row| row.sent);
    line("sent by all ranks, planned", |row| row.planned);
    line("a dense ring would send", |row| row.dense_ring);
    line("K/V that a rank holds", |row| row.held);
    line("K/V it would hold after an all-gather", |row| row.gathered);
    table
}

/// Bytes that one run sent and held, and those of a dense ring and an all-gather.
struct TrafficRow {
    sent: usize,
    planned: usize,
    dense_ring: usize,
    held: usize,
    gathered: usize,
}

fn run(shape: &Shape, pattern: Pattern) -> Result<TrafficRow> {
    use encke::plan::program::Component::{OwnKv, TravellingKv};
    let tensors = RandomTensors::new(shape, DType::F32, SEED)?;
    let (q, k, v) = tensors.views();
    let attention = Attention::builder().pattern(pattern).ranks(RANKS).build()?;
    let report = attention.forward(&q, &k, &v)?.report;
    let explained = report.plan.explain()?;
    let held = report.memory.iter().map(|memory| {
        let of = |component| memory.planned.get(&component).copied().unwrap_or(0);
        of(OwnKv) + of(TravellingKv)
    });
    Ok(TrafficRow {
        sent: report.trace.sent_bytes(),
        planned: explained.sent_bytes,
        dense_ring: explained.dense_ring_bytes,
        held: held.max().unwrap_or(0),
        gathered: explained.all_gather_bytes,
    })
}
