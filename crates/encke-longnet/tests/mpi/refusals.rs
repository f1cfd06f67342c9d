//! Invalid commands are refused once, in one line, by all processes together, and leave no files.

use crate::command::{ENDLESS, LongnetFolder, SMALL, remove_folder_while_training, text};
use crate::launch::run;
use crate::mpirun::{job, lines_of, output};

fn names(folder: &LongnetFolder) -> Vec<String> {
    let entries = std::fs::read_dir(folder.path()).unwrap();
    let name = |entry: std::fs::DirEntry| entry.file_name().into_string().unwrap();
    let mut names: Vec<String> = entries.map(|entry| name(entry.unwrap())).collect();
    names.sort();
    names
}

fn own_lines(output_text: &str) -> Vec<&str> {
    lines_of("longnet", output_text)
}

/// Runs three processes and expects one line that contains all of `parts`.
fn refused(folder: &LongnetFolder, arguments: &str, parts: &[&str]) {
    let before = names(folder);
    let output = run(folder, 3, arguments);
    let output_text = text(&output.stderr);
    assert_ne!(output.status.code(), Some(0), "longnet {arguments}");
    let lines = own_lines(&output_text);
    assert_eq!(lines.len(), 1, "longnet {arguments}: {output_text}");
    for part in parts {
        assert!(lines[0].contains(part), "no {part:?} in {output_text}");
    }
    assert_eq!(names(folder), before, "longnet {arguments} left something");
}

#[test]
fn invalid_commands_are_refused_once() {
    let folder = LongnetFolder::with_text();
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
    // Only the root writes; its error ends all processes.
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
fn processes_with_different_inputs_are_refused() {
    let folder = LongnetFolder::with_text();
    std::fs::create_dir(folder.path().join("other")).unwrap();
    folder.succeeds("text other/story.txt --bytes 16k --seed 2");
    let longnet = env!("CARGO_BIN_EXE_longnet");
    for (folder_read, options, word) in [
        ("other", "--steps 2", "the text"),
        (".", "--steps 3", "--steps 3"),
    ] {
        let first = format!("train story.txt {SMALL} --steps 2");
        let mut command = job(longnet, folder.path(), 1, &first);
        command.args([":", "-n", "1", "-wdir"]);
        command.arg(folder.path().join(folder_read));
        command.args([longnet, "train", "story.txt"]);
        command.args(SMALL.split(' ').chain(options.split(' ')));
        let output = output(&mut command);
        let output_text = text(&output.stderr);
        assert_ne!(output.status.code(), Some(0), "{output_text}");
        let lines = own_lines(&output_text);
        assert_eq!(lines.len(), 1, "{output_text}");
        assert!(
            lines[0].contains("rank 1") && lines[0].contains(word),
            "{output_text}"
        );
    }
}

#[test]
fn a_failing_process_ends_all_of_them_with_its_error() {
    let folder = LongnetFolder::with_text();
    let arguments = format!("train story.txt {SMALL} {ENDLESS}");
    let longnet = env!("CARGO_BIN_EXE_longnet");
    let training = job(longnet, folder.path(), 3, &arguments);
    let output = remove_folder_while_training(&folder, training);
    let output_text = text(&output.stderr);
    assert_ne!(output.status.code(), Some(0), "{output_text}");
    let lines = own_lines(&output_text);
    assert_eq!(lines.len(), 3, "one line per process: {output_text}");
    for (rank, line) in (0..3).map(|rank| (rank, format!("longnet: rank {rank} of 3: "))) {
        let of = lines
            .iter()
            .find(|output_text| output_text.starts_with(&line));
        let of = of.unwrap_or_else(|| panic!("no line from rank {rank}: {output_text}"));
        assert!(of.contains("cannot write kept/model"), "{output_text}");
    }
}
