//! The parts of a page: document, sections, legends, tables.
//!
//! The decision here: a section's heading is its finding, with the number; the chart below is the
//! evidence, and the table below that has the chart's numbers for readers who cannot see it.

use super::axis::Screen;
use super::markup::Markup;
use super::theme::{SCRIPT, STYLE};

/// A document around its contents: style, script, and the data it shows as JSON.
pub fn document(title: &str, main: Markup, data: &str) -> String {
    let head = Markup::new("head")
        .with(Markup::new("meta").set("charset", "utf-8"))
        .with(
            Markup::new("meta")
                .set("name", "viewport")
                .set("content", "width=device-width, initial-scale=1"),
        )
        .with(Markup::new("title").text(title))
        .with(Markup::new("style").with_source(STYLE));
    let data = Markup::new("script")
        .set("type", "application/json")
        .set("id", "findings")
        .with_json(data);
    let body = Markup::new("body")
        .with(main)
        .with(
            Markup::new("div")
                .set("id", "tip")
                .set("role", "status")
                .set("hidden", "hidden"),
        )
        .with(data)
        .with(Markup::new("script").with_source(SCRIPT));
    let html = Markup::new("html").set("lang", "en").with(head).with(body);
    format!("<!DOCTYPE html>\n{html}\n")
}

/// A section: its finding as the heading, and an introduction.
pub fn section(id: &str, finding: &str, lead: &str) -> Markup {
    Markup::new("section")
        .set("id", id)
        .with(Markup::new("h2").text(finding))
        .with(Markup::new("p").class("lead").text(lead))
}

/// A chart, drawn for each screen width.
pub fn charts(draw: impl Fn(Screen) -> Markup) -> [Markup; 2] {
    Screen::ALL.map(|screen| draw(screen).class(screen.class()))
}

/// A swatch and its text for each class of the style sheet, after an optional title.
pub fn legend(title: Option<&str>, entries: Vec<(String, String)>) -> Markup {
    let title = title.map(|title| Markup::new("li").class("say").text(title));
    let entry = |(class, text): (String, String)| {
        let swatch = Markup::new("span").class(format!("swatch {class}"));
        Markup::new("li").with(swatch).text(text)
    };
    Markup::new("ul")
        .class("legend")
        .with_all(title)
        .with_all(entries.into_iter().map(entry))
}

/// Tables that are folded away until the reader opens them.
pub fn details(tables: impl IntoIterator<Item = Markup>) -> Markup {
    let tables = tables
        .into_iter()
        .map(|table| Markup::new("div").class("scroll").with(table));
    Markup::new("details")
        .with(Markup::new("summary").text("The numbers"))
        .with_all(tables)
}

/// A table; the first cell of a row is its heading.
pub fn table(caption: &str, headings: Vec<String>, rows: Vec<Vec<String>>) -> Markup {
    let heading = |text: String| Markup::new("th").set("scope", "col").text(text);
    let row = |cells: Vec<String>| {
        let cells = cells
            .into_iter()
            .enumerate()
            .map(|(index, text)| match index {
                0 => Markup::new("th").set("scope", "row").text(text),
                _ => Markup::new("td").text(text),
            });
        Markup::new("tr").with_all(cells)
    };
    let headings = Markup::new("tr").with_all(headings.into_iter().map(heading));
    Markup::new("table")
        .with(Markup::new("caption").text(caption))
        .with(Markup::new("thead").with(headings))
        .with(Markup::new("tbody").with_all(rows.into_iter().map(row)))
}
