//! `encke report`: the page, its errors, and its display in a browser.

use std::path::Path;

use serde_json::Value;

use crate::chromium::start_or_skip;
use crate::command::CommandFolder;

/// Small enough to be quick, large enough that rows are sent.
const SMALL: &str = "--tokens 1k --heads 4 --kv-heads 2 --dim 16 --repeats 1";

/// The findings embedded in a page.
fn findings(page: &Path) -> Value {
    let text = std::fs::read_to_string(page).unwrap();
    let (_, rest) = text.split_once("id=\"findings\">").unwrap();
    let (json, _) = rest.split_once("</script>").unwrap();
    serde_json::from_str(json).unwrap()
}

/// The exponent of measured bytes between 4 ranks and the last ring; two ranks need fewer buffers.
fn exponent(pass: &Value, component: &str) -> f64 {
    let rings = pass["rings"].as_array().unwrap();
    let of = |ring: &Value| {
        let bytes = ring["measured"][component].as_f64().unwrap();
        (ring["ranks"].as_f64().unwrap().ln(), bytes.ln())
    };
    let ((x, y), (u, v)) = (of(&rings[2]), of(&rings[rings.len() - 1]));
    (v - y) / (u - x)
}

#[test]
fn a_page_has_measured_and_planned_bytes_which_agree() {
    let folder = CommandFolder::new();
    let options = "--causal --grad --show 4 --trace ring.json";
    folder.succeeds(&format!("report page.html {SMALL} {options}"));
    assert_eq!(folder.names(), ["page.html", "ring.json"]);
    let findings = findings(&folder.join("page.html"));
    let passes = findings["passes"].as_array().unwrap();
    assert_eq!(passes.len(), 2);
    for pass in passes {
        let rings = pass["rings"].as_array().unwrap();
        let ranks: Vec<u64> = rings
            .iter()
            .map(|ring| ring["ranks"].as_u64().unwrap())
            .collect();
        assert_eq!(ranks, [1, 2, 4, 8, 16, 32]);
        for ring in rings {
            for (component, planned) in ring["planned"].as_object().unwrap() {
                if component != "workspace" {
                    assert_eq!(&ring["measured"][component], planned, "{component} {ring}");
                }
            }
        }
        for component in ["queries", "own-kv", "travelling-kv", "output"] {
            let exponent = exponent(pass, component);
            assert!(
                (-1.02..=-0.98).contains(&exponent),
                "{component}: {exponent}"
            );
        }
        let shown = &pass["shown"];
        let sent = shown["sent"].as_array().unwrap().iter();
        let sent = sent
            .flat_map(|row| row.as_array().unwrap())
            .map(|bytes| bytes.as_u64().unwrap());
        assert_eq!(sent.sum::<u64>(), shown["sent_bytes"].as_u64().unwrap());
        assert!(!shown["spans"].as_array().unwrap().is_empty());
    }
    let trace = std::fs::read_to_string(folder.join("ring.json")).unwrap();
    let trace: Value = serde_json::from_str(&trace).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for pass in ["forward", "backward"] {
        assert!(
            events
                .iter()
                .any(|event| event["cat"] == pass && event["tid"] == 3),
            "{pass}"
        );
    }
}

#[test]
fn replicated_queries_do_not_depend_on_the_ring_and_keys_decrease() {
    let folder = CommandFolder::new();
    folder.succeeds(&format!(
        "report page.html {SMALL} --causal --queries replicated --ranks 8"
    ));
    let findings = findings(&folder.join("page.html"));
    let pass = &findings["passes"][0];
    assert!(exponent(pass, "queries").abs() < 0.02);
    assert!((exponent(pass, "own-kv") + 1.0).abs() < 0.02);
}

#[test]
fn wrong_options_are_refused() {
    let folder = CommandFolder::new();
    let refusals = [
        ("report", "OUT.html"),
        ("report page.html --tokens 0", "tokens is 0"),
        ("report page.html --ranks 257", "at most 256"),
        ("report page.html --repeats 0", "--repeats 0"),
        ("report page.html --ranks 8 --show 3", "1, 2, 4, 8"),
        (
            "report page.html --sharding 0,100",
            "contiguous, zigzag or striped",
        ),
        ("report nowhere/page.html", "nowhere/page.html"),
        ("report page.html --trace page.html", "also the page"),
        ("report page.html --mode mix", "--segment-lengths"),
    ];
    for (command, words) in refusals {
        folder.refuses(command, &[words]);
    }
}

