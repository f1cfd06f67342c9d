//! Wrong inputs: exit code 2, one line that names the error, no file left behind.

use std::path::Path;

use safetensors::Dtype;

use crate::command::CommandFolder;
use crate::files::{self, StoredTensor, StoredTensors};

/// Runs `encke attend` on tensors and expects a refusal.
fn refused(tensors: &StoredTensors, options: &str, words: &[&str]) {
    let folder = CommandFolder::new();
    files::write(&folder.join("in.safetensors"), tensors);
    folder.refuses(
        &format!("attend in.safetensors -o out.safetensors {options}"),
        words,
    );
}

/// The small call with one tensor replaced.
fn with(name: &str, tensor: StoredTensor) -> StoredTensors {
    let mut tensors = files::small();
    tensors.insert(name.to_string(), tensor);
    tensors
}

#[test]
fn missing_tensors_are_refused() {
    let mut tensors = files::small();
    tensors.remove("k");
    refused(&tensors, "", &["no tensor k", "it has do, q, v"]);
    let mut tensors = files::small();
    tensors.remove("do");
    refused(
        &tensors,
        "--grad",
        &["no tensor do", "it has k, q, v", "--grad"],
    );
    refused(
        &StoredTensors::new(),
        "",
        &["no tensor q", "no tensors at all"],
    );
}

/// What the error of a ring that needs more memory than there is names.
const RANKS: &str = "the buffers of all";

#[test]
fn absurd_sizes_are_refused_before_any_work() {
    let folder = CommandFolder::new();
    let plan = "plan --tokens 1e9 --dim 1 --heads";
    for (arguments, words) in [
        ("profile --tokens 1e12", "available"),
        ("bench --tokens 1e12", "available"),
        ("report page.html --tokens 1e11", "available"),
        ("bench --tokens 1M --ranks 1024 --queries replicated", RANKS),
        (
            "profile --tokens 1M --ranks 1024 --queries replicated",
            RANKS,
        ),
        (
            "report p.html --tokens 1M --ranks 64 --queries replicated --dim 4096",
            RANKS,
        ),
        ("bench --repeats 1e12", "at most"),
        ("simulate --against threads --tokens 1e12", "available"),
        (
            "simulate --tokens 64 --gpu here --heads 1e6 --dim 64",
            "available",
        ),
        (
            "simulate --tokens 64 --gpu here --heads 1e9 --dim 1e6",
            "overflows",
        ),
        (
            "simulate --tokens 64 --ranks 4 --straggler 1:1e308",
            "1e308",
        ),
        ("launch -n 1e6 plan", "at most 1024"),
        ("plan --tokens 64 --heads 1e10 --dim 8 --alibi", "steps"),
        (
            "plan --tokens 1 --heads 1 --dim 9007199254740992 --explain",
            "at most 1048576",
        ),
        (
            "plan --tokens 64 --dim 1 --heads 1e10 --bits invariant",
            "steps",
        ),
        (
            "plan --tokens 1e13 --heads 2 --dim 8 --ranks 2 --bits invariant --mode mix \
             --segment-lengths 1e12,1000000000001 --dilation-rates 1,1",
            "every cut",
        ),
        (
            "launch -n 1e15 --option=--hostfile --option=x plan",
            "at most",
        ),
        ("billion --ranks 18446744073709551615", "too many"),
        ("billion --ranks 1e12", "too many"),
        ("billion --tokens 1e15", "overflows"),
        ("billion --samples 1e12", "sampled rows"),
        (
            &format!("{plan} 1e9 --mode mix --segment-lengths 1e9 --dilation-rates 1e9"),
            "overflows",
        ),
        (
            &format!("{plan} 1e6 --mode mix --segment-lengths 1e9 --dilation-rates 1e6"),
            "steps",
        ),
        (
            &format!(
                "{plan} 1 --ranks 4096 --sharding striped --segment-lengths 4097 \
                      --dilation-rates 1"
            ),
            "steps",
        ),
        (
            &format!("{plan} 1 --explain --most-ranks 1e9"),
            "at most 128",
        ),
        (&format!("{plan} 1e15"), "overflows"),
    ] {
        folder.refuses(arguments, &[words]);
    }
}

