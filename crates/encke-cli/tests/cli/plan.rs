//! `encke plan`, `encke --help` and standard output that is closed early.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::command::CommandFolder;

#[test]
fn a_billion_tokens_on_a_thousand_ranks_are_planned_in_seconds() {
    let folder = CommandFolder::new();
    let sizes = "--tokens 1e9 --heads 32 --kv-heads 8 --dim 128 --ranks 1000 --causal";
    let mix = "--mode mix --segment-lengths 2k,64k,1M --dilation-rates 1,32,512";
    for options in ["", "--backward", mix, "--queries replicated"] {
        let begin = Instant::now();
        let plan = folder.succeeds(&format!("plan {sizes} {options} --json"));
        // Far more than it takes, for busy machines.
        assert!(begin.elapsed() < Duration::from_secs(10), "plan {options}");
        let plan: serde_json::Value = serde_json::from_str(&plan).unwrap();
        assert_eq!(plan["request"]["shape"]["tokens"], 1_000_000_000);
        assert!(plan["sent_bytes"].as_u64().unwrap() > 0, "plan {options}");
    }
}

#[test]
fn segments_inside_chunks_send_nothing() {
    let folder = CommandFolder::new();
    let plan = folder.succeeds(
        "plan --tokens 64k --heads 6 --dim 64 --ranks 8 --segment-lengths 2048,4096,8192 \
         --dilation-rates 1,2,4 --json",
    );
    let plan: serde_json::Value = serde_json::from_str(&plan).unwrap();
    assert_eq!(plan["sent_bytes"], 0);
    assert_eq!(plan["dense_ring_bytes"], 2 * 65536 * 6 * 64 * 4 * 7u64);
}

#[test]
fn a_plan_with_redundancy_lists_its_replicas() {
    let folder = CommandFolder::new();
    let sizes = "plan --tokens 4k --heads 8 --dim 64 --ranks 4";
    let plan = folder.succeeds(&format!("{sizes} --redundancy 1"));
    // q, k and v of 1024 rows of 8 heads of dimension 64 in f32.
    for words in [
        "a replica of the inputs of 1 neighbour",
        "replica                   6.00 MiB",
        "if rank 2 dies, rank 3 adopts its tokens and holds 44.2 MiB",
    ] {
        assert!(plan.contains(words), "{plan}");
    }
    let plan = folder.succeeds(&format!("{sizes} --redundancy 1 --json"));
    let plan: serde_json::Value = serde_json::from_str(&plan).unwrap();
    assert_eq!(plan["ranks"][2]["memory"]["replica"], 3 * 1024 * 8 * 64 * 4);
    folder.refuses(
        &format!("{sizes} --redundancy 4"),
        &["use at most that redundancy"],
    );
    let replicated = format!("{sizes} --redundancy 1 --queries replicated");
    folder.refuses(&replicated, &["use sharded queries"]);
}

