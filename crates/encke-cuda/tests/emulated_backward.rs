//! The backward kernels of Hopper on a CPU model of its instructions, against loops in f64.
//!
//! The model is C++ (`emu/`) and includes the kernels' own text, so it needs a C++ compiler but no
//! GPU and no CUDA; without a compiler it says so and passes, because it cannot know. What is
//! checked (gradients, bits, hidden rows) stands in `emu/backward.cpp`.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Storage type, head dimension, queries of a block, stages, dq_stages: one of each kind.
const VARIANTS: [(&str, usize, usize, usize, usize); 3] = [
    ("T_F16", 64, 128, 2, 1),
    ("T_BF16", 128, 64, 2, 1),
    ("T_BF16", 192, 64, 1, 1),
];

fn built(into: &Path, variant: &(&str, usize, usize, usize, usize)) -> Option<PathBuf> {
    let (stored, dim, queries, stages, dq_stages) = variant;
    let program = into.join(format!("backward_{dim}"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("emu/backward.cpp");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let made = Command::new(&compiler)
        .args(["-std=c++17", "-O2", "-w"])
        .arg(format!("-D{stored}=1"))
        .arg(format!("-DHD={dim}"))
        .arg(format!("-DBQ={queries}"))
        .arg(format!("-DSTAGES={stages}"))
        .arg(format!("-DDQ_STAGES={dq_stages}"))
        .arg("-o")
        .args([&program, &source])
        .output();
    match made {
        Ok(made) => {
            let said = String::from_utf8_lossy(&made.stderr);
            assert!(made.status.success(), "{compiler}: {said}");
            Some(program)
        }
        Err(error) => {
            eprintln!("skipped: {compiler} cannot be run: {error}");
            None
        }
    }
}

#[test]
fn the_backward_kernels_do_what_they_should() {
    let folder = tempfile::tempdir().expect("a folder for programs");
    for variant in &VARIANTS {
        let Some(program) = built(folder.path(), variant) else {
            return;
        };
        let ran = Command::new(&program).output().expect("the model runs");
        let said = String::from_utf8_lossy(&ran.stdout);
        let failed: Vec<&str> = said
            .lines()
            .filter(|line| !line.starts_with("ok"))
            .collect();
        let errors = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success(), "{variant:?}: {failed:#?} {errors}");
        assert!(said.lines().count() > 30, "cases are missing: {said}");
    }
}