/// An argument may have 128 KiB, and a list thousands of elements that are all wrong.
#[test]
fn the_error_of_a_long_value_is_short() {
    let folder = CommandFolder::new();
    let list = vec!["7"; 30_000].join(",");
    let long = "x".repeat(100_000);
    for (arguments, words) in [
        (
            format!("plan --heads 1 --dim 8 --tokens {long}"),
            "encke plan --help",
        ),
        (
            format!("plan --heads 1 --dim 8 --tokens {list}"),
            "encke plan --help",
        ),
        (format!("attend {long} -o out"), "File name too long"),
        (
            format!("attend in -o out --segment-lengths {list} --dilation-rates 1"),
            "",
        ),
        (long, "see encke --help"),
    ] {
        let line = folder.refuses(&arguments, &[words]);
        assert!(line.len() < 4096, "{} bytes: {line}", line.len());
    }
}

#[test]
fn options_that_need_another_one_are_refused_without_it() {
    let folder = CommandFolder::new();
    for (arguments, needed) in [
        ("tune --record r.json", "--check"),
        ("tune --seconds 1 --record r.json", "--check"),
        ("tune --show --record r.json", "--check"),
        ("tune --repeats 3", "--check"),
        ("tune --show --repeats 3", "--check"),
        ("verify --redundancy 1", "--faults"),
        ("verify --bits --redundancy 1", "--faults"),
        ("attend in -o out --drill 1@1", "--redundancy"),
    ] {
        folder.refuses(arguments, &[needed]);
    }
}

#[test]
fn a_drill_names_ranks_of_the_ring() {
    let options = "--ranks 4 --redundancy 1 --drill 9@1";
    refused(&files::small(), options, &["no rank 9", "4 ranks"]);
}

#[test]
fn wrong_shapes_are_refused() {
    let wave = |shape: &[usize]| StoredTensor::wave(Dtype::F32, shape, 0.0);
    refused(
        &with("q", wave(&[12, 4, 8])),
        "",
        &["q has 3 dimensions [12, 4, 8]", "[b, n, h, d]"],
    );
    refused(
        &with("v", wave(&[1, 1, 12, 2, 8])),
        "",
        &["v has 5 dimensions"],
    );
    refused(
        &with("k", wave(&[1, 12, 0, 8])),
        "",
        &["k has shape [1, 12, 0, 8]", "is empty"],
    );
    refused(
        &with("k", wave(&[1, 11, 2, 8])),
        "",
        &["v has shape [1, 12, 2, 8], expected [1, 11, 2, 8] to fit k"],
    );
    refused(
        &with("q", wave(&[1, 13, 4, 8])),
        "",
        &["13 queries", "12 keys"],
    );
    refused(
        &with("v", wave(&[1, 12, 1, 8])),
        "",
        &["v has shape [1, 12, 1, 8], expected [1, 12"],
    );
    refused(
        &with("k", wave(&[1, 12, 2, 4])),
        "",
        &["k has shape [1, 12, 2, 4]"],
    );
    let short = with("do", wave(&[1, 12, 4, 4]));
    refused(
        &short,
        "--grad",
        &["do has shape [1, 12, 4, 4], expected [1, 12, 4, 8]"],
    );
    let dlse = with("dlse", wave(&[1, 12, 4, 1]));
    refused(&dlse, "--grad", &["dlse has 4 dimensions", "[b, n, h]"]);
    let heads = files::call(Dtype::F32, [1, 12, 4, 8], 3);
    refused(
        &heads,
        "",
        &["4 query heads", "3 key/value heads", "divide"],
    );
}

#[test]
fn wrong_types_are_refused() {
    let k = |dtype| with("k", StoredTensor::wave(dtype, &[1, 12, 2, 8], 0.0));
    refused(&k(Dtype::F64), "", &["k is f64 but q is f32"]);
    refused(
        &k(Dtype::I32),
        "",
        &["k holds I32", "F64, F32, BF16 and F16"],
    );
    let dout = with("do", StoredTensor::wave(Dtype::BF16, &[1, 12, 4, 8], 0.0));
    refused(&dout, "--grad", &["do is bf16 but q is f32"]);
}

