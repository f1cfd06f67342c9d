//! Interrupted and resumed runs, sampling, and refusals.

use std::process::Command;

use crate::command::{ENDLESS, LongnetFolder, SMALL, remove_folder_while_training, text};

#[test]
fn a_resumed_run_equals_an_uninterrupted_one() {
    let folder = LongnetFolder::with_text();
    let train = |rest: &str| folder.succeeds(&format!("train story.txt {SMALL} --steps 24 {rest}"));
    train("--record whole.json");
    train("--checkpoint half.safetensors --until 10");
    std::fs::copy(
        folder.path().join("half.safetensors"),
        folder.path().join("other.safetensors"),
    )
    .unwrap();
    train("--checkpoint half.safetensors --resume --record resumed.json");
    assert_eq!(folder.losses("resumed.json"), folder.losses("whole.json"));

    // A run can be resumed on another ring.
    train("--checkpoint other.safetensors --resume --ranks 3 --record moved.json");
    let pairs = folder
        .losses("moved.json")
        .into_iter()
        .zip(folder.losses("whole.json"));
    for (moved, whole) in pairs {
        assert!((moved - whole).abs() / whole < 1e-4);
    }
}

#[test]
fn samples_depend_only_on_model_prompt_and_seed() {
    let folder = LongnetFolder::with_text();
    folder.succeeds(&format!(
        "train story.txt {SMALL} --steps 60 --checkpoint model.safetensors"
    ));
    let write = |rest: &str| {
        folder.succeeds(&format!(
            "sample model.safetensors --prompt Aldo --bytes 40 {rest}"
        ))
    };
    let first = write("");
    assert!(first.starts_with("Aldo"));
    assert_eq!(first, write(""));
    assert_ne!(first, write("--seed 2"));
    assert_eq!(write("--temperature 0"), write("--temperature 0 --seed 3"));
}

#[test]
fn invalid_commands_are_refused_in_one_line() {
    let folder = LongnetFolder::with_text();
    std::fs::write(folder.path().join("short.txt"), "too short").unwrap();
    folder.refuses("train missing.txt", &["missing.txt"]);
    folder.refuses(
        "train short.txt --tokens 100",
        &["9 bytes", "101", "longnet text"],
    );
    folder.refuses("train story.txt --tokens 0", &["--tokens is 0"]);
    folder.refuses(
        "train story.txt --tokens 128 --width 10 --heads 4",
        &["--width 10", "--heads 4"],
    );
    folder.refuses(
        "train story.txt --tokens 128 --segment-lengths 16,128 --dilation-rates 1",
        &["2 segment lengths but 1 dilation rates"],
    );
    folder.refuses(
        "train story.txt --tokens 2 --width 8 --ranks 3",
        &["--tokens 2", "rank 2 of 3", "fewer ranks"],
    );
    folder.refuses("train story.txt --tokens 128 --ranks 0", &["--ranks is 0"]);
    folder.refuses(
        "train story.txt --tokens 128 --checkpoint story.txt",
        &["also the text"],
    );
    folder.refuses(
        "train story.txt --tokens 128 --checkpoint no/m.safetensors",
        &["no/m"],
    );
    folder.refuses("train story.txt --tokens 128 --rate -1", &["--rate"]);
    folder.refuses("train story.txt --resume", &["--checkpoint"]);
    folder.refuses(
        "train story.txt --nonsense",
        &["--nonsense", "longnet train --help"],
    );
    folder.refuses("sample story.txt", &["story.txt is not a checkpoint"]);
    folder.refuses("report page.html story.txt", &["story.txt is not a record"]);
    folder.refuses("retrieval --tokens 33", &["--tokens 33", "64"]);
    folder.refuses("retrieval --dilation 64", &["--dilation 64", "192"]);

    let train = format!("train story.txt {SMALL} --steps 2 --checkpoint model.safetensors");
    folder.succeeds(&train);
    folder.refuses(&format!("{train} --resume --seed 2"), &["other settings"]);
}

#[test]
fn a_failing_rank_ends_the_run_with_its_error() {
    let folder = LongnetFolder::with_text();
    let mut training = Command::new(env!("CARGO_BIN_EXE_longnet"));
    let arguments = format!("train story.txt {SMALL} {ENDLESS} --ranks 3");
    training
        .args(arguments.split(' '))
        .current_dir(folder.path());
    let output = remove_folder_while_training(&folder, training);
    let output_text = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{output_text}");
    assert_eq!(output_text.lines().count(), 1, "{output_text}");
    assert!(
        output_text.starts_with("longnet: cannot write kept/model"),
        "{output_text}"
    );
}

#[test]
fn every_command_has_examples_in_its_help() {
    let folder = LongnetFolder::new();
    for command in ["", "text", "train", "sample", "retrieval", "report"] {
        let output_text = folder.succeeds(&format!("{command} --help"));
        assert!(
            output_text.contains("Examples:\n  longnet "),
            "{command}: {output_text}"
        );
    }
}
