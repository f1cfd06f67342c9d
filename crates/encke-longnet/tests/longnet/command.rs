//! Runs the command in a temporary folder.

use std::process::{Output, Stdio};
use std::time::Duration;

use assert_cmd::Command;
use tempfile::TempDir;

/// A small model over a short text: a step takes milliseconds.
pub const SMALL: &str = "--tokens 128 --width 16 --heads 4 --layers 2 --kv-heads 2";

/// A temporary folder.
pub struct LongnetFolder(TempDir);

impl LongnetFolder {
    pub fn new() -> LongnetFolder {
        LongnetFolder(tempfile::tempdir().unwrap())
    }

    /// A folder with a text, `story.txt`.
    pub fn with_text() -> LongnetFolder {
        let folder = LongnetFolder::new();
        folder.succeeds("text story.txt --bytes 16k");
        folder
    }

    pub fn path(&self) -> &std::path::Path {
        self.0.path()
    }

    pub fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path().join(name)).unwrap()
    }

    pub fn runs(&self, arguments: &str) -> Output {
        let mut command = Command::cargo_bin("longnet").unwrap();
        command.current_dir(self.path());
        command.args(arguments.split_whitespace());
        command.output().unwrap()
    }

    /// Runs and expects success; returns standard output.
    pub fn succeeds(&self, arguments: &str) -> String {
        let output = self.runs(arguments);
        let output_text = text(&output.stderr);
        assert_eq!(
            output.status.code(),
            Some(0),
            "longnet {arguments}: {output_text}"
        );
        text(&output.stdout)
    }

    /// Runs and expects a refusal: exit code 2 and one line that contains all of `parts`.
    pub fn refuses(&self, arguments: &str, parts: &[&str]) {
        let output = self.runs(arguments);
        let output_text = text(&output.stderr);
        assert_eq!(
            output.status.code(),
            Some(2),
            "longnet {arguments}: {output_text}"
        );
        assert!(output_text.starts_with("longnet: "), "{output_text}");
        assert_eq!(output_text.lines().count(), 1, "{output_text}");
        for part in parts {
            assert!(
                output_text.contains(part),
                "longnet {arguments}: no {part:?} in {output_text}"
            );
        }
    }

    /// The losses of a record.
    pub fn losses(&self, record: &str) -> Vec<f64> {
        let record: serde_json::Value = serde_json::from_str(&self.read(record)).unwrap();
        let losses = record["training"]["losses"].as_array().unwrap();
        losses.iter().map(|loss| loss.as_f64().unwrap()).collect()
    }
}

/// Starts a training that writes a checkpoint into `kept/` after every step, renames the folder as
/// soon as a checkpoint exists, and waits for the end.
pub fn remove_folder_while_training(
    folder: &LongnetFolder,
    mut training: std::process::Command,
) -> Output {
    let kept = folder.path().join("kept");
    std::fs::create_dir(&kept).unwrap();
    training.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = training.spawn().unwrap();
    while !kept.join("model.safetensors").exists() {
        assert!(
            running.try_wait().unwrap().is_none(),
            "the training ended too early"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    std::fs::rename(&kept, folder.path().join("gone")).unwrap();
    running.wait_with_output().unwrap()
}

/// Options of such a training.
pub const ENDLESS: &str = "--steps 1000000 --every 1 --checkpoint kept/model.safetensors";

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
