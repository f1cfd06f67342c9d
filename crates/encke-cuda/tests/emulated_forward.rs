//! Hopper's forward kernel on a CPU model of TMA, mbarriers and wgmma (`emu/emu.h`), against loops
//! in f64.
//!
//! Needs a C++ compiler and no GPU. The macros are those of the programs that the crate compiles;
//! `emu/forward.cpp` defines the checks and their jobs.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;

use encke_core::conformance::extent;
use encke_cuda::{Program, covering, programs};

/// The system's C++ compiler.
fn compiler() -> OsString {
    std::env::var_os("CXX").unwrap_or_else(|| "c++".into())
}

/// Causal programs, which contain the others' code paths, and others with a tiling of their own; of
/// these a covering set, and all in long runs.
fn chosen() -> Vec<Program> {
    let mut all = programs();
    all.retain(|(program, _)| program.name == "hopper_forward");
    let has = |program: &Program, option: &str| program.options().iter().any(|x| x == option);
    let full = |program: &Program| has(program, "-DKEYS=176");
    all.retain(|(program, _)| has(program, "-DCAUSAL=1") || full(program));
    let chosen = extent(covering(all.clone()), all).into_iter();
    chosen.map(|(program, _)| program).collect()
}

/// The program's output if it failed.
fn run(program: &Program, file: &Path) -> Option<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let options = program.options();
    let macros = options.iter().filter(|option| option.starts_with("-D"));
    let built = Command::new(compiler())
        .args(["-std=c++17", "-Og", "-w"])
        .args(macros)
        .arg("-I")
        .arg(root.join("src/kernels"))
        .arg("-o")
        .arg(file)
        .arg(root.join("emu/forward.cpp"))
        .output()
        .expect("the compiler was there a moment ago");
    if !built.status.success() {
        return Some(String::from_utf8_lossy(&built.stderr).into_owned());
    }
    let ran = Command::new(file).output().expect("what was just built");
    let output = String::from_utf8_lossy(&ran.stdout).into_owned();
    print!("{output}");
    let failed = !ran.status.success();
    failed.then(|| {
        format!(
            "{options:?}\n{output}{}",
            String::from_utf8_lossy(&ran.stderr)
        )
    })
}

#[test]
fn the_forward_kernel_matches_the_reference_on_the_cpu_model() {
    if Command::new(compiler()).arg("--version").output().is_err() {
        eprintln!("skipped: no C++ compiler ({:?})", compiler());
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let all = chosen();
    println!("{} programs", all.len());
    assert!(all.len() > extent(4, 8), "only {} programs", all.len());
    let left = Mutex::new(all.iter().enumerate().collect::<Vec<_>>());
    let next = || left.lock().expect("no thread panics holding it").pop();
    let failures = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((index, program)) = next() {
                    let file = folder.path().join(format!("forward_{index}"));
                    let failure = run(program, &file);
                    failures.lock().expect("as above").extend(failure);
                }
            });
        }
    });
    let failures = failures.into_inner().expect("as above");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
