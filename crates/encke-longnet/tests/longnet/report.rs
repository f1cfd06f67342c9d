//! The report of recorded runs, parsed as XML.

use crate::command::{LongnetFolder, SMALL};

#[test]
fn a_page_shows_rings_patterns_and_the_retrieval_task() {
    let folder = LongnetFolder::with_text();
    let train = |rest: &str| folder.succeeds(&format!("train story.txt {SMALL} --steps 6 {rest}"));
    train("--record p1.json");
    train("--record p2.json --ranks 2");
    train("--record dense.json --dense");
    folder
        .runs("retrieval --tokens 512 --steps 2 --questions 8 --width 16 --record retrieval.json");
    folder.succeeds("report page.html p1.json p2.json dense.json retrieval.json");

    let page = folder.read("page.html");
    let (_, document) = page.split_once('\n').unwrap();
    let document = roxmltree::Document::parse(document).unwrap();
    let sections: Vec<&str> = document
        .descendants()
        .filter(|node| node.has_tag_name("section"))
        .filter_map(|node| node.attribute("id"))
        .collect();
    assert_eq!(sections, ["rings-0", "patterns", "retrieval"]);
    let curves = document
        .descendants()
        .filter(|node| node.has_tag_name("polyline"));
    // Two in each section, drawn for wide and for narrow screens.
    assert_eq!(curves.count(), 12);
    let headings: Vec<String> = document
        .descendants()
        .filter(|node| node.has_tag_name("h2"))
        .map(|node| node.text().unwrap_or_default().to_string())
        .collect();
    assert!(
        headings[0].starts_with("After 6 steps the losses of all rings"),
        "{headings:?}"
    );
    assert!(headings[2].contains("local only"), "{headings:?}");
    assert!(
        !page.contains("http://")
            || page.matches("http://").count() == page.matches("http://www.w3.org").count()
    );
}
