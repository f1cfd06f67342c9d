//! A loss does not depend on the ring when the ring is processes either, nor does a run that goes on.

use crate::command::{Folder, SMALL};
use crate::launch::succeeds;

/// The largest relative difference of two curves.
fn apart(some: &[f64], others: &[f64]) -> f64 {
    assert_eq!(some.len(), others.len());
    let pairs = some.iter().zip(others);
    pairs.map(|(a, b)| (a - b).abs() / b).fold(0.0, f64::max)
}

#[test]
fn processes_have_the_losses_of_one_and_every_run_its_own_bits() {
    let folder = Folder::with_text();
    let train = format!("train story.txt {SMALL} --steps 60");
    folder.succeeds(&format!("{train} --record alone.json"));
    let alone = folder.losses("alone.json");
    assert!(alone[59] < alone[0] - 1.0, "it learns: {alone:?}");
    for ranks in [2, 4] {
        folder.succeeds(&format!("{train} --ranks {ranks} --record threads.json"));
        let mut runs = Vec::new();
        for _ in 0..2 {
            let (said, noted) = succeeds(&folder, ranks, &format!("{train} --record run.json"));
            assert_eq!(said.lines().count(), 1, "one of them speaks: {said}");
            assert!(said.contains(&format!("{ranks} processes")), "{said}");
            for rank in 0..ranks {
                let line = format!("memory   rank {rank} held");
                assert_eq!(noted.matches(&line).count(), 1, "{noted}");
            }
            runs.push(folder.losses("run.json"));
        }
        assert_eq!(runs[0], runs[1], "the same bits every time");
        for (name, other) in [
            ("one rank", &alone),
            ("threads", &folder.losses("threads.json")),
        ] {
            let apart = apart(&runs[0], other);
            assert!(apart < 1e-4, "{ranks} processes are {apart:e} off {name}");
        }
        let record: serde_json::Value = serde_json::from_str(&folder.read("run.json")).unwrap();
        let record = &record["training"];
        assert_eq!(record["processes"], true);
        assert_eq!(record["ranks"], ranks);
        assert!(record["rank_bytes"].as_u64() > Some(0));
    }
}

#[test]
fn a_run_goes_on_with_another_number_of_processes() {
    let folder = Folder::with_text();
    let train = format!("train story.txt {SMALL} --steps 24 --checkpoint model.safetensors");
    let file = |name: &str| folder.path().join(name);
    succeeds(&folder, 2, &format!("{train} --record whole.json"));
    let model = std::fs::read(file("model.safetensors")).unwrap();
    let whole = folder.losses("whole.json");

    // Two processes, interrupted: the bits of a run that was not, the checkpoint's included.
    succeeds(&folder, 2, &format!("{train} --until 10"));
    std::fs::copy(file("model.safetensors"), file("half.safetensors")).unwrap();
    succeeds(
        &folder,
        2,
        &format!("{train} --resume --record resumed.json"),
    );
    assert_eq!(folder.losses("resumed.json"), whole);
    assert!(std::fs::read(file("model.safetensors")).unwrap() == model);

    // On from there with three, and with none but this one.
    for ranks in [3, 1] {
        std::fs::copy(file("half.safetensors"), file("model.safetensors")).unwrap();
        let on = format!("{train} --resume --record moved.json");
        match ranks {
            1 => drop(folder.succeeds(&on)),
            ranks => drop(succeeds(&folder, ranks, &on)),
        }
        let moved = folder.losses("moved.json");
        assert_eq!(moved[..10], whole[..10]);
        let apart = apart(&moved, &whole);
        assert!(apart < 1e-4, "{ranks} processes went {apart:e} off");
    }

    // And what one process began, two go on with.
    folder.succeeds(&format!("{train} --until 10"));
    succeeds(
        &folder,
        2,
        &format!("{train} --resume --record joined.json"),
    );
    assert!(apart(&folder.losses("joined.json"), &whole) < 1e-4);
}