#[test]
fn a_browser_shows_every_page_in_light_and_dark_wide_and_narrow() {
    let Some(mut browser) = start_or_skip() else {
        return;
    };
    let folder = CommandFolder::new();
    let pages = [
        // (name, options, charts that are seen at once)
        ("mix", "--repeats 1".to_string(), 5),
        (
            "dense",
            format!("{SMALL} --causal --sharding zigzag --grad --show 32"),
            9,
        ),
        (
            "group",
            format!(
                "{SMALL} --ranks 6 --show 6 --queries replicated --dtype bf16 --mode group \
                 --segment-lengths 64,256,1024 --dilation-rates 1,2,4"
            ),
            5,
        ),
        (
            "one",
            "--tokens 40 --heads 1 --dim 8 --ranks 1 --repeats 1".to_string(),
            5,
        ),
    ];
    for (name, options, charts) in pages {
        folder.succeeds(&format!("report {name}.html {options}"));
        let page = folder.join(&format!("{name}.html"));
        for (scheme, width) in [
            ("light", 1280),
            ("dark", 1280),
            ("light", 400),
            ("dark", 720),
        ] {
            let here = format!("{name}, {scheme}, {width}");
            browser.open(&page, width, scheme);
            let seen = browser.evaluate(include_str!("page.js"));
            assert_eq!(seen["problems"], serde_json::json!([]), "{here}");
            assert_eq!(seen["charts"], charts, "{here}");
            assert_eq!(seen["light"], scheme == "light", "{here}");
            let place = |index: usize| seen["mark"][index].as_f64().unwrap();
            let (x, mut y) = (place(0), place(1));
            y -= browser
                .evaluate(&format!("scrollTo(0, {y} - 400), scrollY"))
                .as_f64()
                .unwrap();
            browser.point_at(x, y);
            let tip = browser.evaluate("tip.hidden ? '' : tip.textContent");
            assert!(
                tip.as_str().unwrap().contains("on each of"),
                "{here}: {tip}"
            );
            let complaints = browser.events(&[
                "Runtime.exceptionThrown",
                "Runtime.consoleAPICalled",
                "Log.entryAdded",
                "Network.loadingFailed",
            ]);
            assert!(complaints.is_empty(), "{here}: {complaints:?}");
            let requests = browser.events(&["Network.requestWillBeSent"]);
            let only = format!("file://{}", page.display());
            let asked = |event: &&Value| event["params"]["request"]["url"] != only.as_str();
            let others: Vec<_> = requests.into_iter().filter(asked).collect();
            assert!(others.is_empty(), "{here}: {others:?}");
        }
    }
}

#[test]
fn masks_and_scores_are_those_of_the_options() {
    let folder = CommandFolder::new();
    let masked = "--causal --window 60,0 --prefix 4 --documents 300,724 --softcap 20 --alibi";
    folder.succeeds(&format!("report page.html {SMALL} --ranks 4 {masked}"));
    let findings = findings(&folder.join("page.html"));
    let setup = &findings["setup"];
    let pattern = setup["pattern"].as_str().unwrap();
    for part in ["causal", "window 60,0", "prefix 4", "2 documents"] {
        assert!(pattern.contains(part), "{pattern}");
    }
    // In a document of n tokens, token x sees min(x + 1, 61) keys and up to 4 of the prefix.
    let seen = |x: usize| (x + 1).min(61) + x.saturating_sub(60).min(4);
    let pairs: usize = [300, 724].iter().flat_map(|&n| (0..n).map(seen)).sum();
    assert_eq!(setup["pairs"].as_u64().unwrap() as usize, 4 * pairs);
    folder.succeeds(&format!(
        "report page.html {SMALL} --ranks 2 --value-dim 4 --grad"
    ));
    folder.refuses(
        &format!("report page.html {SMALL} --causal --query-tokens 10"),
        &["--query-tokens"],
    );
}
