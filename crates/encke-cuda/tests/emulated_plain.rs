//! The kernels without tensor cores on a CPU model of the GPU, against loops in f64: every type,
//! with and without masks, score transforms, dropout and values of another width.
//!
//! Needs a C++ compiler and no GPU. The kernels' own texts are compiled; `emu/*_test.cpp` define
//! the checks and their jobs.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

/// Head dimensions of keys and of values at most, columns of a thread, and whether jobs are masked.
type PlainVariant = (&'static str, [u32; 3], bool);

const VARIANTS: [PlainVariant; 6] = [
    ("T_F32", [40, 40, 4], false),
    ("T_F64", [24, 24, 4], false),
    ("T_F32", [40, 24, 4], true),
    ("T_F64", [24, 40, 4], true),
    ("T_BF16", [20, 70, 8], true),
    ("T_F16", [66, 20, 8], true),
];

/// The system's C++ compiler.
fn compiler() -> OsString {
    std::env::var_os("CXX").unwrap_or_else(|| "c++".into())
}

fn run(test: &str, cases: u32) {
    if Command::new(compiler()).arg("--version").output().is_err() {
        eprintln!("skipped: no C++ compiler ({:?})", compiler());
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("emu").join(test);
    for (index, (dtype, [keys, values, columns], masked)) in VARIANTS.into_iter().enumerate() {
        let program = folder.path().join(format!("variant_{index}"));
        let built = Command::new(compiler())
            .args(["-std=c++17", "-O1", "-w", "-DPLAIN"])
            .arg(format!("-D{dtype}"))
            .args([format!("-DHD={keys}"), format!("-DVD={values}")])
            .arg(format!("-DCOLUMNS={columns}"))
            .arg(format!("-DMASKED={}", u32::from(masked)))
            .arg("-o")
            .args([&program, &source])
            .output()
            .expect("the compiler was there a moment ago");
        let errors = String::from_utf8_lossy(&built.stderr);
        assert!(built.status.success(), "{errors}");
        let arguments = [(index + 1).to_string(), cases.to_string()];
        let ran = Command::new(program).args(arguments).output();
        let ran = ran.expect("what was just built can be run");
        let output = String::from_utf8_lossy(&ran.stdout);
        print!("{output}");
        let errors = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success(), "{output}{errors}");
    }
}

#[test]
fn forward_matches_the_reference_on_the_cpu_model() {
    run("forward_test.cpp", 6);
}

#[test]
fn gradients_match_the_reference_on_the_cpu_model() {
    run("backward_test.cpp", 5);
}
