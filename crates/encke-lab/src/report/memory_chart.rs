//! Memory of the largest rank by ring size: bars by component, and lines with exponents.

use std::collections::BTreeMap;

use encke::plan::program::Component;

use super::findings::{PassFindings, RingFindings};
use crate::charts::axis::{Frame, Screen, canvas};
use crate::charts::lines::{self, Series};
use crate::charts::markup::Markup;
use crate::charts::scale::Unit;
use crate::charts::stack::{self, BarPair, BarPart};
use crate::charts::theme::class;
use crate::format::signed;

/// Exponents within this distance of −1 count as 1/p.
const TOLERANCE: f64 = 0.02;

/// The heading: the exponents.
pub fn finding(passes: &[PassFindings]) -> String {
    let exponents: Vec<f64> = passes
        .iter()
        .filter_map(PassFindings::buffers_exponent)
        .collect();
    let texts: Vec<String> = exponents.iter().map(|exponent| signed(*exponent)).collect();
    let near = exponents
        .iter()
        .all(|exponent| (exponent + 1.0).abs() <= TOLERANCE);
    let text = match &texts[..] {
        [forward, backward] => format!("exponent {forward} forward, {backward} backward"),
        [only] => format!("exponent {only}"),
        _ => return "Memory of a rank".to_string(),
    };
    match near {
        true => format!("Each rank holds 1/p: {text}"),
        false => format!("The memory of a rank decreases with the ring size: {text}"),
    }
}

/// The components of a pass, the two bars, and the dashed line.
pub fn legend(pass: &PassFindings) -> Vec<(String, String)> {
    let components = pass.components().into_iter();
    let components = components.map(|component| (class(component), component.name()));
    let others = [
        ("all", "measured (left; dots)"),
        ("all planned", "planned (right; circles)"),
        ("dashes", "proportional to 1/p"),
    ];
    let entries = components.chain(others);
    entries
        .map(|(class, text)| (class.to_string(), text.to_string()))
        .collect()
}

/// Both charts, side by side on a wide screen.
pub fn draw(pass: &PassFindings, screen: Screen) -> Markup {
    let series = series(pass, screen);
    let names = lines::names_width(&series);
    let (bars, plot, height) = match screen {
        Screen::Wide => {
            let bars = Frame {
                left: 62.0,
                top: 34.0,
                width: 420.0,
                height: 300.0,
            };
            let left = 574.0;
            let plot = Frame {
                left,
                width: screen.width() - left - names,
                ..bars
            };
            (bars, plot, 390.0)
        }
        Screen::Narrow => {
            let bars = Frame {
                left: 62.0,
                top: 34.0,
                width: 290.0,
                height: 220.0,
            };
            let width = screen.width() - 62.0 - names;
            (
                bars,
                Frame {
                    top: 344.0,
                    width,
                    ..bars
                },
                620.0,
            )
        }
    };
    let (pairs, guide) = (pairs(pass), guide(pass));
    let (ranks, bytes) = guide.unwrap_or((1.0, 0.0));
    let description = format!(
        "Memory of the largest rank by ring size, {} pass",
        pass.name
    );
    canvas(screen.width(), height, &description)
        .with(stack::draw(bars, &pairs, ranks * bytes, ranks as usize))
        .with(lines::draw(
            plot,
            &series,
            guide,
            Unit::Bytes,
            ("ranks in the ring, p", "bytes, with exponents"),
        ))
}

/// The first point of the 1/p line: the first ring that is fitted.
fn guide(pass: &PassFindings) -> Option<(f64, f64)> {
    let ring = pass.fitted_rings().first()?;
    let bytes = ring.buffer_bytes(|ring| &ring.measured);
    Some((ring.ranks as f64, bytes as f64))
}

/// The bars. The workspace is on top, because the line refers to the buffers below it.
fn pairs(pass: &PassFindings) -> Vec<BarPair> {
    let components = pass.components();
    let parts = |held: &BTreeMap<Component, usize>| {
        let part = |component: &Component| BarPart {
            name: component.name(),
            class: class(*component).to_string(),
            bytes: held.get(component).copied().unwrap_or(0),
        };
        components.iter().map(part).collect()
    };
    let pair = |ring: &RingFindings| BarPair {
        ranks: ring.ranks,
        measured: parts(&ring.measured),
        planned: parts(&ring.planned),
    };
    pass.rings.iter().map(pair).collect()
}

/// A line for each component, and one for all buffers.
fn series(pass: &PassFindings, screen: Screen) -> Vec<Series> {
    // A narrow screen has no room for names: the colour and the table identify the line.
    let end = |name: &str, exponent: Option<f64>| match (screen, exponent) {
        (Screen::Wide, Some(exponent)) => format!("{name} {}", signed(exponent)),
        (Screen::Wide, None) => name.to_string(),
        (Screen::Narrow, exponent) => exponent.map_or("–".to_string(), signed),
    };
    let of = |held: &BTreeMap<Component, usize>, component: Component| {
        held.get(&component).copied().unwrap_or(0) as f64
    };
    let component = |component: Component| Series {
        name: component.name().to_string(),
        end: end(component.name(), pass.exponent(component)),
        class: class(component).to_string(),
        points: pass
            .rings
            .iter()
            .map(|ring| {
                let (measured, planned) = (&ring.measured, &ring.planned);
                (
                    ring.ranks as f64,
                    of(measured, component),
                    of(planned, component),
                )
            })
            .collect(),
    };
    let all = Series {
        name: "all buffers".to_string(),
        end: end("all buffers", pass.buffers_exponent()),
        class: "all".to_string(),
        points: pass
            .rings
            .iter()
            .map(|ring| {
                let measured = ring.buffer_bytes(|ring| &ring.measured) as f64;
                let planned = ring.buffer_bytes(|ring| &ring.planned) as f64;
                (ring.ranks as f64, measured, planned)
            })
            .collect(),
    };
    let components = pass.components().into_iter().map(component);
    [all].into_iter().chain(components).collect()
}
