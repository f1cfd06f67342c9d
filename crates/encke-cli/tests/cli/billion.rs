//! `encke billion`: a 512th of a billion tokens (in long runs a 64th), and interrupted runs.

use std::process::{Command, Stdio};
use std::time::Duration;

use encke_core::conformance::extent;
use serde_json::Value;

use crate::command::CommandFolder;

/// Runs the command with a record, and reads it.
fn record(folder: &CommandFolder, options: &str) -> Value {
    let printed = folder.succeeds(&format!("billion {options} --record r.json"));
    for word in [
        "tokens/s",
        "GFLOP/s",
        "all within tolerance",
        "checksum",
        "own K/V",
    ] {
        assert!(printed.contains(word), "no {word} in {printed}");
    }
    let text = std::fs::read(folder.join("r.json")).unwrap();
    assert_eq!(
        folder.names(),
        ["r.json"],
        "the state is removed at the end"
    );
    serde_json::from_slice(&text).unwrap()
}

fn number(record: &Value, name: &str) -> f64 {
    record[name].as_f64().unwrap()
}

/// (query, key) pairs of the pattern, counted from its definition.
fn pairs(tokens: u64, segment: u64, growth: u64) -> u64 {
    let (mut w, mut r, mut pairs) = (segment, 1, 0);
    loop {
        let keys = w.min(tokens) / r;
        pairs += (tokens / w).max(1) * keys * (keys + 1) / 2;
        if w >= tokens {
            return pairs;
        }
        (w, r) = (w * growth, r * growth);
    }
}

#[test]
fn millions_of_tokens_are_computed_and_checked() {
    let folder = CommandFolder::new();
    let ranks = extent(2, 16);
    let tokens = ranks << 20;
    let record = record(&folder, &format!("--tokens {ranks}M"));
    assert_eq!(record["settings"]["ranks"], ranks);
    assert_eq!(record["pairs"].as_u64(), Some(pairs(tokens, 1024, 4)));
    assert_eq!(record["checksum_rows"].as_u64(), Some(tokens));
    assert!(record["checked"]["rows"].as_u64() >= Some(4096));
    assert_eq!(record["checked"]["wrong"].as_u64(), Some(0));
    let planned = record["memory"]["planned"].as_object().unwrap();
    let workspace = planned["workspace"].as_u64().unwrap();
    let all: u64 = planned.values().map(|bytes| bytes.as_u64().unwrap()).sum();
    assert_eq!(
        record["memory"]["allocated_bytes"].as_u64(),
        Some(all - workspace)
    );
    let peak = record["peak_resident_bytes"].as_u64().unwrap();
    assert!(peak <= all + (32 << 20), "{peak} resident, {all} planned");
}

#[test]
fn the_checksum_does_not_depend_on_the_ranks_but_on_the_seed() {
    let folder = CommandFolder::new();
    let options = "--tokens 100_000 --segment 128 --samples 50";
    let base = record(&folder, options);
    let (value, tolerance) = (
        number(&base, "checksum"),
        number(&base, "checksum_tolerance"),
    );
    for ranks in [2, 7, 32] {
        let other = record(&folder, &format!("{options} --ranks {ranks}"));
        let difference = (number(&other, "checksum") - value).abs();
        assert!(
            difference <= tolerance,
            "{ranks} ranks: {difference} over {tolerance}"
        );
        assert_eq!(other["pairs"], base["pairs"]);
    }
    let other = record(&folder, &format!("{options} --seed 1"));
    assert!((number(&other, "checksum") - value).abs() > 1000.0 * tolerance);
    for dtype in ["bf16", "f64"] {
        record(
            &folder,
            &format!("{options} --ranks 3 --dtype {dtype} --heads 2 --dim 16"),
        );
    }
}

#[test]
fn masks_are_computed_and_checked_in_f64() {
    let folder = CommandFolder::new();
    for (options, pairs) in [
        // One branch of every token: 4096 of the last tokens, and 3 at the start.
        ("--segment 20k --window 4095,0 --prefix 3", {
            let (tokens, window, prefix) = (20 << 10, 4096, 3);
            let row = |t: u64| (t + 1).min(window) + (t + 1).saturating_sub(window).min(prefix);
            Some((0..tokens).map(row).sum::<u64>())
        }),
        ("--segment 128 --documents 7k,1,4095,9k", None),
        (
            "--segment 128 --documents 7k,13k --window 300,all --prefix 5",
            None,
        ),
    ] {
        let options = format!("--tokens 20k {options} --dim 16 --heads 2 --samples 200");
        let base = record(&folder, &options);
        assert_eq!(base["checked"]["wrong"].as_u64(), Some(0));
        if let Some(pairs) = pairs {
            assert_eq!(base["pairs"].as_u64(), Some(2 * pairs));
        }
        let masked = ["window 4095", "documents"];
        let pattern = base["pattern"].as_str().unwrap();
        assert!(
            masked.iter().any(|word| pattern.contains(word)),
            "{pattern}"
        );
        let tolerance = number(&base, "checksum_tolerance");
        let other = record(&folder, &format!("{options} --ranks 5"));
        let difference = (number(&other, "checksum") - number(&base, "checksum")).abs();
        assert!(difference <= tolerance, "{difference} over {tolerance}");
        assert_eq!(other["pairs"], base["pairs"]);
    }
}

