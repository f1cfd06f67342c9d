//! `encke attend --memory-limit`: the same output, in less memory than the size of the file.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::command::{CommandFolder, text};
use crate::files;

const LONGNET: &str =
    "--mode mix --segment-lengths 256,1024,4096,262144 --dilation-rates 1,4,16,1024 --causal";

/// Runs `encke`; returns its standard error and its peak resident memory.
#[cfg(target_os = "linux")]
fn watched(folder: &CommandFolder, arguments: &str) -> (String, usize) {
    let program = assert_cmd::cargo::cargo_bin("encke");
    let mut child = Command::new(program)
        .current_dir(folder.path())
        .args(arguments.split_whitespace())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    while child.try_wait().unwrap().is_none() {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with("VmHWM:"));
        let number = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
        peak = peak.max(number.unwrap_or(0) * 1024);
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "encke {arguments}: {said}");
    (said, peak)
}

/// The number of ranks that a summary names.
fn ranks(said: &str) -> usize {
    let line = said.lines().find(|line| line.starts_with("ring")).unwrap();
    let word = line.split_whitespace().nth(1).unwrap();
    word.parse().unwrap()
}

fn length(path: &Path) -> usize {
    path.metadata().unwrap().len() as usize
}

#[test]
#[cfg(target_os = "linux")]
fn invariant_bits_out_of_core_are_those_in_memory() {
    let folder = CommandFolder::new();
    folder.succeeds("generate in.safetensors --tokens 20k --heads 4 --dim 16 --grad");
    let attend = "attend in.safetensors --grad --bits invariant:32 --window 200,100";
    folder.succeeds(&format!("{attend} -o memory"));
    let limited = format!("{attend} -o streamed --memory-limit 64MiB");
    let (said, _) = watched(&folder, &format!("{limited} --rotate queries"));
    assert!(ranks(&said) > 1, "{said}");
    let bytes = |name: &str| std::fs::read(folder.join(name)).unwrap();
    assert!(bytes("memory") == bytes("streamed"), "{said}");
    folder.refuses(&limited, &["invariant bits", "let queries rotate"]);
}

#[test]
#[cfg(target_os = "linux")]
fn a_file_three_times_the_limit_gives_the_bytes_of_a_ring_in_memory() {
    let folder = CommandFolder::new();
    folder.succeeds("generate in.safetensors --tokens 270_001 --heads 1 --dim 64");
    let limit = 64 << 20;
    assert!(length(&folder.join("in.safetensors")) > 3 * limit);
    let command = format!("attend in.safetensors -o a --memory-limit 64MiB {LONGNET}");
    let (said, peak) = watched(&folder, &command);
    assert!(peak > 0 && peak <= limit, "{peak} bytes resident; {said}");
    let ranks = ranks(&said);
    assert!(ranks > 8, "{said}");
    folder.succeeds(&format!(
        "attend in.safetensors -o b --ranks {ranks} {LONGNET}"
    ));
    let bytes = |name: &str| std::fs::read(folder.join(name)).unwrap();
    assert!(bytes("a") == bytes("b"), "other bytes than the ring's");
    assert_eq!(folder.names(), ["a", "b", "in.safetensors"]);
}

#[test]
#[cfg(target_os = "linux")]
fn gradients_stay_below_the_limit_too() {
    let folder = CommandFolder::new();
    folder
        .succeeds("generate in.safetensors --tokens 60_000 --heads 2 --kv-heads 1 --dim 32 --grad");
    let limit = 44 << 20;
    let command = format!("attend in.safetensors -o a --grad --memory-limit 44MiB {LONGNET}");
    let (said, peak) = watched(&folder, &command);
    assert!(peak > 0 && peak <= limit, "{peak} bytes resident; {said}");
    let ranks = ranks(&said);
    assert!(ranks > 4, "{said}");
    folder.succeeds(&format!(
        "attend in.safetensors -o b --grad --ranks {ranks} {LONGNET}"
    ));
    let (streamed, ring) = (
        files::read(&folder.join("a")),
        files::read(&folder.join("b")),
    );
    for name in ["out", "lse", "dq"] {
        assert!(streamed[name] == ring[name], "{name} has other bits");
    }
    for name in ["dk", "dv"] {
        assert_eq!(streamed[name].dtype, ring[name].dtype);
        let error = streamed[name].difference(&ring[name]);
        assert!(
            error <= 1e-5 * ring[name].largest(),
            "{name} is off by {error}"
        );
    }
    assert_eq!(folder.names(), ["a", "b", "in.safetensors"]);
}

