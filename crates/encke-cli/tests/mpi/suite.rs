//! The conformance suite of the transport and random calls, bit for bit against threads and the
//! simulator, at every size; and the commands that measure.

use crate::command::{CommandFolder, text};
use crate::launch::{launch, run, succeeds};
use crate::mpirun::output;

#[test]
fn messages_and_bits_are_right_for_1_to_8_processes() {
    let folder = CommandFolder::new();
    for ranks in 1..=8 {
        let count = if ranks < 5 { 6 } else { 2 };
        let seed = 100 * ranks;
        let said = succeeds(
            &folder,
            ranks,
            &format!("verify --count {count} --seed {seed}"),
        );
        assert!(
            said.contains("the transport passes its conformance suite"),
            "{said}"
        );
        assert!(
            said.contains("the bits of threads and of the simulator"),
            "{said}"
        );
    }
}

#[test]
fn a_profile_has_every_process_and_the_hidden_fraction() {
    let folder = CommandFolder::new();
    let said = succeeds(
        &folder,
        2,
        "profile --tokens 2k --heads 2 --grad --json two.json",
    );
    assert!(said.contains("% hidden"), "{said}");
    let record = std::fs::read(folder.join("two.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    assert_eq!(record["processes"], 2);
    let passes = record["passes"].as_array().unwrap();
    assert_eq!(passes.len(), 2);
    for pass in passes {
        let ranks = pass["ranks"].as_array().unwrap();
        assert_eq!(ranks.len(), 2);
        // Each sends its keys and values once; backward, their gradients follow them home.
        assert!(
            ranks
                .iter()
                .all(|rank| rank["sent_bytes"].as_u64().unwrap() > 0)
        );
    }
    assert_eq!(folder.names(), ["two.json"]);
}

#[test]
fn a_bench_is_one_ring_whose_output_was_checked() {
    let folder = CommandFolder::new();
    let said = succeeds(
        &folder,
        3,
        "bench --tokens 900 --heads 2 --dim 16 --causal --sharding zigzag --grad --repeats 2 \
         --json three.json",
    );
    assert!(said.contains("3 processes"), "{said}");
    assert!(said.contains(": right"), "{said}");
    let record = std::fs::read(folder.join("three.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    let rings = record["rings"].as_array().unwrap();
    assert_eq!(rings.len(), 1);
    // The rows of all ranks together are those of one process.
    assert!(rings[0]["checked"]["rows"].as_u64().unwrap() >= 64);
    assert_eq!(
        rings[0]["passes"][1]["seconds"].as_array().unwrap().len(),
        2
    );
}

/// The slope of the line through points, in logarithms.
fn exponent(points: &[(f64, f64)]) -> f64 {
    let logs: Vec<(f64, f64)> = points.iter().map(|(x, y)| (x.ln(), y.ln())).collect();
    let mean = |of: fn(&(f64, f64)) -> f64| logs.iter().map(of).sum::<f64>() / logs.len() as f64;
    let (x, y) = (mean(|p| p.0), mean(|p| p.1));
    let spread: f64 = logs.iter().map(|p| (p.0 - x).powi(2)).sum();
    logs.iter().map(|p| (p.0 - x) * (p.1 - y)).sum::<f64>() / spread
}

#[test]
fn memory_of_a_process_decreases_with_their_number() {
    let folder = CommandFolder::new();
    let mut held: Vec<(&str, Vec<(f64, f64)>)> = ["own-kv", "travelling-kv", "carry", "resident"]
        .map(|name| (name, Vec::new()))
        .into();
    // One process alone sends nothing and needs no carry, so rings begin with two.
    for ranks in [2, 4, 8] {
        succeeds(
            &folder,
            ranks,
            "profile --tokens 8k --heads 1 --dim 64 --json p.json",
        );
        let record = std::fs::read(folder.join("p.json")).unwrap();
        let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
        let each = record["passes"][0]["ranks"].as_array().unwrap();
        for (name, points) in &mut held {
            let of = |rank: &serde_json::Value| match *name {
                "resident" => rank["resident_growth_bytes"].as_f64().unwrap(),
                name => {
                    let entries = rank["memory"]["ledger"]["entries"].as_array().unwrap();
                    let entries = entries.iter().filter(|entry| entry["component"] == name);
                    entries.map(|entry| entry["bytes"].as_f64().unwrap()).sum()
                }
            };
            points.push((ranks as f64, each.iter().map(of).fold(0.0, f64::max)));
        }
    }
    for (name, points) in held {
        let exponent = exponent(&points);
        println!("{name}: {points:?}, exponent {exponent:.3}");
        // Resident memory includes the kernel's workspace and MPI's own memory: it is only printed.
        assert!(
            name == "resident" || exponent <= -0.95,
            "{name}: {exponent}"
        );
    }
}

/// The number after "checksum" in a report.
fn checksum(report: &str) -> (f64, String) {
    let line = report
        .lines()
        .find(|line| line.contains("checksum"))
        .unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    (words[1].parse().unwrap(), words[3].to_string())
}

#[test]
fn billion_distributes_its_ranks_and_has_the_same_checksum() {
    let folder = CommandFolder::new();
    let arguments = "billion --tokens 40k --ranks 5 --samples 64 --segment 256 --dim 16";
    let (alone, rows) = checksum(&folder.succeeds(arguments));
    let (together, same) = checksum(&succeeds(&folder, 3, arguments));
    assert!((alone - together).abs() < 1e-6 && rows == same);
    assert!(folder.names().is_empty(), "states are removed");
}

#[test]
fn launch_prints_the_command_line_it_runs() {
    let folder = CommandFolder::new();
    let output = output(&mut launch(&folder, "-n 3 verify --count 1 --seed 5"));
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    let line = said.lines().next().unwrap();
    assert!(
        line.contains("-n 3 ") && line.ends_with("encke verify --count 1 --seed 5"),
        "{line}"
    );
    assert!(text(&output.stdout).contains("3 processes"));
}

#[test]
fn other_commands_run_alone() {
    let folder = CommandFolder::new();
    let output = run(&folder, 2, "plan --tokens 1k --heads 1 --dim 8 --ranks 2");
    let said = text(&output.stderr);
    assert_ne!(output.status.code(), Some(0));
    assert_eq!(crate::launch::own_lines(&said).len(), 1, "{said}");
    assert!(said.contains("runs alone"), "{said}");
}