#[test]
fn elements_that_are_not_finite_are_refused() {
    for (name, bad, count) in [
        ("q", f64::NAN, "1 NaN"),
        ("k", f64::INFINITY, "1 infinite"),
        ("v", f64::NEG_INFINITY, "1 infinite"),
        ("do", f64::NAN, "1 NaN"),
    ] {
        let mut tensors = files::small();
        let tensor = tensors.get_mut(name).unwrap();
        let width = tensor.shape[2] * 8;
        tensor.elements[3 * width + 8 + 5] = bad;
        let index = "the first at [0, 3, 1, 5]";
        refused(
            &tensors,
            "--grad",
            &[name, count, index, "--allow-non-finite"],
        );
        let folder = CommandFolder::new();
        files::write(&folder.join("in.safetensors"), &tensors);
        folder.succeeds("attend in.safetensors -o out --grad --allow-non-finite");
    }
    let mut tensors = files::small();
    tensors.get_mut("q").unwrap().elements[0] = 1e6;
    refused(
        &tensors,
        "--compute f16",
        &["q", "1 too large for f16", "[0, 0, 0, 0]"],
    );
}

#[test]
fn wrong_pattern_and_computation_options_are_refused() {
    let refusals = [
        (
            "--segment-lengths 4 --dilation-rates 0",
            "a dilation rate is 0",
        ),
        (
            "--segment-lengths 0 --dilation-rates 1",
            "a segment length is 0",
        ),
        (
            "--segment-lengths 4,8 --dilation-rates 1",
            "2 segment lengths but 1 dilation rates",
        ),
        ("--segment-lengths 4", "--dilation-rates"),
        ("--dilation-rates 4", "--segment-lengths"),
        (
            "--segment-lengths 2,3,4,6,12 --dilation-rates 1,1,1,1,1",
            "5 branches but only 4 heads",
        ),
        (
            "--mode fkodom --segment-lengths 5 --dilation-rates 1",
            "12 is not a multiple of 5",
        ),
        ("--mode mix", "--segment-lengths"),
        ("--mode fkodom", "--segment-lengths"),
        ("--group-scale groups", "--group-scale"),
        (
            "--segment-lengths 4 --dilation-rates 1 --offsets head-mod",
            "--offsets",
        ),
        (
            "--segment-lengths 4 --dilation-rates 1 --mixing-gradient exact",
            "--mixing-gradient",
        ),
        (
            "--mode mix --segment-lengths 4 --dilation-rates 1 --group-scale one",
            "--group-scale",
        ),
        ("--mode ring", "possible values: group, mix, fkodom"),
        ("--segment-lengths 4,x --dilation-rates 1,1", "whole number"),
        ("--scale nan", "scale is NaN"),
        ("--scale inf", "scale is inf"),
        ("--scale 1e39", "scale is 1e39"),
        ("--scale=-1e-46 --compute bf16", "scale is -1e-46"),
        ("--checkpoint recompute", "--grad"),
        ("--deadline 0", "give seconds, more than 0"),
        ("--deadline -1", "give seconds, more than 0"),
        ("--deadline nan", "give seconds, more than 0"),
        ("--compute f8", "f64, f32, bf16, f16"),
        ("--no-such-option", "--no-such-option"),
    ];
    for (options, words) in refusals {
        refused(&files::small(), options, &[words]);
    }
    let dlse = with("dlse", StoredTensor::wave(Dtype::F32, &[1, 12, 4], 0.0));
    let fkodom = "--grad --mode fkodom --segment-lengths 4 --dilation-rates 1";
    refused(&dlse, fkodom, &["dlse", "fkodom"]);
}

#[test]
fn wrong_ring_options_are_refused() {
    let refusals = [
        ("--ranks 0", "ranks is 0"),
        ("--ranks 1e9", "too many"),
        ("--ranks -1", "--ranks"),
        ("--sharding 1,5", "rank 0 starts at token 1"),
        ("--sharding 0,5,4", "rank 2 starts at token 4"),
        ("--sharding 0,13", "rank 1 starts at token 13"),
        (
            "--sharding 0,5 --ranks 3",
            "is for 2 ranks, but the ring has 3",
        ),
        ("--sharding snake", "contiguous, zigzag, striped"),
        ("--queries all", "write sharded or replicated; or auto"),
    ];
    for (options, words) in refusals {
        refused(&files::small(), options, &[words]);
    }
    let folder = CommandFolder::new();
    files::write(&folder.join("in.safetensors"), &files::small());
    let line = folder.refuses("attend in.safetensors -o out --ranks 0", &[]);
    assert_eq!(
        line,
        "encke: the number of ranks is 0; it must be at least 1\n"
    );
}