/// A pass and a pattern whose freed buffers glibc would keep: twice the limit. With
/// `ENCKE_ALL_LIMITS`, all passes, patterns and types.
#[test]
#[cfg(target_os = "linux")]
fn freed_buffers_do_not_stay_resident() {
    let patterns = [
        "--mode mix --segment-lengths 1024,4096,16384 --dilation-rates 1,4,16",
        "--segment-lengths 1024,4096 --dilation-rates 1,4",
        "",
    ];
    let passes = ["--grad --causal", "--grad", "--causal", ""];
    let dtypes = ["f32", "bf16", "f16"];
    let all = std::env::var_os("ENCKE_ALL_LIMITS").is_some();
    let first = |count: usize| if all { count } else { 1 };
    let folder = CommandFolder::new();
    for dtype in &dtypes[..first(dtypes.len())] {
        folder.succeeds(&format!(
            "generate in.safetensors --tokens 16k --heads 8 --dim 128 --grad --dtype {dtype}"
        ));
        for pattern in &patterns[..first(patterns.len())] {
            for pass in &passes[..first(passes.len())] {
                let options = format!("{pass} {pattern} --memory-limit 48MiB");
                let command = format!("attend in.safetensors -o out.safetensors {options}");
                let (said, peak) = watched(&folder, &command);
                assert!(
                    peak > 0 && peak <= 48 << 20,
                    "{options} {dtype}: {peak} bytes resident; {said}"
                );
            }
        }
    }
}

#[test]
fn every_type_and_pattern_can_be_streamed() {
    let folder = CommandFolder::new();
    for dtype in ["bf16", "f64"] {
        folder.succeeds(&format!(
            "generate in.safetensors --tokens 100 --batch 2 --heads 4 --kv-heads 2 --dim 8 --grad \
             --dtype {dtype}"
        ));
        let masked = "--causal --window 9,0 --prefix 3 --documents 40,1,59 --softcap 2 --alibi";
        let packed = "--window 20,5 --documents 60,40 --mode mix --segment-lengths 8,32 \
                      --dilation-rates 1,4";
        for options in [
            "--causal",
            "--sharding zigzag --compute f32",
            LONGNET,
            masked,
            packed,
        ] {
            for (out, limit) in [("a", "--memory-limit 1GiB --memory"), ("b", "")] {
                folder.succeeds(&format!(
                    "attend in.safetensors -o {out} --grad {options} {limit}"
                ));
            }
            let (a, b) = (
                files::read(&folder.join("a")),
                files::read(&folder.join("b")),
            );
            assert!(a == b, "{dtype} {options}");
        }
    }
}

#[test]
fn options_that_exclude_a_memory_limit_are_refused_in_one_line() {
    let folder = CommandFolder::new();
    files::write(&folder.join("in"), &files::small());
    let attend = |options: &str, words: &[&str]| {
        folder.refuses(&format!("attend in -o out --memory-limit {options}"), words);
    };
    attend("1MiB", &["1048576 bytes is too small", "allow at least"]);
    attend("lots", &["--memory-limit", "2GiB"]);
    attend("1GiB --ranks 4", &["--ranks", "the limit determines"]);
    attend("1GiB --sharding 0,5", &["--sharding", "number of ranks"]);
    attend("1GiB --sharding balanced", &["--sharding balanced"]);
    attend("1GiB --sharding documents", &["documents"]);
    attend("1GiB --schedule two-level:2", &["--schedule"]);
    attend("1GiB --grad --rotate queries", &["--rotate queries"]);
    attend(
        "1GiB --grad --bits invariant",
        &["--bits invariant", "--rotate queries"],
    );
    attend("1GiB --queries replicated", &["--queries replicated"]);
    attend("1GiB --trace t.json", &["--trace"]);
    attend("1GiB --deadline 5", &["--deadline"]);
    attend("1GiB --grad --checkpoint recompute", &["--checkpoint"]);
    let detached = "--mode mix --segment-lengths 4 --dilation-rates 2 --mixing-gradient detached";
    attend(
        &format!("1GiB {detached}"),
        &["cannot be streamed", "exact gradients"],
    );
    let mut tensors = files::small();
    tensors.get_mut("v").unwrap().elements[5 * 16 + 8 + 3] = f64::NAN;
    files::write(&folder.join("nan"), &tensors);
    folder.refuses(
        "attend nan -o out --memory-limit 1GiB",
        &["v has", "1 NaN", "[0, 5, 1, 3]"],
    );
    folder.succeeds("attend nan -o out --memory-limit 1GiB --allow-non-finite");
}

#[test]
fn the_same_options_generate_the_same_file() {
    let folder = CommandFolder::new();
    let generate = |name: &str, options: &str| {
        folder.succeeds(&format!(
            "generate {name} --tokens 5_000 --heads 2 --dim 40 {options}"
        ));
        files::read(&folder.join(name))
    };
    let base = generate("a", "");
    assert!(base == generate("b", ""));
    assert_ne!(base["q"], base["k"]);
    assert_ne!(base["q"], generate("c", "--seed 1")["q"]);
    let narrow = generate("d", "--dtype bf16 --grad --kv-heads 1");
    assert_eq!(narrow["k"].shape, [1, 5000, 1, 40]);
    assert!(narrow["q"].difference(&base["q"]) < 1e-2);
    assert!(narrow.contains_key("do"));
    folder.refuses("generate e --tokens 0 --heads 1 --dim 8", &["tokens", "0"]);
}
