//! The losses do not depend on the ring.

use crate::command::{LongnetFolder, SMALL};

#[test]
fn after_300_steps_rings_of_2_and_4_have_the_loss_of_1_and_runs_repeat_bitwise() {
    let folder = LongnetFolder::with_text();
    for (name, ranks) in [("1", 1), ("2", 2), ("again", 2), ("4", 4)] {
        folder.succeeds(&format!(
            "train story.txt {SMALL} --steps 300 --ranks {ranks} --record {name}.json"
        ));
    }
    let one = folder.losses("1.json");
    assert_eq!(one.len(), 300);
    assert!(
        one[0] > 5.0 && one[299] < 2.2,
        "it learns: {} to {}",
        one[0],
        one[299]
    );
    for name in ["2.json", "4.json"] {
        let ring = folder.losses(name);
        let apart = (ring[299] - one[299]).abs() / one[299];
        assert!(apart < 1e-4, "{name} is {apart:e} off");
        assert_ne!(
            ring, one,
            "a ring rounds differently; equal bits mean that there was no ring"
        );
    }
    assert_eq!(folder.losses("2.json"), folder.losses("again.json"));
}

#[test]
fn dense_attention_gives_other_losses() {
    let folder = LongnetFolder::with_text();
    folder.succeeds(&format!(
        "train story.txt {SMALL} --steps 5 --record dilated.json"
    ));
    folder.succeeds(&format!(
        "train story.txt {SMALL} --steps 5 --dense --record dense.json"
    ));
    let (dilated, dense) = (folder.losses("dilated.json"), folder.losses("dense.json"));
    assert_ne!(dilated, dense);
}