#[test]
fn schedules_are_planned_and_compared() {
    let folder = CommandFolder::new();
    let sizes = "plan --tokens 4k --heads 8 --dim 64 --ranks 8";
    for (schedule, words) in [
        ("ring", "forwarded towards higher ranks, at most 7 hops"),
        ("1", "forwarded towards higher ranks, at most 7 hops"),
        (
            "4",
            "forwarded towards higher ranks in batches of 4, 2 rounds",
        ),
        ("gather", "sent directly to every reader, in 1 round"),
        ("two-level:4", "rotate inside 2 nodes of 4"),
        ("two-level --node 4", "rotate inside 2 nodes of 4"),
        ("heads:4", "groups of 4 ranks exchange heads"),
    ] {
        let plan = folder.succeeds(&format!("{sizes} --schedule {schedule}"));
        assert!(plan.contains(words), "{plan}");
    }
    let json = |options: &str| -> serde_json::Value {
        let plan = folder.succeeds(&format!("{sizes} {options} --json"));
        serde_json::from_str(&plan).unwrap()
    };
    let (ring, gather) = (json(""), json("--schedule gather"));
    assert_eq!(gather["request"]["schedule"]["width"], 7);
    assert_eq!(gather["sent_bytes"], ring["sent_bytes"]);
    assert!(gather["ranks"][0]["rounds"].as_u64() < ring["ranks"][0]["rounds"].as_u64());
    let (keys, queries) = (json("--backward"), json("--backward --rotate queries"));
    assert!(queries["sent_bytes"].as_u64() < keys["sent_bytes"].as_u64());
    let held = &queries["ranks"][0]["memory"];
    assert!(held["travelling-queries"].as_u64() > Some(0), "{held}");

    let explained = folder.succeeds(&format!("{sizes} --backward --explain"));
    for words in ["gathered", "at a time", "queries rotate"] {
        assert!(explained.contains(words), "{explained}");
    }
    folder.refuses(
        &format!("{sizes} --schedule 0"),
        &["ring, gather", "or auto"],
    );
    for (schedule, words) in [
        ("two-level", "two-level:8"),
        ("heads", "heads:8"),
        ("two-level:0", "two-level:G"),
        ("heads:3", "divides the number of ranks"),
    ] {
        folder.refuses(&format!("{sizes} --schedule {schedule}"), &[words]);
    }
    folder.refuses(
        &format!("{sizes} --rotate values"),
        &["keys or queries", "or auto"],
    );
    let surviving = format!("{sizes} --redundancy 1");
    folder.succeeds(&format!("{surviving} --schedule 2"));
    folder.refuses(
        &format!("{surviving} --rotate queries"),
        &["rotate keys instead"],
    );
}

#[test]
fn text_and_json_describe_the_ring_and_the_program_of_a_rank() {
    let folder = CommandFolder::new();
    let sizes = "plan --tokens 4k --heads 8 --dim 64 --ranks 4 --causal";
    let whole = folder.succeeds(sizes);
    for words in ["4,096 tokens", "Rings", "Memory of rank", "all buffers"] {
        assert!(whole.contains(words), "{whole}");
    }
    let rank = folder.succeeds(&format!("{sizes} --backward --rank 2"));
    for words in [
        "Rank 2 of 4",
        "Round 0",
        "receive travelling k",
        "differentiate",
        "Outputs",
    ] {
        assert!(rank.contains(words), "{rank}");
    }
    let json = folder.succeeds(&format!("{sizes} --rank 2 --json"));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["rank"], 2);
    folder.refuses(&format!("{sizes} --rank 4"), &["no rank 4", "4 ranks"]);
}

#[test]
fn wrong_sizes_are_refused() {
    let folder = CommandFolder::new();
    let refusals = [
        ("--tokens 0 --heads 1 --dim 1", "tokens is 0"),
        ("--tokens 8 --heads 3 --kv-heads 2 --dim 4", "3 query heads"),
        ("--tokens 1e18 --heads 32 --dim 128", "too large"),
        ("--tokens 1.5 --heads 1 --dim 1", "whole number"),
        (
            "--tokens 8 --heads 1 --dim 1 --dtype f8",
            "f64, f32, bf16, f16",
        ),
        ("--tokens 8 --heads 1 --dim 1 --ranks 1e12", "too many"),
        ("--tokens 8 --heads 1", "--dim"),
    ];
    for (options, words) in refusals {
        folder.refuses(&format!("plan {options}"), &[words]);
    }
}

#[test]
fn help_succeeds_and_has_examples() {
    let folder = CommandFolder::new();
    for command in [
        "--help",
        "attend --help",
        "plan --help",
        "report --help",
        "simulate --help",
        "profile --help",
        "tune --help",
        "verify --help",
        "-h",
    ] {
        let help = folder.succeeds(command);
        assert!(help.contains("Examples:"), "{command}: {help}");
        assert!(!help.contains('\x1b'), "colour without a terminal");
        let widest = help.lines().map(|line| line.chars().count()).max();
        assert!(widest <= Some(100), "{command}");
    }
    assert!(folder.succeeds("--version").starts_with("encke "));
}

#[test]
fn a_closed_standard_output_is_no_error() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_encke"))
        .args("plan --tokens 1M --heads 8 --dim 64 --ranks 64 --json".split(' '))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(output.stderr.is_empty());
}
