//! `encke attend` without errors: outputs, their types, traces and summaries.

use safetensors::Dtype;

use crate::command::{CommandFolder, text};
use crate::files::{self, StoredTensor};

const MIX: &str = "--mode mix --segment-lengths 4,12 --dilation-rates 1,2 --causal";

/// A folder with a small call in `in.safetensors`.
fn prepared() -> CommandFolder {
    let folder = CommandFolder::new();
    files::write(&folder.join("in.safetensors"), &files::small());
    folder
}

#[test]
fn the_output_has_the_documented_tensors_and_stdout_is_empty() {
    let folder = prepared();
    let printed = folder.succeeds("attend in.safetensors -o out.safetensors --ranks 3");
    assert_eq!(printed, "");
    let out = files::read(&folder.join("out.safetensors"));
    let names: Vec<&String> = out.keys().collect();
    assert_eq!(names, ["lse", "out"]);
    assert_eq!(
        (out["out"].dtype, &out["out"].shape[..]),
        (Dtype::F32, &[1, 12, 4, 8][..])
    );
    assert_eq!(
        (out["lse"].dtype, &out["lse"].shape[..]),
        (Dtype::F32, &[1, 12, 4][..])
    );

    folder.succeeds("attend in.safetensors -o out.safetensors --ranks 3 --grad");
    let out = files::read(&folder.join("out.safetensors"));
    assert_eq!(out["dq"].shape, [1, 12, 4, 8]);
    assert_eq!(out["dk"].shape, [1, 12, 2, 8]);
    assert_eq!(out["dv"].shape, [1, 12, 2, 8]);
    assert_eq!(folder.names(), ["in.safetensors", "out.safetensors"]);
}

#[test]
fn with_invariant_bits_every_ring_writes_the_bytes_of_one_rank() {
    let folder = CommandFolder::new();
    folder.succeeds("generate in.safetensors --tokens 1000 --heads 4 --dim 16 --grad");
    let bytes = |name: &str| std::fs::read(folder.join(name)).unwrap();
    for options in ["--causal", "--window 100,70", MIX] {
        let attend = format!("attend in.safetensors --grad --bits invariant:32 {options}");
        folder.succeeds(&format!("{attend} -o alone"));
        for ring in [
            "--ranks 2",
            "--ranks 7 --redundancy 1",
            "--sharding 0,96,960",
            "--ranks 3 --rotate queries",
        ] {
            folder.succeeds(&format!("{attend} -o ring {ring}"));
            assert!(bytes("ring") == bytes("alone"), "{options} {ring}");
        }
    }
    folder.refuses(
        "attend in.safetensors -o out --bits invariant --sharding 0,500",
        &["before token 500", "tiles of 512 rows", "0 or 512"],
    );
    folder.refuses(
        "attend in.safetensors -o out --bits invariant --ranks 2 --sharding zigzag",
        &["bits = invariant", "contiguous"],
    );
}

#[test]
fn the_compute_type_is_the_type_of_the_output() {
    let folder = prepared();
    let types = [
        ("f64", Dtype::F64, Dtype::F64, 1e-6),
        ("f32", Dtype::F32, Dtype::F32, 1e-6),
        ("bf16", Dtype::BF16, Dtype::F32, 2e-2),
        ("f16", Dtype::F16, Dtype::F32, 2e-3),
    ];
    folder.succeeds("attend in.safetensors -o stored.safetensors --grad");
    let stored = files::read(&folder.join("stored.safetensors"));
    for (name, dtype, lse, tolerance) in types {
        folder.succeeds(&format!(
            "attend in.safetensors -o out.safetensors --grad --ranks 2 --compute {name}"
        ));
        let out = files::read(&folder.join("out.safetensors"));
        for tensor in ["out", "dq", "dk", "dv"] {
            assert_eq!(out[tensor].dtype, dtype, "{tensor} in {name}");
            let error = out[tensor].difference(&stored[tensor]);
            assert!(error < tolerance, "{tensor} in {name} is off by {error}");
        }
        assert_eq!(out["lse"].dtype, lse, "lse in {name}");
    }
}

