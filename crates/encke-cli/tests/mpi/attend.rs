//! `mpirun -n p encke attend`: the file that threads write, byte for byte.

use safetensors::Dtype;

use crate::command::CommandFolder;
use crate::files::{self, call};
use crate::launch::{run, succeeds};

/// Options, types and sizes of the calls.
const CALLS: [(&str, Dtype, [usize; 4], usize); 6] = [
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
