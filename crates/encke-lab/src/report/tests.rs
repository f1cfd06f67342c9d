//! The page as a whole: it parses, every value has its mark, nothing refers to other addresses.

use std::collections::BTreeMap;

use encke::plan::program::Component;
use encke::trace::Activity;
use roxmltree::{Document, Node, ParsingOptions};

use super::findings::{
    PassFindings, Prediction, Predictions, ReportFindings, RingFindings, Setup, ShownRing, Span,
};
use super::page;
use super::picture::{Close, Picture, Whole};

const HOSTILE: &str = "\"><script>alert('&')</script>\u{0}";

/// A ring of `ranks` in which each rank holds 1/p and sends to the next.
fn pass(name: &'static str, shown: usize) -> PassFindings {
    let ring = |ranks: usize| {
        let of = |bytes: usize| bytes / ranks;
        let planned = BTreeMap::from([
            (Component::Queries, of(4096)),
            (Component::OwnKv, of(8192)),
            (
                Component::TravellingKv,
                if ranks > 1 { of(16384) } else { 0 },
            ),
            (Component::Workspace, 700),
        ]);
        RingFindings {
            ranks,
            fullest: 0,
            measured: planned.clone(),
            planned,
            seconds: 0.01,
        }
    };
    let next = |from: usize| (0..shown).map(move |to| if to == from + 1 { 100 * to } else { 0 });
    let spans = (0..shown).flat_map(|rank| {
        let activities = [
            Activity::Load,
            Activity::Compute,
            Activity::Wait,
            Activity::Prepare,
        ];
        activities
            .into_iter()
            .enumerate()
            .map(move |(at, activity)| Span {
                rank,
                round: 0,
                activity,
                start: at as f64 * 1e-3,
                seconds: 1e-3,
                sent_bytes: 0,
                received_bytes: 0,
            })
    });
    PassFindings {
        name,
        rings: [1, 2, 4, 8].map(ring).to_vec(),
        shown: ShownRing {
            sent: (0..shown).map(|from| next(from).collect()).collect(),
            sent_bytes: 100 * (1..shown).sum::<usize>(),
            dense_ring_bytes: 100_000,
            spans: spans.collect(),
        },
    }
}

fn findings(passes: Vec<PassFindings>) -> ReportFindings {
    let close = |head: usize| Close {
        heads: vec![head],
        tokens: 4,
        multiplicity: (0..16)
            .map(|pair| usize::from(pair % 4 <= pair / 4))
            .collect(),
    };
    ReportFindings {
        setup: Setup {
            tokens: 1000,
            sizes: "2 heads".to_string(),
            pattern: HOSTILE.to_string(),
            ring: "contiguous".to_string(),
            pairs: 100,
            dense_pairs: 1000,
        },
        passes,
        picture: Picture {
            whole: Some(Whole {
                tokens: 1000,
                side: 2,
                fractions: vec![1.0, 0.0, 0.1, 1.0],
            }),
            close: vec![close(0), close(1)],
            more_kinds: 0,
        },
        predictions: Some(Predictions {
            runs: 3,
            rings: [
                ("forward", 1, 0.009),
                ("forward", 8, 0.012),
                ("backward", 8, 0.03),
            ]
            .map(|(pass, ranks, predicted_s)| Prediction {
                pass,
                ranks,
                predicted_s,
                measured_s: 0.010,
            })
            .to_vec(),
        }),
        environment: vec![
            ("cores".to_string(), "2".to_string()),
            (HOSTILE.to_string(), HOSTILE.to_string()),
        ],
    }
}

fn read(text: &str) -> Document<'_> {
    let options = ParsingOptions {
        allow_dtd: true,
        ..ParsingOptions::default()
    };
    Document::parse_with_options(text, options).unwrap()
}

/// The number of elements of a name below `within` that have all of `classes`.
fn count(within: Node<'_, '_>, name: &str, classes: &[&str]) -> usize {
    let has = |node: &Node<'_, '_>| {
        let of: Vec<&str> = node.attribute("class").unwrap_or("").split(' ').collect();
        node.has_tag_name(name) && classes.iter().all(|class| of.contains(class))
    };
    within.descendants().filter(has).count()
}

/// The chart for wide screens in a section; `index` counts passes.
fn chart<'a>(page: &'a Document<'a>, section: &str, index: usize) -> Node<'a, 'a> {
    let section = page
        .descendants()
        .find(|node| node.has_tag_name("section") && node.attribute("id") == Some(section));
    let wide =
        |node: &Node<'_, '_>| node.has_tag_name("svg") && node.attribute("class") == Some("wide");
    section
        .unwrap()
        .descendants()
        .filter(wide)
        .nth(index)
        .unwrap()
}

