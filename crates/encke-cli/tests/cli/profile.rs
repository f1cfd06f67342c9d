//! `encke profile`: tables, files and errors.

use serde_json::Value;

use crate::command::CommandFolder;

const SMALL: &str = "profile --tokens 1k --heads 2 --kv-heads 1 --dim 16 --plan-ranks 64";

fn json(folder: &CommandFolder, name: &str) -> Value {
    let text = std::fs::read_to_string(folder.join(name)).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn exponent(document: &Value, pass: usize, component: &str) -> f64 {
    let of = &document["passes"][pass]["exponents"][component]["measured"];
    of.as_f64().unwrap_or_else(|| panic!("{component}: {of}"))
}

#[test]
fn memory_decreases_as_one_over_p_and_is_as_planned() {
    let folder = CommandFolder::new();
    let said = folder.succeeds(&format!("{SMALL} --grad --csv m.csv --json m.json"));
    for words in [
        "own K/V",
        "travelling K/V",
        "forward, bytes",
        "backward, bytes",
        "no rank held more than planned",
        "exponent",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    assert_eq!(folder.names(), ["m.csv", "m.json"]);
    let document = json(&folder, "m.json");
    for component in ["queries", "own-kv", "travelling-kv", "carry", "output"] {
        let found = exponent(&document, 0, component);
        assert!((found + 1.0).abs() <= 0.02, "{component}: {found}");
    }
    let found = exponent(&document, 1, "gradients");
    assert!((found + 1.0).abs() <= 0.02, "gradients: {found}");
    let rings = document["passes"][0]["run"].as_array().unwrap();
    assert_eq!(rings.len(), 6);
    assert_eq!(rings[5]["of"].as_array().unwrap().len(), 32);
    assert_eq!(document["passes"][1]["planned"][0]["ranks"], 64);
}

#[test]
fn the_csv_has_every_rank_and_round_and_none_above_its_plan() {
    let folder = CommandFolder::new();
    folder.succeeds("profile --tokens 1k --heads 2 --dim 16 --ranks 3 --plan-ranks 5 --csv m.csv");
    let text = std::fs::read_to_string(folder.join("m.csv")).unwrap();
    let mut lines = text.lines();
    let heading = "pass,ranks,rank,round,component,held_bytes,peak_bytes,planned_bytes";
    assert_eq!(lines.next(), Some(heading));
    let (mut measured, mut planned) = (0, 0);
    for line in lines {
        let cells: Vec<&str> = line.split(',').collect();
        assert_eq!(cells.len(), 8, "{line}");
        let number = |at: usize| cells[at].parse::<usize>().unwrap();
        match cells[1] {
            "3" => {
                assert!(number(6) <= number(7), "{line}");
                measured += usize::from(cells[4] == "own K/V");
            }
            _ => {
                assert_eq!((cells[3], cells[6]), ("", ""), "{line}");
                planned += usize::from(cells[4] == "own K/V");
            }
        }
    }
    // Three ranks need each other's keys: two hops, and the last round of jobs.
    assert_eq!((measured, planned), (3 * 3, 5));
}

#[test]
fn replicated_queries_do_not_depend_on_the_ring_size() {
    let folder = CommandFolder::new();
    folder.succeeds(&format!("{SMALL} --queries replicated --json m.json"));
    let document = json(&folder, "m.json");
    for (component, expected) in [("queries", 0.0), ("output", 0.0), ("own-kv", -1.0)] {
        let found = exponent(&document, 0, component);
        assert!((found - expected).abs() <= 0.02, "{component}: {found}");
    }
}

#[test]
fn wrong_options_are_refused() {
    let folder = CommandFolder::new();
    let refusals = [
        ("--sharding 0,100", "several"),
        ("--ranks 0", "ranks is 0"),
        ("--ranks 2,5000", "5000 is too many"),
        ("--ranks two", "whole number"),
        ("--csv m --json m", "also the CSV file"),
        ("--csv none/m.csv", "cannot write none/m.csv"),
        ("--dilation-rates 2", "--segment-lengths"),
    ];
    for (options, words) in refusals {
        folder.refuses(&format!("{SMALL} {options}"), &[words]);
    }
}

#[test]
fn caches_are_shown_with_hit_rates_and_limits() {
    let folder = CommandFolder::new();
    let said = folder.succeeds(
        "profile --tokens 96 --heads 2 --dim 8 --ranks 1,3 --plan-ranks 0 --caches --policies",
    );
    for words in [
        "kept between 48 calls of 24 lengths",
        "hit rate",
        "50 %",
        "4 with",
        "output in a file",
        "recomputed",
    ] {
        assert!(said.contains(words), "no {words:?} in {said}");
    }
}
