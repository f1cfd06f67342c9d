//! Hopper's forward kernel on a CPU model of TMA, mbarriers and wgmma (`emu/emu.h`), against loops
//! in f64.
//!
//! Needs a C++ compiler and no GPU. The macros are those of the programs that the crate compiles;
//! `emu/forward.cpp` defines the checks and their jobs, `emu/forward_tiles.h` those of jobs on a
//! grid.

use std::collections::HashMap;
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

fn has(program: &Program, option: &str) -> bool {
    program.options().iter().any(|own| own.starts_with(option))
}

/// Causal programs, which contain the others' code paths, and others with a tiling of their own; of
/// these a covering set, and all in long runs.
fn chosen() -> Vec<Program> {
    let mut all = programs();
    all.retain(|(program, _)| program.name == "hopper_forward" && !has(program, "-DTILED"));
    let full = |program: &Program| has(program, "-DKEYS=176");
    all.retain(|(program, _)| has(program, "-DCAUSAL=1") || full(program));
    let chosen = extent(covering(all.clone()), all).into_iter();
    chosen.map(|(program, _)| program).collect()
}

/// Programs for jobs on a grid whose tiles have one or two blocks: some, and all in long runs.
fn on_a_grid() -> Vec<Program> {
    let mut all = programs();
    let small = |program: &Program| has(program, "-DTILED=1") || has(program, "-DTILED=2");
    all.retain(|(program, _)| program.name == "hopper_forward" && small(program));
    let all: Vec<Program> = all.into_iter().map(|(program, _)| program).collect();
    let narrow = all.iter().filter(|program| has(program, "-DHD=64"));
    let some = narrow
        .filter(|program| has(program, "-DLOAD_CARRY=1"))
        .cloned();
    let wide = all.iter().filter(|program| has(program, "-DHD=128"));
    let three = all.iter().filter(|program| has(program, "-DCONSUMERS=3"));
    let some = some.chain(wide.take(1).chain(three).cloned()).collect();
    extent(some, all)
}

/// The program's output, or why it failed.
fn run(program: &Program, file: &Path) -> Result<String, String> {
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
        return Err(String::from_utf8_lossy(&built.stderr).into_owned());
    }
    let ran = Command::new(file).output().expect("what was just built");
    let output = String::from_utf8_lossy(&ran.stdout).into_owned();
    print!("{output}");
    if ran.status.success() {
        return Ok(output);
    }
    let errors = String::from_utf8_lossy(&ran.stderr);
    Err(format!("{options:?}\n{output}{errors}"))
}

/// The outputs of programs, on two threads; none without a C++ compiler.
fn run_all(all: &[Program]) -> Vec<String> {
    if Command::new(compiler()).arg("--version").output().is_err() {
        eprintln!("skipped: no C++ compiler ({:?})", compiler());
        return Vec::new();
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    println!("{} programs", all.len());
    let left = Mutex::new(all.iter().enumerate().collect::<Vec<_>>());
    let next = || left.lock().expect("no thread panics holding it").pop();
    let ended = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((index, program)) = next() {
                    let file = folder.path().join(format!("forward_{index}"));
                    let output = run(program, &file);
                    ended.lock().expect("as above").push(output);
                }
            });
        }
    });
    let ended = ended.into_inner().expect("as above").into_iter();
    let (outputs, failures): (Vec<_>, Vec<_>) = ended.partition(Result::is_ok);
    let failures: Vec<String> = failures.into_iter().filter_map(Result::err).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    outputs.into_iter().flatten().collect()
}

#[test]
fn the_forward_kernel_matches_the_reference_on_the_cpu_model() {
    let all = chosen();
    assert!(all.len() > extent(4, 8), "only {} programs", all.len());
    run_all(&all);
}

#[test]
fn jobs_on_a_grid_have_the_same_bits_on_every_ring_and_in_every_program() {
    let all = on_a_grid();
    assert!(all.len() > extent(4, 20), "only {} programs", all.len());
    let outputs = run_all(&all);
    let mut hashes: HashMap<String, (String, usize)> = HashMap::new();
    let lines = outputs.iter().flat_map(|output| output.lines());
    for line in lines.filter(|line| line.starts_with("bits ")) {
        let (call, hash) = line.rsplit_once(' ').expect("a hash at the end");
        let (first, count) = hashes
            .entry(call.into())
            .or_insert_with(|| (hash.into(), 0));
        assert_eq!(first, hash, "{call}");
        *count += 1;
    }
    let compared = hashes.values().any(|(_, count)| *count > 1);
    assert!(
        outputs.is_empty() || compared,
        "no call ran in two programs: {hashes:?}"
    );
}
