//! Keeps the tree tidy: what a reviewer would otherwise have to say again and again.
//!
//! Each test reads the files that git tracks and fails with one line per finding, which ends in
//! what to do. It checks text only; rustfmt and clippy check the rest.

mod files;
mod imports;
mod types;

use std::process::Command;

use files::{Source, root, sources, tracked};

/// Columns of a line of code.
const COLUMNS: usize = 100;
/// Lines of a file of code.
const LINES: usize = 600;
/// Words of ARCHITECTURE.md.
const ARCHITECTURE_WORDS: usize = 2500;
/// Lines of README.md: one screen and the ways in.
const README_LINES: usize = 120;
/// Type names that several crates may define, each with the reason.
const SHARED_TYPE_NAMES: [(&str, &str); 5] = [
    ("Error", "one error enum for each crate that people import"),
    ("Result", "the result type beside it"),
    (
        "Options",
        "the options of one command, in that command's module",
    ),
    (
        "Attention",
        "the same idea in Rust, in candle, in Burn and in Python",
    ),
    (
        "RingDilatedAttention",
        "the same layer in candle and in Burn",
    ),
];
/// Words that hide the subject of a sentence.
const VAGUE_WORDS: [&str; 3] = ["whoever", "nobody", "somebody"];

/// Fails with all findings, and what to do about them.
fn none(findings: Vec<String>, advice: &str) {
    let count = findings.len();
    assert!(
        findings.is_empty(),
        "{count} findings:\n{}\n{advice}",
        findings.join("\n")
    );
}

#[test]
fn type_names_are_unique_in_the_workspace() {
    let mut findings = Vec::new();
    for (name, places) in types::definitions(&sources()) {
        let shared = SHARED_TYPE_NAMES.iter().any(|(shared, _)| *shared == name);
        if places.len() > 1 && !shared {
            findings.push(format!("{name}: {}", places.join(", ")));
        }
    }
    none(
        findings,
        "Rename all but one of each: a type name means one thing in this workspace.",
    );
}

#[test]
fn no_circle_of_imports_has_more_than_two_files() {
    let circles = imports::circles(&sources());
    none(
        circles.iter().map(|circle| circle.join(", ")).collect(),
        "Move what two of the files share into a file that imports neither.",
    );
}

#[test]
fn every_shared_type_name_is_still_shared() {
    let definitions = types::definitions(&sources());
    let once = SHARED_TYPE_NAMES.iter().filter(|(name, _)| {
        let places = definitions.get(*name);
        places.is_none_or(|places| places.len() < 2)
    });
    let findings = once.map(|(name, reason)| format!("{name} ({reason})"));
    none(
        findings.collect(),
        "Remove them from SHARED_TYPE_NAMES: they no longer need an exception.",
    );
}

#[test]
fn lines_have_at_most_100_columns() {
    let mut findings = Vec::new();
    for Source { path, text } in sources() {
        for (number, line) in text.lines().enumerate() {
            let columns = line.chars().count();
            if columns > COLUMNS {
                findings.push(format!("{path}:{}: {columns} columns", number + 1));
            }
        }
    }
    none(findings, "Wrap them at 100 columns.");
}

#[test]
fn files_have_at_most_600_lines() {
    let sizes = sources().into_iter();
    let sizes = sizes.map(|Source { path, text }| (path, text.lines().count()));
    let long = sizes.filter(|(_, lines)| *lines > LINES);
    let findings = long.map(|(path, lines)| format!("{path}: {lines} lines"));
    none(
        findings.collect(),
        "Split them by concern: one file, one idea.",
    );
}

#[test]
fn sources_are_compiled_where_they_lie() {
    let mut findings = Vec::new();
    for Source { path, text } in sources().iter().filter(|s| s.path.ends_with(".rs")) {
        let include = |line: &str| line.trim_start().starts_with("#[path") && line.contains("src/");
        let lines = text.lines().enumerate();
        for (number, _) in lines.filter(|(_, line)| include(line)) {
            findings.push(format!("{path}:{}", number + 1));
        }
    }
    none(
        findings,
        "No #[path] of a source: make the items reachable through the crate (a hidden module).",
    );
}

#[test]
fn comments_name_their_subject() {
    let mut findings = Vec::new();
    for Source { path, text } in sources() {
        if path.starts_with("crates/encke-cli/tests/tidy/") {
            continue;
        }
        for (number, line) in text.lines().enumerate() {
            let words = line.split(|c: char| !c.is_alphabetic());
            let lower = words.map(str::to_lowercase).collect::<Vec<_>>();
            for vague in VAGUE_WORDS {
                if lower.iter().any(|word| word == vague) {
                    findings.push(format!("{path}:{}: {vague}", number + 1));
                }
            }
        }
    }
    none(
        findings,
        "Name the caller, the rank, the thread or the kernel that does it.",
    );
}

