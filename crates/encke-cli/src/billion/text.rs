//! The record of a run as text.

use encke::explain::{bytes, grouped};
use encke_lab::billion::{BillionRecord, BillionSettings};
use encke_lab::memory_table;
use encke_lab::terminal::Paint;

/// The whole record: a line for each topic, and the memory of the largest rank.
pub fn record(record: &BillionRecord) -> String {
    let paint = Paint::stdout();
    let mut text = String::new();
    let mut line = |topic: &str, content: String| {
        text += &format!("{} {content}\n", paint.bold(&format!("{topic:<10}")));
    };
    let BillionSettings {
        tokens,
        ranks,
        dtype,
        heads,
        dim,
        ..
    } = record.settings;
    line(
        "sequence",
        format!(
            "{} tokens, heads {heads}, head dimension {dim}, {dtype}",
            grouped(tokens as u128)
        ),
    );
    line("pattern", record.pattern.clone());
    line(
        "ranks",
        format!(
            "{ranks}, one after another; {} read of the rows of other ranks",
            bytes(record.received_bytes as usize)
        ),
    );
    line(
        "computed",
        format!(
            "{} pairs, {:.3e} FLOP, on {}",
            grouped(record.pairs.into()),
            record.flop,
            record.kernel
        ),
    );
    let interrupted = match record.interruptions {
        0 => String::new(),
        times => format!(", interrupted {times} times"),
    };
    line(
        "time",
        format!(
            "{:.1} s ({:.1} s attention, {:.1} s generating inputs){interrupted}",
            record.seconds, record.compute_seconds, record.load_seconds,
        ),
    );
    line(
        "speed",
        format!(
            "{} tokens/s, {:.1} GFLOP/s",
            grouped(record.tokens_per_second as u128),
            record.flop_per_second / 1e9
        ),
    );
    if let Some(device) = record.device_memory {
        let verdict = match device.is_within_plan() {
            true => paint.green("as planned"),
            false => paint.red("more than planned"),
        };
        line("device", format!("{}; {verdict}", device.to_text()));
    }
    if let Some(peak) = record.peak_resident_bytes {
        line(
            "resident",
            format!("{} at most, of the whole process", bytes(peak)),
        );
    }
    let checked = &record.checked;
    let verdict = match checked.wrong {
        0 => paint.green("all within tolerance"),
        wrong => paint.red(&format!("{wrong} outside of it")),
    };
    line(
        "checked",
        format!(
            "{} rows against f64, {} keys: largest error of out {:.1e} (tolerance {:.1e}), of lse \
             {:.1e} ({:.1e}); {verdict}",
            grouped(checked.rows as u128),
            grouped(checked.keys.into()),
            checked.worst_out,
            record.tolerance.out,
            checked.worst_lse,
            record.tolerance.lse,
        ),
    );
    line(
        "checksum",
        format!(
            "{:.6} over {} rows; the same for any number of ranks within {:.1e}",
            record.checksum,
            grouped(record.checksum_rows.into()),
            record.checksum_tolerance
        ),
    );
    if let Some(largest) = &record.memory {
        let name = format!("largest (rank {})", largest.rank);
        let table = memory_table::by_component(2, "memory of a rank", &[(name, largest)]);
        text += &format!("\n{table}");
    }
    text
}

/// Peak resident memory of each process.
#[cfg(feature = "mpi")]
pub fn processes(resident_bytes: &[Option<usize>]) -> String {
    let peaks = resident_bytes.iter();
    let peaks: Vec<String> = peaks
        .map(|peak| peak.map_or("unknown".to_string(), bytes))
        .collect();
    format!(
        "\n{} processes side by side, resident at most: {}\n",
        peaks.len(),
        peaks.join(", ")
    )
}
