//! Processes give the bits of threads, and a run can be resumed with another number of processes.

use crate::command::{LongnetFolder, SMALL};
use crate::launch::succeeds;

/// The largest relative difference of two curves.
fn apart(some: &[f64], others: &[f64]) -> f64 {
    assert_eq!(some.len(), others.len());
    let pairs = some.iter().zip(others);
    pairs.map(|(a, b)| (a - b).abs() / b).fold(0.0, f64::max)
}

#[test]
fn processes_give_the_bits_of_threads_and_the_losses_of_one_rank() {
    let folder = LongnetFolder::with_text();
    let train = format!("train story.txt {SMALL} --steps 60");
    folder.succeeds(&format!("{train} --record alone.json"));
    let alone = folder.losses("alone.json");
    assert!(alone[59] < alone[0] - 1.0, "it learns: {alone:?}");
    for ranks in [2, 4] {
        folder.succeeds(&format!("{train} --ranks {ranks} --record threads.json"));
        let mut runs = Vec::new();
        for _ in 0..2 {
            let (output_text, noted) =
                succeeds(&folder, ranks, &format!("{train} --record run.json"));
            assert_eq!(
                output_text.lines().count(),
                1,
                "only the root prints: {output_text}"
            );
            assert!(
                output_text.contains(&format!("{ranks} processes")),
                "{output_text}"
            );
            for rank in 0..ranks {
                let line = format!("memory   rank {rank} held");
                assert_eq!(noted.matches(&line).count(), 1, "{noted}");
            }
            runs.push(folder.losses("run.json"));
        }
        assert_eq!(runs[0], runs[1], "the same bits every time");
        assert_eq!(
            runs[0],
            folder.losses("threads.json"),
            "and those of threads"
        );
        let apart = apart(&runs[0], &alone);
        assert!(apart < 1e-4, "{ranks} processes are {apart:e} off");
        let record: serde_json::Value = serde_json::from_str(&folder.read("run.json")).unwrap();
        let record = &record["training"];
        assert_eq!(record["processes"], true);
        assert_eq!(record["ranks"], ranks);
        assert!(record["rank_bytes"].as_u64() > Some(0));
    }
}

#[test]
fn a_run_resumes_with_another_number_of_processes() {
    let folder = LongnetFolder::with_text();
    let train = format!("train story.txt {SMALL} --steps 24 --checkpoint model.safetensors");
    let file = |name: &str| folder.path().join(name);
    succeeds(&folder, 2, &format!("{train} --record whole.json"));
    let model = std::fs::read(file("model.safetensors")).unwrap();
    let whole = folder.losses("whole.json");

    // Two processes, interrupted: the bits of an uninterrupted run, also of its checkpoint.
    succeeds(&folder, 2, &format!("{train} --until 10"));
    std::fs::copy(file("model.safetensors"), file("half.safetensors")).unwrap();
    succeeds(
        &folder,
        2,
        &format!("{train} --resume --record resumed.json"),
    );
    assert_eq!(folder.losses("resumed.json"), whole);
    assert!(std::fs::read(file("model.safetensors")).unwrap() == model);

    // Resumed with three processes, with two threads, and with one rank.
    for ranks in [3, 2, 1] {
        std::fs::copy(file("half.safetensors"), file("model.safetensors")).unwrap();
        let on = format!("{train} --resume --record moved.json");
        match ranks {
            3 => drop(succeeds(&folder, 3, &on)),
            ranks => drop(folder.succeeds(&format!("{on} --ranks {ranks}"))),
        }
        let moved = folder.losses("moved.json");
        assert_eq!(moved[..10], whole[..10]);
        let apart = apart(&moved, &whole);
        assert!(apart < 1e-4, "{ranks} ranks went {apart:e} off");
    }

    // A run of one process is resumed by two.
    folder.succeeds(&format!("{train} --until 10"));
    succeeds(
        &folder,
        2,
        &format!("{train} --resume --record joined.json"),
    );
    assert!(apart(&folder.losses("joined.json"), &whole) < 1e-4);
}
