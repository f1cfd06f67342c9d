//! The row generator and the checksum kernel on the CPU model of the GPU, against the host's, bit
//! for bit.
//!
//! Needs a C++ compiler and no GPU. The kernels' own texts are compiled.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use encke_core::job::Block;
use encke_core::plan::program::Role;
use encke_core::sharding::Run;
use encke_core::{DType, Data, host};
use encke_ring::out_of_core::{Checksum, Generator, RowRange, TensorSink, TensorSource};

const SEED: u64 = 0xdead_beef_1234;

/// The system's C++ compiler.
fn compiler() -> OsString {
    std::env::var_os("CXX").unwrap_or_else(|| "c++".into())
}

fn build(folder: &Path, dtype: DType, dim: usize) -> PathBuf {
    let name = match dtype {
        DType::F64 => "T_F64",
        DType::F32 => "T_F32",
        DType::Bf16 => "T_BF16",
        DType::F16 => "T_F16",
    };
    let program = folder.join(format!("rows-{name}-{dim}"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("emu/rows.cpp");
    let built = Command::new(compiler())
        .args(["-std=c++17", "-O1", "-w", "-ffp-contract=off"])
        .args([format!("-D{name}"), format!("-DDIM={dim}")])
        .arg("-o")
        .args([&program, &source])
        .output()
        .expect("the compiler was there a moment ago");
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );
    program
}

/// Rows as the generator kernel makes them, and their sums from the checksum kernel.
fn emulated(
    program: &Path,
    folder: &Path,
    range: &RowRange<'_>,
    generator: &Generator,
) -> (Vec<u8>, [i128; 2]) {
    let file = folder.join("rows");
    let Run {
        first,
        stride,
        count,
    } = range.tokens;
    let mut command = Command::new(program);
    command.arg(&file);
    command.args([range.batch, first, stride, count].map(|x| x.to_string()));
    for &head in range.heads {
        let key = generator.head_key(range.role, range.batch, head);
        command.args([head.to_string(), key.to_string()]);
    }
    let ran = command.output().expect("what was just built can be run");
    let output = String::from_utf8_lossy(&ran.stdout).into_owned();
    let errors = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(ran.status.success(), "{:?} {errors}", ran.status);
    let sums: Vec<i128> = output
        .split_whitespace()
        .map(|sum| sum.parse().unwrap())
        .collect();
    (std::fs::read(file).unwrap(), [sums[0], sums[1]])
}

/// The same rows on the host.
fn expected(range: &RowRange<'_>, generator: &Generator, dtype: DType, dim: usize) -> Data {
    let elements = range.tokens.count * range.heads.len() * dim;
    let mut generated = Data::zeros(DType::F32, elements);
    generator.read(range, &mut generated).unwrap();
    let mut rounded = Data::zeros(dtype, elements);
    let whole = Block::contiguous(elements, 0, 0);
    host::copy(&whole, false, generated.as_slice(), &mut rounded);
    rounded
}

#[test]
fn rows_and_sums_equal_the_hosts_bit_for_bit() {
    if Command::new(compiler()).arg("--version").output().is_err() {
        eprintln!("skipped: no C++ compiler ({:?})", compiler());
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let run = |first, stride, count| Run {
        first,
        stride,
        count,
    };
    let cases: [(Role, usize, Run, &[usize]); 4] = [
        (Role::Q, 0, run(0, 1, 300), &[0, 1, 2, 3, 4, 5, 6, 7]),
        (Role::K, 0, run((1 << 30) + 3, 4096, 257), &[1, 5]),
        (Role::V, 3, run(77, 5, 1), &[2]),
        (Role::V, 0, run(1 << 40, 1, 64), &[0, 9]),
    ];
    let variants = [
        (DType::Bf16, 64),
        (DType::F16, 20),
        (DType::F32, 72),
        (DType::F64, 130),
    ];
    for (dtype, dim) in variants {
        let program = build(folder.path(), dtype, dim);
        let generator = Generator::new(SEED, dim);
        for (role, batch, tokens, heads) in cases {
            let range = RowRange {
                role,
                batch,
                tokens,
                heads,
            };
            let (bytes, [signed, squares]) = emulated(&program, folder.path(), &range, &generator);
            let rows = expected(&range, &generator, dtype, dim);
            assert!(bytes == rows.bytes(), "{dtype} {dim} {range:?}");
            let mut sum = Checksum::default();
            let out = RowRange {
                role: Role::Out,
                ..range
            };
            sum.write(&out, &rows).unwrap();
            let count = (tokens.count * heads.len()) as u64;
            assert_eq!(sum, Checksum::of_units(signed, squares, count));
        }
    }
}
