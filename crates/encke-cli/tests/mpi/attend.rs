//! `mpirun -n p encke attend`: the file that threads write, byte for byte.

use encke_core::conformance::extent;
use safetensors::Dtype;

use crate::command::CommandFolder;
use crate::files::{self, call};
use crate::launch::{run, succeeds};

/// Options, types and sizes of the calls.
const CALLS: [(&str, Dtype, [usize; 4], usize); 8] = [
    (
        "--grad --causal --window 9,0 --prefix 2 --documents 20,1,40 --softcap 3 --alibi",
        Dtype::F32,
        [2, 61, 4, 8],
        2,
    ),
    (
        "--grad --window 5,7 --mode mix --segment-lengths 8,32 --dilation-rates 1,4 \
         --sharding zigzag --queries replicated",
        Dtype::F64,
        [1, 70, 4, 8],
        4,
    ),
    ("--grad --causal", Dtype::F32, [2, 61, 4, 8], 2),
    ("--grad --sharding striped", Dtype::F64, [1, 50, 2, 4], 1),
    (
        "--grad --causal --sharding zigzag",
        Dtype::BF16,
        [1, 64, 2, 8],
        2,
    ),
    (
        "--grad --queries replicated --sharding zigzag",
        Dtype::F32,
        [1, 37, 2, 4],
        1,
    ),
    (
        "--queries replicated --sharding striped",
        Dtype::F32,
        [2, 37, 2, 4],
        1,
    ),
    (
        "--grad --causal --mode mix --segment-lengths 8,32 --dilation-rates 1,4 --compute f32",
        Dtype::F16,
        [1, 70, 4, 8],
        4,
    ),
];

#[test]
fn processes_write_the_bytes_that_threads_write() {
    let folder = CommandFolder::new();
    for (at, (options, dtype, dims, kv_heads)) in CALLS.into_iter().enumerate() {
        files::write(&folder.join("in.safetensors"), &call(dtype, dims, kv_heads));
        let numbers = if at == 0 {
            vec![2, 3, 5]
        } else {
            vec![2 + at % 4]
        };
        for ranks in numbers {
            let alone = format!("attend in.safetensors -o alone.safetensors {options}");
            folder.succeeds(&format!("{alone} --ranks {ranks}"));
            let together = format!("attend in.safetensors -o together.safetensors {options}");
            succeeds(&folder, ranks, &together);
            let bytes = |name: &str| std::fs::read(folder.join(name)).unwrap();
            let same = bytes("alone.safetensors") == bytes("together.safetensors");
            assert!(same, "{ranks} ranks, {options}");
        }
    }
    assert_eq!(folder.names().len(), 3, "no other file is left behind");
}

#[test]
fn with_invariant_bits_processes_write_the_bytes_of_one_rank() {
    let folder = CommandFolder::new();
    let inputs = call(Dtype::F32, [2, 100, 4, 8], 2);
    files::write(&folder.join("in.safetensors"), &inputs);
    let bytes = |name: &str| std::fs::read(folder.join(name)).unwrap();
    for options in ["--causal", "--window 40,20", "--rotate queries"] {
        let attend = format!("attend in.safetensors --grad --bits invariant:32 {options}");
        folder.succeeds(&format!("{attend} -o alone.safetensors"));
        let together = format!("{attend} -o together.safetensors --sharding 0,32,64");
        succeeds(&folder, 3, &together);
        let same = bytes("alone.safetensors") == bytes("together.safetensors");
        assert!(same, "{options}");
    }
}

/// Files made by other code: sinks, fewer queries than keys, values of another width.
#[test]
fn processes_reproduce_golden_masks() {
    let folder = CommandFolder::new();
    let golden = |name: &str| {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/golden/masks");
        std::path::Path::new(folder).join(name)
    };
    for (name, options) in [
        ("mask_01_sink.safetensors", "--sinks"),
        (
            "mask_03_sink_window_documents.safetensors",
            "--sinks --window 8,all --documents 5,20,1,22 --sharding balanced",
        ),
        ("mask_13_queries_7_of_40.safetensors", "--sharding striped"),
        (
            "mask_13_queries_7_of_40.safetensors",
            "--queries replicated --query-offset 33",
        ),
        (
            "mask_13_queries_7_of_40.safetensors",
            "--queries replicated --sharding zigzag",
        ),
        ("mask_15_value_dim.safetensors", ""),
    ] {
        let input = golden(name);
        let expected = files::read(&input);
        for &ranks in extent::<&[usize]>(&[2, 3, 4], &[2, 3, 4, 7, 16]) {
            let input = input.display();
            let attend = format!("attend {input} -o out.safetensors --grad --causal {options}");
            succeeds(&folder, ranks, &attend);
            let got = files::read(&folder.join("out.safetensors"));
            for tensor in ["out", "dq", "dk", "dv", "dsinks"] {
                let Some(expected) = expected.get(tensor) else {
                    continue;
                };
                let error = got[tensor].difference(expected) / expected.largest();
                assert!(
                    error <= 1e-12,
                    "{name} {options}, {ranks} ranks: {tensor} is off by {error:.2e}"
                );
            }
        }
    }
}

#[test]
fn one_report_has_every_rank() {
    let folder = CommandFolder::new();
    files::write(&folder.join("in.safetensors"), &files::small());
    let arguments = "attend in.safetensors -o out.safetensors --grad --memory --trace t.json";
    let output = run(&folder, 3, arguments);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{said}");
    for rank in 0..3 {
        let line = format!("memory   rank {rank} held");
        assert_eq!(said.matches(&line).count(), 1, "{said}");
    }
    assert_eq!(said.matches("wrote").count(), 1, "{said}");
    let table = String::from_utf8(output.stdout).unwrap();
    assert_eq!(table.matches("memory, backward").count(), 1, "{table}");
    let trace = std::fs::read(folder.join("t.json")).unwrap();
    let trace: serde_json::Value = serde_json::from_slice(&trace).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for rank in 0..3 {
        let of = |event: &&serde_json::Value| event["ph"] == "X" && event["tid"] == rank;
        assert!(events.iter().any(|event| of(&event)));
    }
}