#[test]
fn unreadable_files_are_refused() {
    let folder = CommandFolder::new();
    files::write(&folder.join("in.safetensors"), &files::small());
    let whole = std::fs::read(folder.join("in.safetensors")).unwrap();
    let damaged: [(&str, Vec<u8>, &str); 6] = [
        ("truncated", whole[..whole.len() - 8].to_vec(), "truncated"),
        ("long", [&whole[..], b"more"].concat(), "damaged"),
        ("header", whole[..40].to_vec(), "truncated"),
        ("empty", Vec::new(), "not a safetensors file"),
        (
            "text",
            b"this is a text and no file of tensors".to_vec(),
            "not a safetensors file",
        ),
        (
            "json",
            [&8u64.to_le_bytes()[..], b"{\"q\": 1}"].concat(),
            "not a safetensors file",
        ),
    ];
    for (name, bytes, words) in &damaged {
        std::fs::write(folder.join(name), bytes).unwrap();
        folder.refuses(&format!("attend {name} -o out"), &[name, words]);
    }
    folder.refuses(
        "attend missing.safetensors -o out",
        &["missing.safetensors", "No such file"],
    );
    std::fs::create_dir(folder.join("folder")).unwrap();
    folder.refuses("attend folder -o out", &["folder", "not a regular file"]);
    folder.refuses("attend -o out", &["<IN.safetensors>"]);
}

#[cfg(unix)]
#[test]
fn a_file_without_permission_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let folder = CommandFolder::new();
    let path = folder.join("in.safetensors");
    files::write(&path, &files::small());
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o000)).unwrap();
    if std::fs::read(&path).is_ok() {
        return; // this user can read every file
    }
    folder.refuses(
        "attend in.safetensors -o out",
        &["in.safetensors", "ermission"],
    );
}

#[test]
fn outputs_that_cannot_be_written_are_refused() {
    let folder = CommandFolder::new();
    files::write(&folder.join("in.safetensors"), &files::small());
    std::fs::create_dir(folder.join("folder")).unwrap();
    let refusals = [
        ("-o missing/out", &["missing/out", "No such file"][..]),
        ("-o in.safetensors/out", &["in.safetensors/out"]),
        ("-o folder", &["folder", "not a regular file"]),
        ("-o in.safetensors", &["in.safetensors is also the input"]),
        ("-o folder/../in.safetensors", &["is also the input"]),
        ("-o out --trace out", &["out is also the output"]),
        ("-o out --trace in.safetensors", &["is also the input"]),
        ("-o out --trace missing/t.json", &["missing/t.json"]),
        ("", &["--output"]),
    ];
    for (options, words) in refusals {
        folder.refuses(&format!("attend in.safetensors {options}"), words);
    }
    let inside = std::fs::read_dir(folder.join("folder")).unwrap();
    assert_eq!(inside.count(), 0);
    #[cfg(unix)]
    if Path::new("/dev/null").exists() {
        folder.refuses(
            "attend in.safetensors -o /dev/null",
            &["/dev/null", "regular file"],
        );
    }
}

#[test]
#[cfg(target_os = "linux")]
fn sizes_beyond_the_limits_of_the_shell_are_errors() {
    let folder = CommandFolder::new();
    files::write(&folder.join("in"), &files::small());
    let program = folder.command("").get_program().to_owned();
    let refused = |command: &str, words: &str| {
        let mut shell = std::process::Command::new("sh");
        shell.current_dir(folder.path()).args(["-c", command]);
        let ended = shell.arg(&program).output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(2), "{command}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(
            said.starts_with("encke: ") && said.contains(words),
            "{said}"
        );
    };
    refused(
        "ulimit -v 2500000; \"$0\" report out --batch 250k --tokens 64 --heads 2 --dim 8 --ranks 2",
        "bytes",
    );
    refused(
        "RAYON_NUM_THREADS=100000 \"$0\" attend in -o out",
        "100000 are more than 4096",
    );
    assert_eq!(folder.names(), ["in"]);
}
