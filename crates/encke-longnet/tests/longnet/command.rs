//! Running the command in a folder of its own.

use std::process::{Output, Stdio};
use std::time::Duration;

use assert_cmd::Command;
use tempfile::TempDir;

/// A small model over a short text: a step takes milliseconds.
pub const SMALL: &str = "--tokens 128 --width 16 --heads 4 --layers 2 --kv-heads 2";

/// A folder that is gone after the test.
pub struct Folder(TempDir);

impl Folder {
    pub fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    /// With a text in it, `story.txt`.
    pub fn with_text() -> Folder {
        let folder = Folder::new();
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
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "longnet {arguments}: {said}");
        text(&output.stdout)
    }

    /// Runs and expects a refusal: exit code 2 and one line that has all of `words`.
    pub fn refuses(&self, arguments: &str, words: &[&str]) {
        let output = self.runs(arguments);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "longnet {arguments}: {said}");
        assert!(said.starts_with("longnet: "), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        for word in words {
            assert!(
                said.contains(word),
                "longnet {arguments}: no {word:?} in {said}"
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

/// Starts a training that writes a checkpoint into `kept/` after every step, takes the folder away as
/// soon as there is one, and waits for the end.
pub fn without_its_folder(folder: &Folder, mut training: std::process::Command) -> Output {
    let kept = folder.path().join("kept");
    std::fs::create_dir(&kept).unwrap();
    training.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = training.spawn().unwrap();
    while !kept.join("model.safetensors").exists() {
        assert!(running.try_wait().unwrap().is_none(), "it ended before");
        std::thread::sleep(Duration::from_millis(5));
    }
    std::fs::rename(&kept, folder.path().join("gone")).unwrap();
    running.wait_with_output().unwrap()
}

/// What such a training is told.
pub const WITHOUT_END: &str = "--steps 1000000 --every 1 --checkpoint kept/model.safetensors";

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
