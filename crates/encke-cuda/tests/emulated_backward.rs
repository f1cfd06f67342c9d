//! The backward kernels of Hopper on a CPU model of its instructions, against loops in f64.
//!
//! The model is C++ (`emu/`) and includes the kernels' own text. It needs a C++ compiler but no GPU
//! and no CUDA; without a compiler the test prints the reason, skips and passes. `emu/backward.cpp`
//! defines the checks (gradients, bits, hidden rows), `emu/backward_tiles.h` those of jobs on a
//! grid.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use encke_core::conformance::extent;

/// Storage type, dimensions of keys and of values, queries of a block, stages, other macros.
type BackwardModel = (
    &'static str,
    [usize; 2],
    usize,
    usize,
    &'static [&'static str],
);

const PLAIN: &[&str] = &[];
const WINDOWED: &[&str] = &["WINDOWED"];
const TRANSFORMED: &[&str] = &["WINDOWED", "SOFTCAP", "SLOPES"];
const WIDE: &[&str] = &["WINDOWED", "SOFTCAP", "WIDE"];

fn build(into: &Path, variant: &BackwardModel) -> Option<PathBuf> {
    let (stored, [dim, values], queries, stages, macros) = variant;
    let program = into.join(format!("backward_{dim}_{values}_{}", macros.concat()));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("emu/backward.cpp");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let built = Command::new(&compiler)
        .args(["-std=c++17", "-O2", "-w"])
        .arg(format!("-D{stored}=1"))
        .arg(format!("-DHD={dim}"))
        .args((dim != values).then(|| format!("-DVD={values}")))
        .arg(format!("-DBQ={queries}"))
        .arg(format!("-DSTAGES={stages}"))
        .arg("-DDQ_STAGES=1")
        .args(macros.iter().map(|name| format!("-D{name}")))
        .arg("-o")
        .args([&program, &source])
        .output();
    match built {
        Ok(built) => {
            let errors = String::from_utf8_lossy(&built.stderr);
            assert!(built.status.success(), "{compiler}: {errors}");
            Some(program)
        }
        Err(error) => {
            eprintln!("skipped: {compiler} cannot be run: {error}");
            None
        }
    }
}

/// Compiles and runs one model; returns what it prints.
fn check(variant: BackwardModel) -> Option<String> {
    let folder = tempfile::tempdir().expect("a folder for programs");
    let program = build(folder.path(), &variant)?;
    let ran = Command::new(&program).output().expect("the model runs");
    let output = String::from_utf8_lossy(&ran.stdout);
    let failed: Vec<&str> = output
        .lines()
        .filter(|line| !line.starts_with("ok") && !line.starts_with("bits"))
        .collect();
    let errors = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{variant:?}: {failed:#?} {errors}");
    let on_grid = variant.4.iter().any(|name| name.starts_with("TILED"));
    let least = if on_grid { 10 } else { 30 };
    assert!(
        output.lines().count() > least,
        "cases are missing: {output}"
    );
    Some(output.into_owned())
}

/// Runs models on two threads.
fn check_all(models: &[BackwardModel]) -> Vec<String> {
    let left = Mutex::new(models.to_vec());
    let outputs = Mutex::new(Vec::new());
    let next = || left.lock().expect("no thread panics holding it").pop();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(model) = next() {
                    let output = check(model);
                    outputs.lock().expect("as above").extend(output);
                }
            });
        }
    });
    outputs.into_inner().expect("as above")
}

/// One of each kind. The first three have both kernels, both types, values of another width, and
/// windows.
const VARIANTS: [BackwardModel; 13] = [
    ("T_F16", [64, 64], 128, 2, PLAIN),
    ("T_F16", [128, 128], 64, 2, WINDOWED),
    ("T_BF16", [192, 128], 64, 2, PLAIN),
    ("T_BF16", [128, 128], 64, 2, PLAIN),
    ("T_BF16", [64, 64], 128, 2, WINDOWED),
    ("T_BF16", [192, 192], 64, 2, WINDOWED),
    ("T_BF16", [256, 256], 64, 1, PLAIN),
    ("T_F16", [192, 128], 64, 2, WINDOWED),
    ("T_F16", [64, 128], 64, 2, PLAIN),
    ("T_BF16", [128, 64], 64, 2, WINDOWED),
    ("T_BF16", [64, 64], 64, 2, TRANSFORMED),
    ("T_F16", [192, 128], 64, 2, TRANSFORMED),
    ("T_BF16", [128, 128], 64, 2, WIDE),
];

/// The same on grids: first two that differ only in whether queries see ranges of keys, then one of
/// wide heads, whose kernel has a text of its own.
const ON_GRIDS: [BackwardModel; 7] = [
    ("T_BF16", [128, 128], 64, 2, &["TILED=2"]),
    ("T_BF16", [128, 128], 64, 2, &["WINDOWED", "TILED=2"]),
    ("T_BF16", [192, 192], 64, 2, &["TILED=2"]),
    ("T_F16", [64, 64], 128, 2, &["TILED=1"]),
    ("T_F16", [64, 64], 128, 2, &["WINDOWED", "TILED=1"]),
    ("T_BF16", [192, 192], 64, 2, &["WINDOWED", "TILED=2"]),
    ("T_F16", [256, 256], 64, 1, &["TILED=2"]),
];

#[test]
fn gradients_match_the_reference_on_the_cpu_model() {
    check_all(&VARIANTS[..extent(3, 13)]);
}

#[test]
fn gradients_on_a_grid_have_the_same_bits_on_every_ring_and_in_every_program() {
    let outputs = check_all(&ON_GRIDS[..extent(3, 7)]);
    let mut hashes: HashMap<&str, &str> = HashMap::new();
    let mut compared = 0;
    let lines = outputs.iter().flat_map(|output| output.lines());
    for line in lines.filter(|line| line.starts_with("bits ")) {
        let (call, hash) = line.rsplit_once(' ').expect("a hash at the end");
        if let Some(other) = hashes.insert(call, hash) {
            assert_eq!(other, hash, "{call}");
            compared += 1;
        }
    }
    assert!(
        outputs.is_empty() || compared > 1,
        "no call ran in two programs"
    );
}
