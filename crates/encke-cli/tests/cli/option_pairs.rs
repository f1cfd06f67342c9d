//! Every pair of options of a plan: it is planned, or refused in one sentence that names both.

use std::sync::Mutex;

use crate::command::{CommandFolder, text};

/// Options that each go with the others' defaults, and words by which a refusal may name them.
const OPTIONS: [(&str, &[&str]); 22] = [
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

#[test]
fn two_options_go_together_or_a_sentence_names_both() {
    let folder = CommandFolder::new();
    let mut pairs = Vec::new();
    for (index, one) in OPTIONS.iter().enumerate() {
        folder.succeeds(&format!("{CALL} {}", one.0));
        let others = OPTIONS[index + 1..].iter();
        pairs.extend(
            others
                .filter(|other| !overlap(one.0, other.0))
                .map(|other| (one, other)),
        );
    }
    assert!(pairs.len() > 150);
    let (pairs, refused) = (Mutex::new(pairs.into_iter()), Mutex::new(0));
    let next = || pairs.lock().expect("no panic").next();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some(((one, words), (other, more))) = next() {
                    let output = folder.encke(&format!("{CALL} {one} {other}"));
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
    assert!(refused.into_inner().expect("no panic") > 10);
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
