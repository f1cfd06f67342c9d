//! Runs the command in a folder of its own, and checks what every refusal has in common.

use std::path::{Path, PathBuf};
use std::process::Output;

use tempfile::TempDir;

/// A folder in which the command runs; deleted after the test.
pub struct CommandFolder(TempDir);

impl CommandFolder {
    pub fn new() -> CommandFolder {
        CommandFolder(tempfile::tempdir().unwrap())
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// The names of all files in it, hidden ones included.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.path()).unwrap();
        let name = |entry: std::fs::DirEntry| entry.file_name().into_string().unwrap();
        let mut names: Vec<String> = entries.map(|entry| name(entry.unwrap())).collect();
        names.sort();
        names
    }

    /// `encke` in the folder with arguments that are separated by spaces.
    pub fn command(&self, arguments: &str) -> std::process::Command {
        let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin("encke"));
        command.current_dir(self.path());
        // Tests must not depend on a GPU: this driver does not exist.
        command.env("ENCKE_LIBCUDA", "no-driver-for-tests.so");
        command.args(arguments.split_whitespace());
        command
    }

    /// Runs `encke` in the folder with arguments that are separated by spaces.
    pub fn encke(&self, arguments: &str) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Runs `encke` and expects success; returns standard output.
    pub fn succeeds(&self, arguments: &str) -> String {
        let output = self.encke(arguments);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "encke {arguments}: {stderr}");
        text(&output.stdout)
    }

    /// Runs `encke` and expects an error: exit code 2, one line that has all of `words`, no
    /// standard output, and no new file. Returns the line.
    pub fn refuses(&self, arguments: &str, words: &[&str]) -> String {
        let before = self.names();
        let output = self.encke(arguments);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "encke {arguments}: {stderr}");
        assert!(stderr.starts_with("encke: "), "encke {arguments}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "encke {arguments}: {stderr}");
        for word in words {
            assert!(
                stderr.contains(word),
                "encke {arguments}: no {word:?} in {stderr}"
            );
        }
        assert!(output.stdout.is_empty(), "encke {arguments}");
        assert_eq!(self.names(), before, "encke {arguments} left a file behind");
        stderr
    }
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}
