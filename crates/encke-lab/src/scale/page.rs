//! The page of predicted scale.

use super::chart::{self, Shown};
use super::markdown::{compared, grid};
use super::{ScaleFindings, ScalePattern};
use crate::charts::html::{self, charts, details, legend, section, table};
use crate::charts::markup::Markup;
use crate::format::percent;
use crate::schedules::RING;

/// The whole document.
pub fn document(findings: &ScaleFindings) -> serde_json::Result<String> {
    let most = findings.grid.iter().map(|of| of.ranks).max().unwrap_or(0);
    let title = format!("Predicted scale: up to {most} devices");
    let mut main = Markup::new("main")
        .with(
            Markup::new("p")
                .class("eyebrow")
                .text("encke simulate --scale"),
        )
        .with(
            Markup::new("header")
                .with(Markup::new("h1").text(&title))
                .with(Markup::new("p").text(findings.sources()))
                .with(Markup::new("p").text(findings.omissions())),
        );
    for pattern in ScalePattern::ALL {
        main = main.with(pattern_section(findings, pattern));
    }
    main = main.with(schedule_section(findings));
    let data = serde_json::to_string(findings)?;
    Ok(html::document(&format!("encke: {title}"), main, &data))
}

fn pattern_section(findings: &ScaleFindings, pattern: ScalePattern) -> Markup {
    let largest = findings.of(pattern).max_by_key(|of| (of.ranks, of.tokens));
    let finding = largest.map_or(pattern.name().to_string(), |of| {
        format!(
            "{}: {} of the arithmetic’s speed with {} tokens on {} devices",
            pattern.name(),
            percent(of.fastest().efficiency),
            super::markdown::tokens(of.tokens),
            of.ranks
        )
    });
    let lead = "A line for each length, over the number of devices; every point is the fastest \
                schedule. Efficiency is the share of the devices’ time that is arithmetic.";
    let marks = [
        ("dot all", "a ring of one level is the fastest"),
        (
            "dot hollow all",
            "another schedule is; the point says which",
        ),
    ];
    let marks = marks.map(|(class, text)| (class.to_string(), text.to_string()));
    let id = match pattern {
        ScalePattern::Dense => "dense",
        ScalePattern::Longnet => "longnet",
    };
    let mut section = section(id, &finding, lead).with(legend(None, marks.to_vec()));
    for shown in [
        Shown::Time,
        Shown::Efficiency,
        Shown::Between,
        Shown::Memory,
    ] {
        let draw = |screen| chart::draw(findings, pattern, shown, screen);
        section = section.with_all(charts(draw));
    }
    let (headings, rows) = grid(findings, pattern);
    let headings = headings.into_iter().map(str::to_string).collect();
    section.with(details([table(pattern.name(), headings, rows)]))
}

fn schedule_section(findings: &ScaleFindings) -> Markup {
    let all = &findings.compared;
    let others = all.iter().filter(|of| of.fastest().name != RING).count();
    let finding = format!(
        "A ring of one level is not the fastest for {others} of {} shapes",
        all.len()
    );
    let lead = "Each shape with each schedule, forward and backward, on 16 nodes of 8. The \
                busiest card is its bytes at full speed: no schedule can be faster.";
    let (headings, rows) = compared(findings);
    let headings = headings.into_iter().map(str::to_string).collect();
    let table = table("schedules", headings, rows);
    section("schedules", &finding, lead).with(Markup::new("div").class("scroll").with(table))
}
