//! The parts of a page: document, sections, legends, tables.
//!
//! The decision here: a section's heading is its finding, with the number; the chart below is the
//! evidence, and the table below that has the chart's numbers for readers who cannot see it.

use super::axis::Screen;
use super::markup::Element;
use super::theme::{SCRIPT, STYLE};

/// A document around its contents: style, script, and the data it shows as JSON.
pub fn document(title: &str, main: Element, data: &str) -> String {
    let head = Element::new("head")
        .with(Element::new("meta").set("charset", "utf-8"))
        .with(
            Element::new("meta")
                .set("name", "viewport")
                .set("content", "width=device-width, initial-scale=1"),
        )
        .with(Element::new("title").text(title))
        .with(Element::new("style").with_source(STYLE));
    let data = Element::new("script")
        .set("type", "application/json")
        .set("id", "findings")
        .with_json(data);
    let body = Element::new("body")
        .with(main)
        .with(
            Element::new("div")
                .set("id", "tip")
                .set("role", "status")
                .set("hidden", "hidden"),
        )
        .with(data)
        .with(Element::new("script").with_source(SCRIPT));
    let html = Element::new("html").set("lang", "en").with(head).with(body);
    format!("<!DOCTYPE html>\n{html}\n")
}

/// A section: its finding as the heading, and an introduction.
pub fn section(id: &str, finding: &str, lead: &str) -> Element {
    Element::new("section")
        .set("id", id)
        .with(Element::new("h2").text(finding))
        .with(Element::new("p").class("lead").text(lead))
}

/// A chart, drawn for each screen width.
pub fn charts(draw: impl Fn(Screen) -> Element) -> [Element; 2] {
    Screen::ALL.map(|screen| draw(screen).class(screen.class()))
}

/// A swatch and its text for each class of the style sheet, after an optional title.
pub fn legend(title: Option<&str>, entries: Vec<(String, String)>) -> Element {
    let title = title.map(|title| Element::new("li").class("say").text(title));
    let entry = |(class, text): (String, String)| {
        let swatch = Element::new("span").class(format!("swatch {class}"));
        Element::new("li").with(swatch).text(text)
    };
    Element::new("ul")
        .class("legend")
        .with_all(title)
        .with_all(entries.into_iter().map(entry))
}

/// Tables that are folded away until the reader opens them.
pub fn details(tables: impl IntoIterator<Item = Element>) -> Element {
    let tables = tables
        .into_iter()
        .map(|table| Element::new("div").class("scroll").with(table));
    Element::new("details")
        .with(Element::new("summary").text("The numbers"))
        .with_all(tables)
}

/// A table; the first cell of a row is its heading.
pub fn table(caption: &str, headings: Vec<String>, rows: Vec<Vec<String>>) -> Element {
    let heading = |text: String| Element::new("th").set("scope", "col").text(text);
    let row = |cells: Vec<String>| {
        let cells = cells
            .into_iter()
            .enumerate()
            .map(|(index, text)| match index {
                0 => Element::new("th").set("scope", "row").text(text),
                _ => Element::new("td").text(text),
            });
        Element::new("tr").with_all(cells)
    };
    let headings = Element::new("tr").with_all(headings.into_iter().map(heading));
    Element::new("table")
        .with(Element::new("caption").text(caption))
        .with(Element::new("thead").with(headings))
        .with(Element::new("tbody").with_all(rows.into_iter().map(row)))
}
