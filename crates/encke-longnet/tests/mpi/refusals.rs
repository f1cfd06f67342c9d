//! What cannot be done is refused once, in one line, by all processes together, and leaves nothing.

use crate::command::{Folder, SMALL, WITHOUT_END, text, without_its_folder};
use crate::launch::run;
use crate::mpirun::{job, lines_of};

fn names(folder: &Folder) -> Vec<String> {
    let entries = std::fs::read_dir(folder.path()).unwrap();
    let name = |entry: std::fs::DirEntry| entry.file_name().into_string().unwrap();
    let mut names: Vec<String> = entries.map(|entry| name(entry.unwrap())).collect();
    names.sort();
    names
}

fn own_lines(stderr: &str) -> Vec<&str> {
    lines_of("longnet", stderr)
}

/// Runs three processes and expects one line that has all of `words`.
fn refused(folder: &Folder, arguments: &str, words: &[&str]) {
    let before = names(folder);
    let output = run(folder, 3, arguments);
    let said = text(&output.stderr);
    assert_ne!(output.status.code(), Some(0), "longnet {arguments}");
    let lines = own_lines(&said);
    assert_eq!(lines.len(), 1, "longnet {arguments}: {said}");
    for word in words {
        assert!(lines[0].contains(word), "no {word:?} in {said}");
    }
    assert_eq!(names(folder), before, "longnet {arguments} left something");
}

#[test]
fn what_cannot_be_done_is_refused_once() {
    let folder = Folder::with_text();
    let train = format!("train story.txt {SMALL} --steps 2");
    refused(
        &folder,
        &format!("{train} --ranks 4"),
        &["--ranks 4", "3 processes"],
    );
    refused(&folder, &format!("{train} --nonsense"), &["--nonsense"]);
    refused(&folder, &format!("{train} --rate -1"), &["--rate"]);
    refused(&folder, "train missing.txt", &["missing.txt"]);
    refused(
        &folder,
        "train story.txt --tokens 2 --width 8",
        &["--tokens 2", "rank 2 of 3", "fewer ranks"],
    );
    // Only one process writes, and all of them hear that it cannot.
    let outputs = ["--checkpoint no/m.safetensors", "--record no/r.json"];
    for output in outputs {
        refused(&folder, &format!("{train} {output}"), &["cannot write no/"]);
    }
    refused(
        &folder,
        &format!("{train} --checkpoint story.txt"),
        &["story.txt is also the text"],
    );
    refused(&folder, "sample model.safetensors", &["runs alone"]);
}

#[test]
fn processes_that_read_different_files_are_told() {
    let folder = Folder::with_text();
    folder.succeeds("text other.txt --bytes 16k --seed 2");
    let longnet = env!("CARGO_BIN_EXE_longnet");
    for (text_read, options, word) in [
        ("other.txt", "--steps 2", "the text"),
        ("story.txt", "--steps 3", "the options"),
    ] {
        let first = format!("train story.txt {SMALL} --steps 2");
        let mut command = job(longnet, folder.path(), 1, &first);
        command.args([":", "-n", "1", longnet, "train", text_read]);
        command.args(SMALL.split(' ').chain(options.split(' ')));
        let output = command.output().unwrap();
        let said = text(&output.stderr);
        assert_ne!(output.status.code(), Some(0), "{said}");
        let lines = own_lines(&said);
        assert_eq!(lines.len(), 1, "{said}");
        assert!(
            lines[0].contains("rank 1") && lines[0].contains(word),
            "{said}"
        );
    }
}

#[test]
fn a_process_that_cannot_go_on_ends_all_of_them_with_its_words() {
    let folder = Folder::with_text();
    let arguments = format!("train story.txt {SMALL} {WITHOUT_END}");
    let longnet = env!("CARGO_BIN_EXE_longnet");
    let training = job(longnet, folder.path(), 3, &arguments);
    let output = without_its_folder(&folder, training);
    let said = text(&output.stderr);
    assert_ne!(output.status.code(), Some(0), "{said}");
    let lines = own_lines(&said);
    assert_eq!(lines.len(), 3, "each says what it knows: {said}");
    for (rank, line) in (0..3).map(|rank| (rank, format!("longnet: rank {rank} of 3: "))) {
        let of = lines.iter().find(|said| said.starts_with(&line));
        let of = of.unwrap_or_else(|| panic!("rank {rank} is silent: {said}"));
        assert!(of.contains("cannot write kept/model"), "{said}");
    }
}
