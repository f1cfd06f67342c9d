//! The record of a benchmark as text: the checks, and a table of times for each pass.

use encke::explain::bytes;
use encke_cost::median;
use encke_lab::bench::{BenchRecord, gradient_tolerance};
use encke_lab::format::{self, flops, seconds};
use encke_lab::row_check::{RowCheck, RowTolerance};
use encke_lab::table::TextTable;
use encke_lab::terminal::Paint;

/// The whole record.
pub fn record(record: &BenchRecord) -> String {
    let paint = Paint::stdout();
    let mut text = format::request(&record.request);
    text += &match &record.library {
        Some(library) => format!("{} processes, {library}\n", record.rings[0].ranks),
        None => format!(
            "{}, {} threads; device: {}\n",
            record.machine.processor, record.machine.threads, record.device
        ),
    };
    text += &checks(record, paint);
    if !record.is_right() {
        return text;
    }
    let passes = record.rings.first().map_or(0, |ring| ring.passes.len());
    for pass in 0..passes {
        let title = paint.bold(&record.rings[0].passes[pass].pass);
        text += &format!("\n{title}\n{}", table(record, pass));
    }
    text
}

/// The checks, in one line.
fn checks(record: &BenchRecord, paint: Paint) -> String {
    let checked = record.rings.iter().map(|ring| ring.checked);
    let all = checked.fold(RowCheck::default(), RowCheck::with);
    let dtype = record.request.dtype;
    let tolerance = RowTolerance::of(dtype, record.request.shape.dim);
    let of_gradients = gradient_tolerance(dtype);
    let mut text = format!(
        "checked: {} rows against the reference; largest error of out {:.1e} (tolerance {:.1e}), \
         of lse {:.1e} ({:.1e})",
        all.rows, all.worst_out, tolerance.out, all.worst_lse, tolerance.lse
    );
    let apart = record.rings.iter().filter_map(|ring| ring.gradients_apart);
    if let Some(apart) = apart.reduce(f64::max) {
        text += &format!(
            "; gradients of rings differ by {apart:.1e} of the largest value ({of_gradients:.1e})"
        );
    }
    let wrong = record
        .rings
        .iter()
        .find(|ring| !ring.is_right(of_gradients));
    let verdict = match wrong {
        None => paint.green("right"),
        Some(ring) => paint.red(&format!(
            "the ring of {} is wrong, nothing was timed",
            ring.ranks
        )),
    };
    format!("{text}: {verdict}\n")
}

/// One pass of all rings.
fn table(record: &BenchRecord, pass: usize) -> TextTable {
    let headings = [
        "ranks", "median", "fastest", "against", "speed", "tokens/s", "waiting", "sent", "per rank",
    ];
    let mut table = TextTable::new(2, headings);
    let first = &record.rings[0].passes[pass];
    for ring in &record.rings {
        let pass = &ring.passes[pass];
        let time = median(&pass.seconds);
        let fastest = pass.seconds.iter().copied().fold(f64::INFINITY, f64::min);
        let ratios = pass.seconds.iter().zip(&first.seconds);
        let ratios: Vec<f64> = ratios.map(|(own, first)| own / first).collect();
        let shape = &record.request.shape;
        table.row([
            ring.ranks.to_string(),
            seconds(time),
            seconds(fastest),
            format!("{:.3}", median(&ratios)),
            flops(pass.flops / time),
            format!("{:.0}", (shape.batch * shape.tokens) as f64 / time),
            format!("{:.1} %", 100.0 * median(&pass.waiting)),
            bytes(pass.sent_bytes),
            bytes(pass.rank_bytes),
        ]);
    }
    table
}
