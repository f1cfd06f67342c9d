//! The losses do not depend on the ring.

use encke_core::conformance::extent;

use crate::command::{LongnetFolder, SMALL};

#[test]
fn after_many_steps_rings_of_2_and_4_have_the_loss_of_1_and_runs_repeat_bitwise() {
    let folder = LongnetFolder::with_text();
    let (steps, learned) = extent((60, 4.0), (300, 2.2));
    let last = steps - 1;
    for (name, ranks) in [("1", 1), ("2", 2), ("again", 2), ("4", 4)] {
        folder.succeeds(&format!(
            "train story.txt {SMALL} --steps {steps} --ranks {ranks} --record {name}.json"
        ));
    }
    let one = folder.losses("1.json");
    assert_eq!(one.len(), steps);
    assert!(
        one[0] > 5.0 && one[last] < learned,
        "it learns: {} to {}",
        one[0],
        one[last]
    );
    for name in ["2.json", "4.json"] {
        let ring = folder.losses(name);
        let apart = (ring[last] - one[last]).abs() / one[last];
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

/// A model whose segments can be cut in four between tiles of 32 rows.
const CUT: &str = "--tokens 512 --width 16 --heads 4 --layers 2 --kv-heads 2 \
                   --segment-lengths 128,512 --dilation-rates 1,2 --bits invariant:32";

#[test]
fn with_invariant_bits_rings_have_the_same_losses_also_over_a_resize() {
    let folder = LongnetFolder::with_text();
    let train = |rest: &str| folder.succeeds(&format!("train story.txt {CUT} --steps 10 {rest}"));
    for ranks in [1, 2, 4] {
        train(&format!("--ranks {ranks} --record {ranks}.json"));
    }
    train("--ranks 4 --checkpoint half.safetensors --until 5");
    train("--ranks 2 --checkpoint half.safetensors --resume --record resized.json");
    let one = folder.losses("1.json");
    assert!(one[9] < one[0], "it learns");
    for name in ["2.json", "4.json", "resized.json"] {
        assert_eq!(folder.losses(name), one, "{name}");
    }
    let planned = CUT.replace("--bits invariant:32", "");
    folder.succeeds(&format!(
        "train story.txt {planned} --steps 10 --ranks 2 --record planned.json"
    ));
    assert_ne!(
        folder.losses("planned.json"),
        one,
        "planned bits are others"
    );
}

#[test]
fn more_ranks_than_a_grid_has_cuts_are_refused() {
    let folder = LongnetFolder::with_text();
    folder.refuses(
        "train story.txt --tokens 512 --segment-lengths 100,500 --dilation-rates 1,1 \
         --ranks 4 --bits invariant:32",
        // Segments of 100 and 500 rows and one of 512 have hardly a cut in common.
        &["--tokens 512", "without a row", "use fewer ranks"],
    );
    folder.refuses(
        "train story.txt --tokens 128 --bits same",
        &["same", "invariant:TILE"],
    );
}