#[test]
fn a_narrow_file_is_computed_in_its_own_type() {
    let folder = CommandFolder::new();
    for dtype in [Dtype::BF16, Dtype::F16] {
        let tensors = files::call(dtype, [2, 9, 2, 4], 1);
        files::write(&folder.join("in.safetensors"), &tensors);
        folder.succeeds("attend in.safetensors -o out.safetensors --ranks 4");
        let out = files::read(&folder.join("out.safetensors"));
        assert_eq!((out["out"].dtype, out["lse"].dtype), (dtype, Dtype::F32));
    }
}

#[test]
fn a_second_run_gives_the_same_bytes() {
    let folder = prepared();
    for out in ["a", "b"] {
        folder.succeeds(&format!(
            "attend in.safetensors -o {out} --grad --ranks 5 {MIX}"
        ));
    }
    let bytes = |name: &str| std::fs::read(folder.join(name)).unwrap();
    assert_eq!(bytes("a"), bytes("b"));
}

#[test]
fn the_gradient_of_the_lse_is_used_when_the_file_has_one() {
    let folder = prepared();
    let mut tensors = files::small();
    folder.succeeds("attend in.safetensors -o without.safetensors --grad");
    for dtype in [Dtype::F32, Dtype::F64] {
        tensors.insert(
            "dlse".to_string(),
            StoredTensor::wave(dtype, &[1, 12, 4], 0.5),
        );
        files::write(&folder.join("with.safetensors"), &tensors);
        folder.succeeds("attend with.safetensors -o out.safetensors --grad --ranks 2");
        let without = files::read(&folder.join("without.safetensors"));
        let with = files::read(&folder.join("out.safetensors"));
        assert!(with["dq"].difference(&without["dq"]) > 1e-3);
        assert!(with["dv"].difference(&without["dv"]) < 1e-6);
    }
}

#[test]
fn tensors_need_not_be_aligned_in_the_file() {
    let folder = prepared();
    let bytes = std::fs::read(folder.join("in.safetensors")).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let mut shifted = (header + 1).to_le_bytes().to_vec();
    shifted.extend(&bytes[8..8 + header as usize]);
    shifted.push(b' ');
    shifted.extend(&bytes[8 + header as usize..]);
    std::fs::write(folder.join("shifted.safetensors"), shifted).unwrap();
    for (input, out) in [("in", "a"), ("shifted", "b")] {
        folder.succeeds(&format!(
            "attend {input}.safetensors -o {out} --grad --ranks 2"
        ));
    }
    assert_eq!(
        files::read(&folder.join("a")),
        files::read(&folder.join("b"))
    );
}

#[test]
fn accepted_non_finite_elements_affect_only_the_rows_that_attend_to_them() {
    let folder = CommandFolder::new();
    let mut tensors = files::small();
    let row = 2 * 8; // elements of one token of v
    tensors.get_mut("v").unwrap().elements[5 * row] = f64::NAN;
    files::write(&folder.join("in.safetensors"), &tensors);
    folder
        .succeeds("attend in.safetensors -o out.safetensors --causal --ranks 3 --allow-non-finite");
    let out = files::read(&folder.join("out.safetensors"));
    for (i, x) in out["out"].elements.iter().enumerate() {
        let (token, head, channel) = (i / 32, i / 8 % 4, i % 8);
        let attends = token >= 5 && head < 2 && channel == 0;
        assert_eq!(
            x.is_nan(),
            attends,
            "token {token}, head {head}, channel {channel}"
        );
    }
}

#[test]
fn memory_is_printed_to_stdout_with_a_line_for_each_rank() {
    let folder = prepared();
    let printed = folder.succeeds("attend in.safetensors -o out --ranks 3 --grad --memory");
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!(lines.len(), 2 * (2 + 3), "{printed}");
    assert_eq!(
        (lines[0], lines[5]),
        ("memory, forward", "memory, backward")
    );
    for heading in ["own K/V", "travelling K/V", "all planned", "allocated"] {
        assert!(lines[1].contains(heading), "{printed}");
    }
    assert!(lines[6].contains("gradients"), "{printed}");
}

