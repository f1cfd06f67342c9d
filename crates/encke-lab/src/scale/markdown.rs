//! The predictions as a Markdown page.

use std::fmt::Write;

use encke::explain::{bytes, grouped};

use super::{ScaleFindings, ScalePattern, ScalePoint};
use crate::format::{percent, seconds};

/// A number of tokens in powers of 1024.
pub(super) fn tokens(count: usize) -> String {
    match count {
        _ if count >= 1 << 30 => format!("{}G", count >> 30),
        _ if count >= 1 << 20 => format!("{}M", count >> 20),
        _ => format!("{}k", count >> 10),
    }
}

/// Columns and rows of the grid of a pattern.
pub(super) fn grid(
    findings: &ScaleFindings,
    pattern: ScalePattern,
) -> (Vec<&str>, Vec<Vec<String>>) {
    let headings = vec![
        "tokens",
        "devices",
        "fastest schedule",
        "time",
        "efficiency",
        "sent by a node inside",
        "sent by a node outside",
        "busiest card",
        "buffers of a rank",
    ];
    let node = findings.machine.ranks_per_node;
    let row = |of: &ScalePoint| {
        let best = of.fastest();
        let nodes = of.ranks.div_ceil(node) as u64;
        let memory = bytes(best.memory_bytes);
        vec![
            tokens(of.tokens),
            grouped(of.ranks as u128),
            best.name.to_string(),
            seconds(best.seconds()),
            percent(best.efficiency),
            bytes((best.inside_bytes / nodes) as usize),
            bytes((best.between_bytes / nodes) as usize),
            seconds(best.busiest_port_s),
            match of.fits() {
                true => memory,
                false => format!("{memory} (too much)"),
            },
        ]
    };
    (headings, findings.of(pattern).map(row).collect())
}

/// Columns and rows of the comparison of schedules.
pub(super) fn compared(findings: &ScaleFindings) -> (Vec<&str>, Vec<Vec<String>>) {
    let headings = vec![
        "shape",
        "schedule",
        "time",
        "efficiency",
        "inside nodes",
        "between nodes",
        "busiest card",
        "buffers of a rank",
        "",
    ];
    let mut rows = Vec::new();
    for of in &findings.compared {
        for (index, times) in of.schedules.iter().enumerate() {
            rows.push(vec![
                format!(
                    "{}, {} tokens, {} heads ({} key heads)",
                    of.pattern.name(),
                    tokens(of.tokens),
                    of.heads.heads,
                    of.heads.kv_heads
                ),
                times.name.to_string(),
                seconds(times.seconds()),
                percent(times.efficiency),
                bytes(times.inside_bytes as usize),
                bytes(times.between_bytes as usize),
                seconds(times.busiest_port_s),
                bytes(times.memory_bytes),
                if index == of.best { "fastest" } else { "" }.to_string(),
            ]);
        }
    }
    (headings, rows)
}

fn table((headings, rows): (Vec<&str>, Vec<Vec<String>>)) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let titles: Vec<String> = headings.iter().map(|title| title.to_string()).collect();
    let rule = vec!["---".to_string(); headings.len()];
    let mut text = line(&titles) + &line(&rule).replace(' ', "");
    for row in rows {
        text += &line(&row);
    }
    text
}

/// Breaks a paragraph into lines of at most 100 columns.
fn wrapped(text: &str) -> String {
    let (mut lines, mut line) = (String::new(), String::new());
    for word in text.split_whitespace() {
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > 100 {
            lines += &std::mem::take(&mut line);
            lines.push('\n');
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line += word;
    }
    lines + &line + "\n"
}

/// The whole page.
pub fn markdown(findings: &ScaleFindings) -> String {
    let mut text = "# Predicted scale\n\n".to_string();
    text += &wrapped(&findings.sources());
    text.push('\n');
    text += &wrapped(&findings.omissions());
    text += "\nThis page was written by `encke simulate --scale docs/scale.md`; `--scale \
             scale.html` draws it.\n";
    if !findings.compared.is_empty() {
        let ranks = findings.compared[0].ranks;
        let nodes = ranks / findings.machine.ranks_per_node;
        let _ = writeln!(
            text,
            "\n## Schedules on {nodes} nodes of {}\n",
            findings.machine.ranks_per_node
        );
        text += &table(compared(findings));
    }
    for pattern in ScalePattern::ALL {
        let name = match pattern {
            ScalePattern::Dense => "Dense causal attention, zigzag",
            ScalePattern::Longnet => "LongNet, segments of 2k to 1M tokens, contiguous",
        };
        let _ = writeln!(text, "\n## {name}\n");
        text += "32 heads, 8 key heads; the fastest schedule of each row.\n\n";
        text += &table(grid(findings, pattern));
    }
    text
}