#[test]
fn every_value_has_its_mark() {
    let text = page::document(&findings(vec![pass("forward", 8), pass("backward", 4)])).unwrap();
    let page = read(&text);
    // A rectangle for each of three components on one rank and four on three rings, twice.
    let memory = chart(&page, "memory", 0);
    assert_eq!(count(memory, "rect", &["mark"]), 2 * (3 + 3 * 4));
    // A dot and a circle for each of those, and for all buffers of each ring.
    assert_eq!(count(memory, "circle", &["measured"]), 3 + 3 * 4 + 4);
    assert_eq!(count(memory, "circle", &["planned"]), 3 + 3 * 4 + 4);
    assert_eq!(count(memory, "polyline", &["guide"]), 2);
    for (index, ranks) in [8, 4].into_iter().enumerate() {
        let timeline = chart(&page, "timeline", index);
        assert_eq!(count(timeline, "g", &["row"]), ranks);
        assert_eq!(count(timeline, "rect", &["mark"]), 4 * ranks);
        assert_eq!(count(timeline, "rect", &["a-wait"]), ranks);
        // A cell for each pair of neighbours, and a bar for each rank that sends.
        let traffic = chart(&page, "traffic", index);
        assert_eq!(count(traffic, "rect", &["mark"]), 2 * (ranks - 1));
    }
    let pattern = chart(&page, "pattern", 0);
    assert_eq!(count(pattern, "g", &["panel"]), 3);
    // Two shades in the whole sequence, one in each panel of the first tokens.
    assert_eq!(count(pattern, "path", &[]), 4);
    for (index, rings) in [2, 1].into_iter().enumerate() {
        let prediction = chart(&page, "prediction", index);
        assert_eq!(count(prediction, "circle", &["measured"]), rings);
        assert_eq!(count(prediction, "circle", &["planned"]), rings);
    }
    assert_eq!(count(page.root(), "svg", &["wide"]), 9);
    assert_eq!(count(page.root(), "svg", &["narrow"]), 9);
    assert_eq!(count(page.root(), "table", &[]), 8);
}

#[test]
fn headings_state_the_findings_with_their_values() {
    let text = page::document(&findings(vec![pass("forward", 8)])).unwrap();
    let page = read(&text);
    let headings = page.descendants().filter(|node| node.has_tag_name("h2"));
    let headings: Vec<&str> = headings.filter_map(|node| node.text()).collect();
    assert_eq!(headings.len(), 6);
    assert_eq!(headings[0], "Each rank holds 1/p: exponent −1.00");
    assert_eq!(
        headings[1],
        "On a ring of 8, ranks compute 25 % of the time and wait 25 %"
    );
    assert_eq!(
        headings[2],
        "2.73 KiB are sent on a ring of 8, 2.8 % of what a dense ring sends"
    );
    assert_eq!(
        headings[3],
        "The pattern computes 10 % of the pairs of dense attention"
    );
    assert_eq!(headings[4], "All 3 times are predicted within 200 %");
}

#[test]
fn the_page_refers_to_no_other_address_and_escapes_input() {
    let text = page::document(&findings(vec![pass("forward", 8)])).unwrap();
    for word in ["http:", "https:", "//", "url(", "@import", "<script>alert"] {
        assert!(!text.contains(word), "{word}");
    }
    let page = read(&text);
    for node in page.descendants() {
        for name in ["src", "href", "srcset", "data", "action"] {
            assert_eq!(node.attribute(name), None, "{name}");
        }
        let outside = ["link", "img", "iframe", "object", "embed", "base"];
        assert!(!outside.contains(&node.tag_name().name()));
    }
    assert_eq!(
        count(page.root(), "script", &[]),
        2,
        "the data, and the tooltips"
    );
    let shown = page.descendants().filter(|node| node.has_tag_name("dd"));
    let safe = HOSTILE.replace('\u{0}', "\u{fffd}");
    assert!(shown.into_iter().any(|node| node.text() == Some(&safe)));
}

#[test]
fn equal_findings_give_equal_pages_and_are_embedded() {
    let findings = findings(vec![pass("forward", 8)]);
    let text = page::document(&findings).unwrap();
    assert_eq!(text, page::document(&findings.clone()).unwrap());
    let page = read(&text);
    let data = page
        .descendants()
        .find(|node| node.attribute("id") == Some("findings"));
    let data: serde_json::Value =
        serde_json::from_str(data.and_then(|node| node.text()).unwrap()).unwrap();
    assert_eq!(data["setup"]["tokens"], 1000);
    assert_eq!(data["setup"]["pattern"], HOSTILE);
    assert_eq!(data["passes"][0]["rings"][2]["measured"]["own-kv"], 2048);
    assert_eq!(data["passes"][0]["shown"]["sent"][1][2], 200);
}

#[test]
fn a_single_rank_has_headings_of_its_own() {
    let mut alone = pass("forward", 1);
    alone.rings.truncate(1);
    let text = page::document(&findings(vec![alone])).unwrap();
    assert!(text.contains("Memory of a rank") && text.contains("One rank sends nothing"));
    read(&text);
}