#[test]
fn the_trace_has_every_rank_and_the_planned_bytes() {
    let folder = prepared();
    let out = folder.encke(&format!(
        "attend in.safetensors -o out --ranks 4 --grad --trace t.json {MIX}"
    ));
    assert!(text(&out.stderr).contains("a timeline to t.json"));
    let trace = std::fs::read(folder.join("t.json")).unwrap();
    let trace: serde_json::Value = serde_json::from_slice(&trace).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let named = events.iter().filter(|event| event["name"] == "thread_name");
    assert_eq!(named.count(), 4);
    let complete: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
    for (pass, option) in [("forward", ""), ("backward", "--backward")] {
        let of_pass = complete.iter().filter(|event| event["cat"] == pass);
        let sent: u64 = of_pass
            .map(|event| event["args"]["sent_bytes"].as_u64().unwrap())
            .sum();
        let sizes = "--tokens 12 --heads 4 --kv-heads 2 --dim 8 --ranks 4 --json";
        let plan = folder.succeeds(&format!("plan {sizes} {MIX} {option}"));
        let plan: serde_json::Value = serde_json::from_str(&plan).unwrap();
        assert!(sent > 0);
        assert_eq!(plan["sent_bytes"].as_u64(), Some(sent), "{pass}");
    }
    // One pass after the other, on the same clock.
    let time = |event: &serde_json::Value, key: &str| event[key].as_f64().unwrap();
    let ends = complete.iter().filter(|event| event["cat"] == "forward");
    let forward_end = ends
        .map(|e| time(e, "ts") + time(e, "dur"))
        .fold(0.0, f64::max);
    let mut starts = complete.iter().filter(|event| event["cat"] == "backward");
    assert!(starts.all(|event| time(event, "ts") >= forward_end));
}

#[test]
fn an_existing_output_is_replaced_but_not_by_a_refused_call() {
    let folder = prepared();
    std::fs::write(folder.join("out"), b"old").unwrap();
    folder.refuses("attend in.safetensors -o out --ranks 0", &["ranks is 0"]);
    assert_eq!(std::fs::read(folder.join("out")).unwrap(), b"old");
    folder.succeeds("attend in.safetensors -o out");
    assert_eq!(files::read(&folder.join("out")).len(), 2);
}

#[cfg(unix)]
#[test]
fn an_output_has_the_permissions_of_any_new_file() {
    use std::os::unix::fs::PermissionsExt;
    let folder = prepared();
    folder.succeeds("attend in.safetensors -o out");
    std::fs::write(folder.join("plain"), b"").unwrap();
    let mode = |name: &str| folder.join(name).metadata().unwrap().permissions().mode();
    assert_eq!(mode("out"), mode("plain"));
}

#[test]
fn every_schedule_has_the_same_result() {
    let folder = prepared();
    let ring = "attend in.safetensors --grad --ranks 5 --sharding zigzag --causal";
    folder.succeeds(&format!("{ring} -o expected.safetensors"));
    let expected = files::read(&folder.join("expected.safetensors"));
    for options in [
        "--schedule 2",
        "--schedule 3 --rotate queries",
        "--schedule gather",
        "--rotate queries",
        "--schedule auto --rotate auto",
    ] {
        folder.succeeds(&format!("{ring} {options} -o out.safetensors"));
        let out = files::read(&folder.join("out.safetensors"));
        for (name, expected) in &expected {
            let off = out[name].difference(expected);
            assert!(off < 1e-4, "{name} is off by {off}, {options}");
        }
    }
}

#[test]
fn a_ring_survives_the_death_of_a_rank_or_names_the_lost_tokens() {
    let folder = prepared();
    let ring = "attend in.safetensors --grad --ranks 4";
    folder.succeeds(&format!("{ring} -o expected.safetensors"));
    let expected = files::read(&folder.join("expected.safetensors"));
    let call = format!("{ring} --redundancy 1 -o out.safetensors");
    for drill in ["0@0", "2@1", "3@2", "1@9", "1@0,3@1"] {
        let output = folder.encke(&format!("{call} --drill {drill}"));
        let said = text(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert!(said.contains("survived the death of rank"), "{said}");
        let out = files::read(&folder.join("out.safetensors"));
        for (name, expected) in &expected {
            let off = out[name].difference(expected);
            assert!(off < 1e-4, "{name} is off by {off}, {drill}");
        }
    }
    folder.refuses(
        &format!("{call} --drill 1@0,2@0"),
        &["the tokens of rank 1 are lost", "redundancy"],
    );
    folder.refuses(&format!("{ring} -o x --drill 1@0"), &["--redundancy"]);
    folder.refuses(&format!("{call} --drill 1"), &["2@1"]);
}