#[test]
fn masks_that_do_not_fit_are_refused() {
    let folder = CommandFolder::new();
    let many = vec!["1"; (1 << 15) + 1].join(",");
    for (options, words) in [
        ("--documents 9,10", ["19 tokens", "20"]),
        ("--prefix 3", ["--window", "required"]),
        ("--window all,0 --prefix 3", ["--prefix", "no effect"]),
        ("--window 3", ["--window", "1023,0"]),
        (&format!("--documents {many}"), ["32769 documents", "32768"]),
    ] {
        folder.refuses(&format!("billion --tokens 20 {options}"), &words);
    }
}

/// The ring sizes at which a billion tokens are compared, on a sequence of a 4096th of them.
#[test]
fn the_checksum_of_512_1024_and_2048_ranks_is_the_same() {
    let folder = CommandFolder::new();
    let run = |ranks: usize| {
        let options = "--tokens 256k --segment 64 --dim 16 --samples 50";
        let record = record(&folder, &format!("{options} --ranks {ranks}"));
        assert_eq!(record["settings"]["ranks"].as_u64(), Some(ranks as u64));
        assert_eq!(record["pairs"].as_u64(), Some(pairs(1 << 18, 64, 4)));
        (
            number(&record, "checksum"),
            number(&record, "checksum_tolerance"),
        )
    };
    let (value, tolerance) = run(1024);
    for ranks in [512, 2048] {
        let (other, _) = run(ranks);
        let difference = (other - value).abs();
        assert!(
            difference <= tolerance,
            "{ranks} ranks: {difference} over {tolerance}"
        );
    }
}

#[test]
fn a_killed_run_continues_after_the_last_finished_rank() {
    let folder = CommandFolder::new();
    let options = "--tokens 1M --ranks 64 --segment 512 --samples 100";
    let whole = record(&folder, options);
    let mut child = Command::new(assert_cmd::cargo::cargo_bin("encke"))
        .current_dir(folder.path())
        .args(format!("billion {options}").split_whitespace())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let state = folder.join("encke-billion.state.json");
    let finished = || {
        let text = std::fs::read(&state).unwrap_or_default();
        let state: Option<Value> = serde_json::from_slice(&text).ok();
        state.and_then(|state| state["finished"].as_u64())
    };
    while child.try_wait().unwrap().is_none() && finished() < Some(3) {
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let finished = finished().expect("a killed run leaves its state behind");
    assert!((3..64).contains(&finished), "{finished}");

    // Another run's state is not continued.
    let other = "billion --tokens 1M --ranks 32 --segment 512 --samples 100";
    folder.refuses(other, &["another run", "64 ranks", "--fresh"]);

    let resumed = record(&folder, options);
    assert_eq!(resumed["interruptions"], 1);
    for name in [
        "checksum",
        "checksum_rows",
        "pairs",
        "checked",
        "received_bytes",
    ] {
        assert_eq!(resumed[name], whole[name], "{name}");
    }
}

#[test]
fn a_missing_gpu_is_an_error_and_never_the_cpu() {
    let folder = CommandFolder::new();
    let error = folder.refuses(
        "billion --tokens 1k --device cuda:3",
        &["--device cuda:3", "CUDA driver", "no-driver-for-tests.so"],
    );
    assert!(error.contains("ENCKE_LIBCUDA"), "{error}");
    for device in ["gpu", "cuda:", "cuda:one", "CPU"] {
        let command = format!("billion --tokens 1k --device {device}");
        folder.refuses(&command, &["--device", device, "cuda:N"]);
    }
    let base = record(&folder, "--tokens 4k --samples 10 --device cpu");
    assert_eq!(base["settings"]["device"], "cpu");
    assert_eq!(base["settings"]["heads"], 1);
    assert!(base["device_memory"].is_null());
}

#[test]
fn wrong_options_and_wrong_states_are_refused() {
    let folder = CommandFolder::new();
    folder.refuses("billion --tokens 0", &["tokens", "0"]);
    folder.refuses("billion --tokens 1k --growth 1", &["--growth 1"]);
    folder.refuses("billion --tokens 1k --segment 0", &["segment length", "0"]);
    folder.refuses("billion --tokens 1k --ranks 0", &["ranks", "0"]);
    folder.refuses(
        "billion --tokens 1k --state nowhere/s",
        &["cannot write nowhere/s"],
    );
    std::fs::write(folder.join("s"), "{}").unwrap();
    folder.refuses(
        "billion --tokens 1k --state s",
        &["s is not the state of a run"],
    );
    folder.succeeds("billion --tokens 1k --state s --fresh");
}

/// The rounding of a score grows with its terms, and so does what is allowed.
#[test]
fn a_huge_head_dimension_is_right() {
    let folder = CommandFolder::new();
    folder.succeeds("billion --tokens 64 --ranks 2 --samples 4 --dim 20k --heads 1");
}
