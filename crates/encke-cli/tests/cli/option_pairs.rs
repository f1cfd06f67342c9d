//! Every pair of options of the commands that plan, predict and measure: the command does what it
//! is for, or refuses in one sentence that names both.

use std::sync::Mutex;

use encke_core::conformance::extent;

use crate::command::{CommandFolder, text};

/// Options that each go with the others' defaults, and words by which a refusal may name them.
type PairedOption = (&'static str, &'static [&'static str]);

const OPTIONS: [PairedOption; 22] = [
    ("--causal", &["causal"]),
    ("--window 9,0 --prefix 2", &["window"]),
    ("--documents 40,88", &["documents"]),
    ("--query-tokens 7", &["fewer queries"]),
    ("--value-dim 3", &["value"]),
    ("--softcap 3", &["softcap"]),
    ("--alibi", &["slopes"]),
    (
        "--mode mix --segment-lengths 8,16 --dilation-rates 1,2 --padding torchscale",
        &["padding"],
    ),
    (
        "--mode mix --segment-lengths 8,16 --dilation-rates 1,2 --mixing-gradient detached",
        &["detached"],
    ),
    (
        "--mode fkodom --segment-lengths 8,16 --dilation-rates 1,2",
        &["fkodom"],
    ),
    ("--sharding zigzag", &["contiguous"]),
    ("--sharding striped", &["striped", "contiguous"]),
    ("--sharding documents", &["contiguous"]),
    ("--queries replicated", &["replicated queries"]),
    ("--schedule 2", &["several distances"]),
    ("--schedule two-level:2", &["two levels"]),
    ("--schedule heads:2", &["divides heads"]),
    ("--bits invariant:32", &["bits"]),
    ("--redundancy 1", &["redundancy"]),
    ("--rotate queries --backward", &["rotate"]),
    ("--kv-heads 2", &["key heads"]),
    ("--batch 2", &["batch"]),
];

const CALL: &str = "plan --tokens 128 --heads 4 --dim 8 --ranks 4";

/// Whether two lists of arguments set one option.
fn overlap(one: &str, other: &str) -> bool {
    let mut names = one.split(' ').filter(|word| word.starts_with("--"));
    names.any(|name| other.split(' ').any(|word| word == name))
}

/// Checks one pair in `every`, unless all tests run. Returns how many of them are refused.
fn check_pairs(call: &str, options: &[PairedOption], every: usize) -> usize {
    let folder = CommandFolder::new();
    let mut pairs = Vec::new();
    for (index, one) in options.iter().enumerate() {
        folder.succeeds(&format!("{call} {}", one.0));
        let others = options[index + 1..].iter();
        pairs.extend(
            others
                .filter(|other| !overlap(one.0, other.0))
                .map(|other| (one, other)),
        );
    }
    assert!(pairs.len() > 150);
    let pairs = pairs.into_iter().step_by(extent(every, 1));
    let (pairs, refused) = (Mutex::new(pairs), Mutex::new(0));
    let next = || pairs.lock().expect("no panic").next();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some(((one, words), (other, more))) = next() {
                    // Such small calls need no more threads, which take longer to start.
                    let mut command = folder.command(&format!("{call} {one} {other}"));
                    let output = command.env("RAYON_NUM_THREADS", "1").output();
                    let output = output.expect("the command runs");
                    if output.status.success() {
                        continue;
                    }
                    let said = text(&output.stderr);
                    assert_eq!(output.status.code(), Some(2), "{one} {other}: {said}");
                    assert_eq!(said.lines().count(), 1, "{one} {other}: {said}");
                    for words in [words, more] {
                        let named = words.iter().any(|word| said.contains(word));
                        assert!(named, "{one} {other}: no {words:?} in {said}");
                    }
                    *refused.lock().expect("no panic") += 1;
                }
            });
        }
    });
    refused.into_inner().expect("no panic")
}

#[test]
fn two_options_go_together_or_a_sentence_names_both() {
    assert!(check_pairs(CALL, &OPTIONS, 1) > 10);
}

#[test]
fn two_options_of_simulate_go_together_or_a_sentence_names_both() {
    let more: [PairedOption; 5] = [
        ("--straggler 1:2", &["straggler"]),
        ("--json s.json", &["json"]),
        ("--trace t.json --record 2", &["trace"]),
        ("--node 2", &["node"]),
        ("--against threads --repeats 1", &["against"]),
    ];
    // `simulate` has --grad where `plan` has --backward.
    let options = OPTIONS.map(|(option, words)| match words {
        ["rotate"] => ("--rotate queries --grad", words),
        _ => (option, words),
    });
    let call = CALL.replace("plan", "simulate");
    assert!(check_pairs(&call, &[&options[..], &more].concat(), 7) > 0);
}

