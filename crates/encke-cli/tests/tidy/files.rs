//! The files of the repository.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A file of code.
pub struct Source {
    /// Its path from the root of the repository.
    pub path: String,
    pub text: String,
}

/// The root of the repository.
pub fn root() -> PathBuf {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    let root = crates.and_then(Path::parent);
    root.expect("crates lie two folders below the root").into()
}

/// The paths of all files that git tracks or would track, from the root.
pub fn tracked() -> Vec<String> {
    let listed = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .expect("git lists the files of the repository");
    assert!(listed.status.success(), "the tidy test runs in a git clone");
    let listed = String::from_utf8(listed.stdout).expect("paths are UTF-8");
    let paths = listed.lines().filter(|path| root().join(path).is_file());
    paths.map(str::to_string).collect()
}

/// All files of code: Rust, CUDA, C and Python.
pub fn sources() -> Vec<Source> {
    const ENDINGS: [&str; 9] = [
        ".rs", ".cu", ".cuh", ".h", ".c", ".cpp", ".py", ".pyi", ".js",
    ];
    let code = |path: &String| ENDINGS.iter().any(|ending| path.ends_with(ending));
    let read = |path: String| Source {
        text: std::fs::read_to_string(root().join(&path)).expect(&path),
        path,
    };
    tracked().into_iter().filter(code).map(read).collect()
}

/// Where the relative links of a Markdown text lead, without anchors.
pub fn links(text: &str) -> Vec<&str> {
    let mut links = Vec::new();
    let mut code = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            code = !code;
        }
        if code {
            continue;
        }
        for (at, _) in line.match_indices("](") {
            let rest = &line[at + 2..];
            let end = rest.find(')').unwrap_or(rest.len());
            let target = rest[..end].split('#').next().unwrap_or_default();
            if !target.is_empty() && !target.contains("://") && !target.starts_with("mailto:") {
                links.push(target);
            }
        }
    }
    links
}
