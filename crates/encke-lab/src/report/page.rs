//! The page of a report: a heading, the main numbers, and a section for each chart.

use encke::explain::grouped;
use encke::trace::Activity;

use super::findings::{PassFindings, ReportFindings};
use super::{memory_chart, panels, prediction_chart, tables, timeline, traffic};
use crate::charts::html::{self, charts, details, legend, section};
use crate::charts::markup::Markup;
use crate::format::{percent, signed};

/// The whole document.
pub fn document(findings: &ReportFindings) -> serde_json::Result<String> {
    let title = title(findings);
    let main = Markup::new("main")
        .with(Markup::new("p").class("eyebrow").text("encke report"))
        .with(header(findings, &title))
        .with(tiles(findings))
        .with(memory_section(findings))
        .with(timeline_section(findings))
        .with(traffic_section(findings))
        .with(pattern_section(findings))
        .with_all(prediction_section(findings))
        .with(environment_section(findings));
    let data = serde_json::to_string(findings)?;
    Ok(html::document(&format!("encke: {title}"), main, &data))
}

fn title(findings: &ReportFindings) -> String {
    let rings = findings.passes.iter().flat_map(|pass| &pass.rings);
    let tokens = grouped(findings.setup.tokens as u128);
    match rings.map(|ring| ring.ranks).max() {
        None | Some(1) => format!("{tokens} tokens on one rank"),
        Some(most) => format!("{tokens} tokens on rings of 1 to {most} ranks"),
    }
}

fn header(findings: &ReportFindings, title: &str) -> Markup {
    let setup = &findings.setup;
    let text = format!(
        "Exact attention with the pattern “{}”: {}. Tokens are cut {}. Everything below was \
         measured for this page.",
        setup.pattern, setup.sizes, setup.ring
    );
    Markup::new("header")
        .with(Markup::new("h1").text(title))
        .with(Markup::new("p").text(text))
}

/// The main numbers in a row.
fn tiles(findings: &ReportFindings) -> Markup {
    let Some(forward) = findings.passes.first() else {
        return Markup::new("ul");
    };
    let setup = &findings.setup;
    let mut tiles = Vec::new();
    if let Some(exponent) = forward.buffers_exponent() {
        tiles.push((
            signed(exponent),
            "exponent of a rank’s bytes against the ring size",
        ));
    }
    let off = findings.passes.iter().map(PassFindings::largest_deviation);
    tiles.push((
        percent(off.fold(0.0, f64::max)),
        "largest difference of measured and planned buffers",
    ));
    tiles.push((
        percent(setup.pairs as f64 / setup.dense_pairs as f64),
        "of the pairs of dense attention are computed",
    ));
    let shown = &forward.shown;
    if shown.dense_ring_bytes > 0 {
        tiles.push((
            percent(shown.sent_bytes as f64 / shown.dense_ring_bytes as f64),
            "of a dense ring’s bytes are sent",
        ));
    }
    let tile = |(number, text): (String, &str)| {
        let number = Markup::new("b").text(number);
        Markup::new("li").with(number).text(text)
    };
    Markup::new("ul")
        .class("tiles")
        .with_all(tiles.into_iter().map(tile))
}

/// The heading of a pass, if there are several.
fn pass_heading(findings: &ReportFindings, pass: &PassFindings) -> Option<Markup> {
    let several = findings.passes.len() > 1;
    several.then(|| Markup::new("h3").text(format!("{} pass", capital(pass.name))))
}

fn capital(word: &str) -> String {
    let mut letters = word.chars();
    let first = letters.next().map(|letter| letter.to_ascii_uppercase());
    first.into_iter().chain(letters).collect()
}

fn memory_section(findings: &ReportFindings) -> Markup {
    let lead = "Bytes of the rank that holds most, for every ring size: measured allocations with \
                buffers of its own, and the plan made before. Exponents are fitted to the \
                measured bytes (of travelling buffers from 4 ranks on, because smaller rings need \
                fewer). The workspace is scratch memory of the kernel, which ranks of one process \
                share.";
    let mut section = section("memory", &memory_chart::finding(&findings.passes), lead);
    for pass in &findings.passes {
        section = section
            .with_all(pass_heading(findings, pass))
            .with(legend(None, memory_chart::legend(pass)))
            .with_all(charts(|screen| memory_chart::draw(pass, screen)));
    }
    section.with(details(findings.passes.iter().map(tables::memory)))
}

