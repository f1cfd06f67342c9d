//! Numbers, patterns and shapes as text, for tables, pages and records alike.

use encke::explain::grouped;
use encke::{Cut, GroupScale, MixingGradient, Mode, Pattern, Queries, Request, Shape};

/// A duration, in the largest unit that gives it at least one digit before the point.
pub fn seconds(time: f64) -> String {
    const DAY: f64 = 86400.0;
    match time {
        0.0 => "0 s".to_string(),
        t if t < 1e-3 => format!("{:.1} us", t * 1e6),
        t if t < 1.0 => format!("{:.2} ms", t * 1e3),
        t if t < 120.0 => format!("{t:.2} s"),
        t if t < 7200.0 => format!("{:.1} min", t / 60.0),
        t if t < 2.0 * DAY => format!("{:.1} h", t / 3600.0),
        t => format!("{:.1} days", t / DAY),
    }
}

/// Floating-point operations per second, with a decimal prefix.
pub fn flops(rate: f64) -> String {
    let units = ["", "k", "M", "G", "T", "P", "E"];
    let (mut value, mut unit) = (rate, 0);
    while value >= 1000.0 && unit + 1 < units.len() {
        (value, unit) = (value / 1000.0, unit + 1);
    }
    format!("{value:.1} {}FLOP/s", units[unit])
}

/// A number with two decimals and a typographic minus sign.
pub fn signed(number: f64) -> String {
    let text = format!("{:.2}", number.abs());
    match number < 0.0 && text != "0.00" {
        true => format!("−{text}"),
        false => text,
    }
}

/// A fraction in percent, with more decimals the smaller it is.
pub fn percent(fraction: f64) -> String {
    match 100.0 * fraction {
        0.0 => "0 %".to_string(),
        small if small < 0.095 => format!("{small:.3} %"),
        small if small < 0.95 => format!("{small:.2} %"),
        small if small < 9.95 => format!("{small:.1} %"),
        large => format!("{large:.0} %"),
    }
}

/// A pattern: its mode, branches, and whether it is causal.
pub fn pattern(pattern: &Pattern) -> String {
    let branches = pattern.branches();
    let causal = pattern.mask_text();
    if let [only] = branches
        && only.segment == usize::MAX
    {
        return format!("dense{causal}");
    }
    let list = |of: fn(&encke::Branch) -> usize| {
        let list: Vec<String> = branches.iter().map(|b| of(b).to_string()).collect();
        list.join(",")
    };
    let (segments, dilations) = (list(|b| b.segment), list(|b| b.dilation));
    let mode = match pattern.mode() {
        Mode::Group {
            scale: GroupScale::Groups,
        } => "group (scaled by 1/branches)",
        Mode::Mix {
            gradient: MixingGradient::Detached,
            ..
        } => "mix (detached)",
        other => other.name(),
    };
    format!("{mode}, segments {segments}, dilations {dilations}{causal}")
}

/// How a sequence is cut into shards.
pub fn cut(cut: &Cut) -> &'static str {
    match cut {
        Cut::Contiguous => "contiguous",
        Cut::Firsts(_) => "contiguous, cut as given",
        Cut::Zigzag => "zigzag",
        Cut::Striped => "striped",
        Cut::Ranges(_) => "ranges of tokens",
    }
}

/// Which queries a rank holds.
pub fn queries(queries: Queries) -> &'static str {
    match queries {
        Queries::Sharded => "sharded",
        Queries::Replicated => "replicated",
    }
}

/// The sizes of a shape but the batch.
pub fn shape(shape: &Shape) -> String {
    format!(
        "{} tokens, {} heads ({} key heads), head dimension {}",
        grouped(shape.tokens as u128),
        shape.heads,
        shape.kv_heads,
        shape.dim
    )
}

/// The sizes, type, pattern and query sharding of a request, in two lines.
pub fn request(request: &Request) -> String {
    format!(
        "{}, batch {}, {}\n{}; queries {}\n",
        shape(&request.shape),
        request.shape.batch,
        request.dtype,
        pattern(&request.pattern),
        queries(request.queries),
    )
}
