//! The data of the charts as tables, for exact values and for screen readers.

use encke::explain::{bytes, grouped};
use encke::plan::program::Component;

use super::findings::{PassFindings, Prediction, Predictions, ReportFindings, RingFindings};
use super::prediction_chart::signed_error;
use super::timeline::ACTIVITIES;
use crate::charts::html::table;
use crate::charts::markup::Markup;
use crate::charts::scale::Unit;
use crate::format::{percent, signed};

/// Bytes by component and ring size.
pub fn memory(pass: &PassFindings) -> Markup {
    let mut headings = vec!["component".to_string()];
    headings.extend(pass.rings.iter().map(|ring| format!("p = {}", ring.ranks)));
    headings.push("exponent".to_string());
    let both = |measured: usize, planned: usize| match measured == planned {
        true => bytes(measured),
        false => format!("{} ({})", bytes(measured), bytes(planned)),
    };
    let exponent = |exponent: Option<f64>| exponent.map_or("–".to_string(), signed);
    let line = |component: Component| {
        let of = |ring: &RingFindings| {
            let (measured, planned) = (ring.measured.get(&component), ring.planned.get(&component));
            both(
                measured.copied().unwrap_or(0),
                planned.copied().unwrap_or(0),
            )
        };
        let mut cells = vec![component.name().to_string()];
        cells.extend(pass.rings.iter().map(of));
        cells.push(exponent(pass.exponent(component)));
        cells
    };
    let mut rows: Vec<Vec<String>> = pass.components().into_iter().map(line).collect();
    let all = pass.rings.iter().map(|ring| {
        let measured = ring.buffer_bytes(|ring| &ring.measured);
        both(measured, ring.buffer_bytes(|ring| &ring.planned))
    });
    let mut cells = vec!["all but workspace".to_string()];
    cells.extend(all);
    cells.push(exponent(pass.buffers_exponent()));
    rows.push(cells);
    let mut cells = vec!["time of the call".to_string()];
    cells.extend(
        pass.rings
            .iter()
            .map(|ring| Unit::Seconds.format(ring.seconds)),
    );
    cells.push("–".to_string());
    rows.push(cells);
    let caption = format!(
        "{} pass: bytes of the largest rank as measured, and as planned (in parentheses) where \
         that differs; exponents of travelling buffers, and of all, are fitted to rings of four \
         and more if there are two such",
        pass.name
    );
    table(&caption, headings, rows)
}

/// Time of each rank by activity.
pub fn timeline(pass: &PassFindings) -> Markup {
    let mut headings = vec!["rank".to_string()];
    headings.extend(ACTIVITIES.map(|activity| activity.name().to_string()));
    headings.push("waiting".to_string());
    let row = |rank: usize| {
        let of = |activity| {
            let spans = pass.shown.spans.iter();
            let spans = spans.filter(|span| span.rank == rank && span.activity == activity);
            spans.map(|span| span.seconds).sum::<f64>()
        };
        let times = ACTIVITIES.map(of);
        let all = times.iter().sum::<f64>().max(f64::MIN_POSITIVE);
        let mut cells = vec![rank.to_string()];
        cells.extend(times.map(|time| Unit::Seconds.format(time)));
        cells.push(percent(times[ACTIVITIES.len() - 1] / all));
        cells
    };
    let rows = (0..pass.shown.ranks()).map(row).collect();
    table(
        &format!("{} pass: time of each rank", pass.name),
        headings,
        rows,
    )
}

/// Bytes from rank to rank.
pub fn traffic(pass: &PassFindings) -> Markup {
    let sent = &pass.shown.sent;
    let mut headings = vec!["from".to_string()];
    headings.extend((0..sent.len()).map(|rank| format!("to {rank}")));
    headings.push("total".to_string());
    let row = |(from, to): (usize, &Vec<usize>)| {
        let mut cells = vec![format!("rank {from}")];
        cells.extend(to.iter().map(|count| match count {
            0 => "–".to_string(),
            count => bytes(*count),
        }));
        cells.push(bytes(to.iter().sum()));
        cells
    };
    let rows = sent.iter().enumerate().map(row).collect();
    table(&format!("{} pass: bytes sent", pass.name), headings, rows)
}

/// Times, predicted and measured.
pub fn prediction(predictions: &Predictions) -> Markup {
    let headings = ["pass", "ranks", "predicted", "measured", "error"];
    let row = |ring: &Prediction| {
        vec![
            ring.pass.to_string(),
            ring.ranks.to_string(),
            Unit::Seconds.format(ring.predicted_s),
            Unit::Seconds.format(ring.measured_s),
            signed_error(ring),
        ]
    };
    let rows = predictions.rings.iter().map(row).collect();
    table(
        "time of the ring",
        headings.map(str::to_string).to_vec(),
        rows,
    )
}

/// Pairs of the pattern and of dense attention.
pub fn pattern(findings: &ReportFindings) -> Markup {
    let setup = &findings.setup;
    let row = |name: &str, value: String| vec![name.to_string(), value];
    let rows = vec![
        row("pattern", setup.pattern.clone()),
        row("tokens", grouped(setup.tokens as u128)),
        row("pairs computed", grouped(setup.pairs)),
        row("pairs of dense attention", grouped(setup.dense_pairs)),
    ];
    table(
        "the pattern",
        vec!["name".to_string(), "value".to_string()],
        rows,
    )
}
