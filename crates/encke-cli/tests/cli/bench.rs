//! `encke bench`: results are checked before they are timed, and errors come before any work.

use serde_json::Value;

use crate::command::CommandFolder;

#[test]
fn rings_are_checked_and_timed_as_often_as_repeats_says() {
    let folder = CommandFolder::new();
    let said = folder.succeeds(
        "bench --tokens 600 --heads 4 --kv-heads 2 --dim 16 --batch 2 --causal --sharding zigzag \
         --ranks 3,1 --grad --repeats 2 --json b.json",
    );
    for words in ["forward", "backward", "against", ": right", "FLOP/s"] {
        assert!(said.contains(words), "{words}: {said}");
    }
    assert_eq!(folder.names(), ["b.json"]);
    let text = std::fs::read_to_string(folder.join("b.json")).unwrap();
    let record: Value = serde_json::from_str(&text).unwrap();
    let rings = record["rings"].as_array().unwrap();
    assert_eq!(rings.len(), 2);
    assert_eq!(
        (&rings[0]["ranks"], &rings[1]["ranks"]),
        (&1.into(), &3.into())
    );
    assert!(rings[1]["gradients_apart"].as_f64().unwrap() < 1e-5);
    // 600 x 601 / 2 pairs, in two sequences of four heads; 4 x 16 operations each, and 10 x 16.
    let pairs = 600.0 * 601.0 / 2.0 * 8.0;
    for ring in rings {
        assert!(ring["checked"]["rows"].as_u64().unwrap() >= 64, "{ring}");
        for (pass, each) in [(0, 64.0), (1, 160.0)] {
            let pass = &ring["passes"][pass];
            assert_eq!(pass["seconds"].as_array().unwrap().len(), 2);
            assert_eq!(pass["flops"], pairs * each);
        }
    }
    assert_eq!(rings[0]["passes"][0]["sent_bytes"], 0);
    assert_ne!(rings[1]["passes"][0]["sent_bytes"], 0);
}

#[test]
fn wrong_options_are_refused_in_one_line() {
    let folder = CommandFolder::new();
    for (options, words) in [
        ("--repeats 0", "--repeats 0 times nothing"),
        ("--ranks 5000", "use at most 1024"),
        ("--sharding 0,10", "define one ring size"),
        ("--dim 0", "0"),
        (
            "--mode fkodom --segment-lengths 64 --dilation-rates 2",
            "cannot be checked one by one",
        ),
        ("--json missing/b.json", "missing"),
    ] {
        folder.refuses(&format!("bench --tokens 64 {options}"), &[words]);
    }
}

#[test]
fn scores_are_checked_as_they_are_computed() {
    let folder = CommandFolder::new();
    let sizes = "bench --tokens 256 --heads 2 --dim 8 --ranks 1,2 --repeats 1";
    for options in [
        "--softcap 3",
        "--alibi",
        "--causal --window 30,0 --softcap 2 --alibi",
    ] {
        let printed = folder.succeeds(&format!("{sizes} {options}"));
        assert!(!printed.contains("wrong"), "{options}: {printed}");
    }
    folder.refuses(&format!("{sizes} --query-tokens 5"), &["--query-tokens"]);
    folder.refuses(&format!("{sizes} --value-dim 4"), &["--value-dim"]);
}