fn timeline_section(findings: &ReportFindings) -> Markup {
    let Some(first) = findings.passes.first() else {
        return Markup::new("section");
    };
    let ranks = first.shown.ranks();
    let finding = match ranks {
        1 => "One rank computes without waiting".to_string(),
        ranks => {
            let fraction = |activity| percent(first.fraction(activity));
            format!(
                "On a ring of {ranks}, ranks compute {} of the time and wait {}",
                fraction(Activity::Compute),
                fraction(Activity::Wait)
            )
        }
    };
    let cores = findings
        .environment
        .iter()
        .find(|(name, _)| name == "cores");
    let cores = cores.map_or("the cores of this machine".to_string(), |(_, count)| {
        format!("{count} core{}", if count == "1" { "" } else { "s" })
    });
    let lead = format!(
        "The activities of each rank. Rows are sent while it computes; it waits only for the \
         rest of the transfer after its jobs are done. Ranks are threads that share {cores}: a \
         rank also waits for a neighbour that has no core."
    );
    let mut section = section("timeline", &finding, &lead);
    let entries = timeline::ACTIVITIES.map(|activity| {
        (
            timeline::class(activity).to_string(),
            timeline::text(activity).to_string(),
        )
    });
    section = section.with(legend(None, entries.to_vec()));
    for pass in &findings.passes {
        let description = format!("Timeline of the {} pass on {ranks} ranks", pass.name);
        section = section
            .with_all(pass_heading(findings, pass))
            .with_all(charts(|screen| {
                timeline::draw(&pass.shown, screen, &description)
            }));
    }
    section.with(details(findings.passes.iter().map(tables::timeline)))
}

fn traffic_section(findings: &ReportFindings) -> Markup {
    let Some(first) = findings.passes.first() else {
        return Markup::new("section");
    };
    let shown = &first.shown;
    let finding = match (shown.ranks(), shown.sent_bytes) {
        (1, _) => "One rank sends nothing".to_string(),
        (_, 0) => "Nothing is sent: every segment lies inside one rank’s tokens".to_string(),
        (ranks, sent) => format!(
            "{} are sent on a ring of {ranks}, {} of what a dense ring sends",
            encke::explain::bytes(sent),
            percent(sent as f64 / shown.dense_ring_bytes as f64)
        ),
    };
    let counted: usize = shown.sent.iter().flatten().sum();
    let lead = format!(
        "Bytes that each rank sends to each other one. Only rows that a later rank needs are \
         sent; {} were planned and {} were counted.",
        encke::explain::bytes(counted),
        encke::explain::bytes(shown.sent_bytes)
    );
    let mut section = section("traffic", &finding, &lead);
    for pass in &findings.passes {
        let description = format!("Bytes sent from rank to rank in the {} pass", pass.name);
        section = section
            .with_all(pass_heading(findings, pass))
            .with(legend(None, traffic::legend(&pass.shown)))
            .with_all(charts(|screen| {
                traffic::draw(&pass.shown, screen, &description)
            }));
    }
    section.with(details(findings.passes.iter().map(tables::traffic)))
}

fn pattern_section(findings: &ReportFindings) -> Markup {
    let (setup, picture) = (&findings.setup, &findings.picture);
    let fraction = setup.pairs as f64 / setup.dense_pairs as f64;
    let finding = match setup.pairs == setup.dense_pairs {
        true => "Every query attends to every key".to_string(),
        false => format!(
            "The pattern computes {} of the pairs of dense attention",
            percent(fraction)
        ),
    };
    let more = match picture.more_kinds {
        0 => String::new(),
        1 => " One more kind of head differs from these by its phase or branch.".to_string(),
        more => format!(" {more} more kinds of heads differ from these by their phase or branch."),
    };
    let lead = format!(
        "Queries from top to bottom, keys from left to right. A pair of several branches counts \
         several times in the softmax.{more}"
    );
    let mut section = section("pattern", &finding, &lead);
    if let Some(whole) = &picture.whole {
        section = section.with(legend(
            Some("all tokens: attended are"),
            panels::whole_legend(whole),
        ));
    }
    let close = match picture.whole {
        Some(_) => "first tokens: attended",
        None => "a pair is attended",
    };
    section
        .with(legend(Some(close), panels::close_legend(picture)))
        .with_all(charts(|screen| {
            panels::draw(picture, screen, "Attention mask")
        }))
        .with(details([tables::pattern(findings)]))
}

fn prediction_section(findings: &ReportFindings) -> Option<Markup> {
    let predictions = findings.predictions.as_ref()?;
    let lead = format!(
        "The cost model executes the plan with measurements of the kernel alone, none of them from \
         these rings. Measured is the median of {} runs of threads on this machine.",
        predictions.runs
    );
    let mut section = section("prediction", &prediction_chart::finding(predictions), &lead)
        .with(legend(None, prediction_chart::legend()));
    for pass in &findings.passes {
        let rings = predictions.rings.iter();
        let rings: Vec<_> = rings.filter(|ring| ring.pass == pass.name).collect();
        let description = format!("Time of the {} pass, predicted and measured", pass.name);
        section = section
            .with_all(pass_heading(findings, pass))
            .with_all(charts(|screen| {
                prediction_chart::draw(&rings, screen, &description)
            }));
    }
    Some(section.with(details([tables::prediction(predictions)])))
}

fn environment_section(findings: &ReportFindings) -> Markup {
    let entry = |(name, value): &(String, String)| {
        [Markup::new("dt").text(name), Markup::new("dd").text(value)]
    };
    let entries = findings.environment.iter().flat_map(entry);
    let lead = "Times depend on it; bytes and results do not.";
    section("environment", "Where this was measured", lead)
        .with(Markup::new("dl").with_all(entries))
}
