//! The backward kernels of Hopper on a CPU model of its instructions, against loops in f64.
//!
//! The model is C++ (`emu/`) and includes the kernels' own text. It needs a C++ compiler but no GPU
//! and no CUDA; without a compiler the test prints the reason, skips and passes. `emu/backward.cpp`
//! defines the checks (gradients, bits, hidden rows).

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use encke_core::conformance::extent;

/// Storage type, dimensions of keys and of values, queries of a block, stages, macros that are 1.
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
        .args(macros.iter().map(|name| format!("-D{name}=1")))
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

/// Compiles and runs one model.
fn check(variant: BackwardModel) {
    let folder = tempfile::tempdir().expect("a folder for programs");
    let Some(program) = build(folder.path(), &variant) else {
        return;
    };
    let ran = Command::new(&program).output().expect("the model runs");
    let output = String::from_utf8_lossy(&ran.stdout);
    let failed: Vec<&str> = output
        .lines()
        .filter(|line| !line.starts_with("ok"))
        .collect();
    let errors = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{variant:?}: {failed:#?} {errors}");
    assert!(output.lines().count() > 30, "cases are missing: {output}");
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

#[test]
fn gradients_match_the_reference_on_the_cpu_model() {
    let left = Mutex::new(VARIANTS[..extent(3, 13)].to_vec());
    let next = || left.lock().expect("no thread panics holding it").pop();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| std::iter::from_fn(next).for_each(check));
        }
    });
}