/// Options of commands that compare rings of several sizes.
fn of_rings(more: &[PairedOption], except: &[&str]) -> Vec<PairedOption> {
    let missing = ["--schedule", "--rotate", "--sharding documents"];
    let options = OPTIONS.iter().copied().chain([
        ("--redundancy 1 --grad", &["redundancy"] as &[&str]),
        ("--grad", &["grad"]),
        ("--json s.json", &["json"]),
        ("--dtype f64", &["f64"]),
        ("--seed 3", &["seed"]),
    ]);
    let kept = options.filter(|(option, _)| {
        let left_out = |name: &&str| option.contains(*name);
        !missing.iter().any(left_out) && !except.iter().any(left_out)
    });
    kept.chain(more.iter().copied()).collect()
}

#[test]
fn two_options_of_profile_go_together_or_a_sentence_names_both() {
    let more: [PairedOption; 3] = [
        ("--caches", &["caches"]),
        ("--policies", &["policies"]),
        ("--csv s.csv", &["csv"]),
    ];
    let call = CALL.replace("plan", "profile") + " --plan-ranks 8";
    check_pairs(&call, &of_rings(&more, &[]), 7);
    let folder = CommandFolder::new();
    for (option, name) in [
        ("--documents 40,88", "--documents"),
        (
            "--mode fkodom --segment-lengths 8,16 --dilation-rates 1,2",
            "--mode fkodom",
        ),
    ] {
        folder.refuses(&format!("{call} --caches {option}"), &["--caches", name]);
    }
    folder.succeeds(&format!("{call} --caches --policies --bits invariant:32"));
}

/// `bench` also compares rows with the reference: some of them have no keys.
#[test]
fn two_options_of_bench_go_together_or_a_sentence_names_both() {
    let call = CALL.replace("plan", "bench") + " --repeats 1";
    let except = ["--query-tokens", "--value-dim", "fkodom"];
    let more = [(
        "--mode group --segment-lengths 8,16 --dilation-rates 1,2 --group-scale groups",
        &["group"] as &[&str],
    )];
    check_pairs(&call, &of_rings(&more, &except), 7);
}

/// `report` draws a query for every key, and begins with a ring of one.
#[test]
fn two_options_of_report_go_together_or_a_sentence_names_both() {
    let call = CALL.replace("plan", "report page.html --repeats 1");
    let except = [
        "--query-tokens",
        "--redundancy",
        "--json",
        "--schedule heads",
    ];
    let more = [
        ("--sharding documents", &["contiguous"] as &[&str]),
        ("--schedule 2", &["several distances"]),
        ("--schedule two-level:2", &["two levels"]),
        ("--trace t.json", &["trace"]),
    ];
    check_pairs(&call, &of_rings(&more, &except), 40);
}

/// Options that choose what `verify` does, and those of its ways.
#[test]
fn two_options_of_verify_or_tune_go_together_or_a_sentence_names_both() {
    let folder = CommandFolder::new();
    for options in ["--faults", "--bits", "--faults --redundancy 1"] {
        folder.succeeds(&format!("verify --seed 3 --count 2 {options}"));
    }
    for (command, words) in [
        ("verify --faults --bits", ["--faults", "--bits"]),
        ("verify --bits --redundancy 1", ["--redundancy", "--faults"]),
        ("verify --faults --device cuda", ["--faults", "--device"]),
        ("verify --faults --wire ipc", ["--wire", "--device"]),
        ("verify --bits --wire host", ["--wire", "--device"]),
        ("verify --device cuda --wire ipc", ["--wire", "processes"]),
        ("tune --show --check", ["--show", "--check"]),
        ("tune --json --check", ["--json", "--check"]),
        ("tune --seconds 1 --check", ["--seconds", "--check"]),
        ("tune --seconds 1 --show", ["--seconds", "--show"]),
    ] {
        folder.refuses(command, &words);
    }
}

#[test]
fn a_prefix_that_shows_nothing_is_refused() {
    let folder = CommandFolder::new();
    for (command, words) in [
        (
            format!("{CALL} --window all,0 --causal --prefix 3"),
            ["--prefix", "--window"],
        ),
        (format!("{CALL} --prefix 3"), ["--prefix", "--window"]),
        (
            "report page.html --tokens 64 --prefix 3".to_string(),
            ["--prefix", "--window"],
        ),
    ] {
        folder.refuses(&command, &words);
    }
}

/// What is left to auto is chosen among what goes with the options that are given.
#[test]
fn auto_leaves_out_what_a_given_option_excludes() {
    let folder = CommandFolder::new();
    for options in [
        "--schedule heads:2 --sharding auto",
        "--schedule heads:2 --explain",
        "--schedule two-level:2 --queries auto",
    ] {
        folder.succeeds(&format!("{CALL} {options}"));
    }
}
