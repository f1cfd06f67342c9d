//! The third table: what travelled, against a dense ring and an all-gather.

use anyhow::Result;
use encke::explain::bytes;
use encke::{Attention, DType, GroupScale, MixingGradient, Mode, OffsetRule, Pattern, Shape};

use super::{SEED, answer, open};
use crate::table::Table;
use crate::tensors::Tensors;
use crate::terminal::{Paint, bar, say};

/// Ranks of the ring.
const RANKS: usize = 8;

const WORDS: &str = "\
One forward pass on 8 ranks, f32, causal, 4 heads over 2 key heads, 16 numbers a head:
  A  4,096 tokens, dense
  B  65,536 tokens, head groups with segments 2048,4096,8192 and dilations 1,2,4
  C  65,536 tokens, all heads with segments 2048,16384,65536 and dilations 1,8,32
A dense ring passes every chunk all the way round; an all-gather sends as much.
";

const RESULT: &str = "\
Causal attention needs half of a dense
  ring (A): no rank sees the future. In B every segment lies inside the 8,192 tokens
  of one rank, so nothing travels at all. In C segments span ranks, but only the
  rows that dilation selects are sent: they are thinned out before they travel.
";

/// Shows the table; false if bytes that were sent differ from bytes that were planned.
pub fn show(paint: Paint) -> Result<bool> {
    open(paint, "3. What travels?", WORDS)?;
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

/// The shapes and patterns that are run.
fn runs() -> Result<[(Shape, Pattern); 3]> {
    let group = Mode::Group {
        scale: GroupScale::One,
    };
    let mix = Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Exact,
    };
    let (small, large) = (
        Shape::new(1, 4096, 4, 2, 16)?,
        Shape::new(1, 65536, 4, 2, 16)?,
    );
    let local = Pattern::dilated(&[2048, 4096, 8192], &[1, 2, 4], group)?;
    let remote = Pattern::dilated(&[2048, 16384, 65536], &[1, 8, 32], mix)?;
    Ok([(small, Pattern::dense()), (large, local), (large, remote)])
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new(2, ["", "A", "B", "C"]);
    let mut line = |what: &str, number: fn(&Row) -> usize| {
        let cells = rows.iter().map(|row| bytes(number(row)));
        table.row([what.to_string()].into_iter().chain(cells));
    };
    line("sent by all ranks, counted", |row| row.sent);
    line("sent by all ranks, planned", |row| row.planned);
    line("a dense ring would send", |row| row.dense_ring);
    line("K/V that a rank holds", |row| row.held);
    line("K/V it would hold after an all-gather", |row| row.gathered);
    table
}

/// What one run moved and held, and what others would have.
struct Row {
    sent: usize,
    planned: usize,
    dense_ring: usize,
    held: usize,
    gathered: usize,
}

fn run(shape: &Shape, pattern: Pattern) -> Result<Row> {
    use encke::plan::program::Component::{OwnKv, TravellingKv};
    let tensors = Tensors::random(shape, DType::F32, SEED)?;
    let (q, k, v) = tensors.views();
    let attention = Attention::builder().pattern(pattern).ranks(RANKS).build()?;
    let report = attention.forward(&q, &k, &v)?.report;
    let explained = report.plan.explain()?;
    let held = report.memory.iter().map(|memory| {
        let of = |component| memory.planned.get(&component).copied().unwrap_or(0);
        of(OwnKv) + of(TravellingKv)
    });
    Ok(Row {
        sent: report.trace.sent_bytes(),
        planned: explained.sent_bytes,
        dense_ring: explained.dense_ring_bytes,
        held: held.max().unwrap_or(0),
        gathered: explained.all_gather_bytes,
    })
}