#[test]
fn documents_are_short_enough_to_be_read() {
    let read = |name: &str| std::fs::read_to_string(root().join(name)).expect(name);
    let words = read("ARCHITECTURE.md").split_whitespace().count();
    assert!(
        words <= ARCHITECTURE_WORDS,
        "ARCHITECTURE.md has {words} words, at most {ARCHITECTURE_WORDS}: move measurements and \
         what was tried to docs/notes/"
    );
    let lines = read("README.md").lines().count();
    assert!(
        lines <= README_LINES,
        "README.md has {lines} lines, at most {README_LINES}: move details to docs/"
    );
}

#[test]
fn links_between_documents_lead_somewhere() {
    let mut findings = Vec::new();
    for path in tracked().iter().filter(|path| path.ends_with(".md")) {
        let file = root().join(path);
        let text = std::fs::read_to_string(&file).expect(path);
        for target in files::links(&text) {
            let folder = file.parent().expect("a file lies in a folder");
            if !folder.join(target).exists() {
                findings.push(format!("{path}: {target}"));
            }
        }
    }
    none(findings, "Correct the link or write the page.");
}

#[test]
fn the_book_has_every_page() {
    let summary = std::fs::read_to_string(root().join("docs/SUMMARY.md")).expect("a summary");
    let listed = files::links(&summary);
    let mut findings = Vec::new();
    for path in tracked() {
        let page = path
            .strip_prefix("docs/")
            .filter(|page| page.ends_with(".md"));
        let Some(page) = page.filter(|page| *page != "SUMMARY.md") else {
            continue;
        };
        match listed.iter().filter(|listed| **listed == page).count() {
            1 => {}
            times => findings.push(format!("{page}: listed {times} times")),
        }
    }
    none(findings, "List each page of docs/ once in docs/SUMMARY.md.");
}

#[test]
fn versions_agree() {
    let run = Command::new(root().join("scripts/check-release")).output();
    let run = run.expect("scripts/check-release runs");
    assert!(
        run.status.success(),
        "{}",
        String::from_utf8_lossy(&run.stderr)
    );
}

#[test]
fn figures_in_documents_are_those_of_the_records() {
    let script = root().join("bench/tables.py");
    let run = Command::new("python3").arg(script).arg("--check").output();
    let Ok(run) = run else {
        eprintln!("skipped: there is no python3 to run bench/tables.py with");
        return;
    };
    assert!(
        run.status.success(),
        "figures in documents differ from bench/record:\n{}{}\nRun python3 bench/tables.py and \
         commit what it changed.",
        String::from_utf8_lossy(&run.stdout),
        String::from_utf8_lossy(&run.stderr)
    );
}

/// Code that only a GPU can test.
const GPU_CODE: [&str; 5] = [
    "crates/encke-cuda",
    "crates/encke/src/gpu_call.rs",
    "python/src/gpu.rs",
    "python/encke/_gpu.py",
    "python/encke/_gpu_mixing.py",
];

/// Prints, even where a test's output is not shown, how many commits have changed code of the GPU
/// since the record of its suites (`scripts/test-gpu`), and fails if a suite failed there.
#[test]
fn the_suites_of_the_gpu_passed_at_a_known_commit() {
    let path = root().join("bench/record/gpu-suites.json");
    let text = std::fs::read_to_string(&path).expect("the record of the GPU's suites");
    let record: serde_json::Value = serde_json::from_str(&text).expect("a record is JSON");
    let suites = record["suites"].as_array().expect("a list of suites");
    let failed = suites.iter().filter(|suite| suite["passed"] != true);
    none(
        failed.map(|suite| suite["name"].to_string()).collect(),
        "Mend them and run scripts/test-gpu again.",
    );
    assert!(!suites.is_empty(), "the record names no suite");
    let commit = record["commit"].as_str().expect("the commit of a record");
    let log = Command::new("git")
        .current_dir(root())
        .args(["rev-list", "--count", &format!("{commit}..HEAD"), "--"])
        .args(GPU_CODE)
        .output()
        .expect("git runs");
    let count = String::from_utf8_lossy(&log.stdout);
    let count = match log.status.success() {
        true => count.trim(),
        false => "an unknown number of", // a shallow clone
    };
    let line = format!(
        "tidy: {count} commits have changed code of the GPU since its suites ran, at {}\n",
        &commit[..commit.len().min(10)]
    );
    let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
}
