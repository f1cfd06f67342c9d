//! Running the command in a folder of its own, and what every refusal has in common.

use std::path::{Path, PathBuf};
use std::process::Output;

use assert_cmd::Command;
use tempfile::TempDir;

/// A folder that is gone after the test.
pub struct Folder(TempDir);

impl Folder {
    pub fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// The names of everything in it, hidden files included.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.path()).unwrap();
        let name = |entry: std::fs::DirEntry| entry.file_name().into_string().unwrap();
        let mut names: Vec<String> = entries.map(|entry| name(entry.unwrap())).collect();
        names.sort();
        names
    }

    /// Runs `encke` in the folder with arguments that are separated by spaces.
    pub fn encke(&self, arguments: &str) -> Output {
        let mut command = Command::cargo_bin("encke").unwrap();
        command.current_dir(self.path());
        // No test depends on whether the machine has a GPU: there is no driver here.
        command.env("ENCKE_LIBCUDA", "no-driver-for-tests.so");
        command.args(arguments.split_whitespace());
        command.output().unwrap()
    }

    /// Runs `encke` and expects success; returns standard output.
    pub fn succeeds(&self, arguments: &str) -> String {
        let output = self.encke(arguments);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "encke {arguments}: {said}");
        text(&output.stdout)
    }

    /// Runs `encke` and expects a refusal: exit code 2, one line that has all of `words`, nothing
    /// on standard output, and no file that was not there before. Returns the line.
    pub fn refuses(&self, arguments: &str, words: &[&str]) -> String {
        let before = self.names();
        let output = self.encke(arguments);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "encke {arguments}: {said}");
        assert!(said.starts_with("encke: "), "encke {arguments}: {said}");
        assert_eq!(said.lines().count(), 1, "encke {arguments}: {said}");
        for word in words {
            assert!(
                said.contains(word),
                "encke {arguments}: no {word:?} in {said}"
            );
        }
        assert!(output.stdout.is_empty(), "encke {arguments}");
        assert_eq!(
            self.names(),
            before,
            "encke {arguments} left something behind"
        );
        said
    }
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}
