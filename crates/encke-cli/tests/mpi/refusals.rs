//! Errors of the caller are reported once, in one line, for all processes, and leave no file.

use crate::command::{CommandFolder, text};
use crate::files;
use crate::launch::{encke_job, own_lines, run};
use crate::mpirun::output;

/// Runs three processes and expects one line that has all of `words`.
fn refused(folder: &CommandFolder, arguments: &str, words: &[&str]) {
    let before = folder.names();
    let output = run(folder, 3, arguments);
    let said = text(&output.stderr);
    assert_ne!(output.status.code(), Some(0), "{arguments}");
    let lines = own_lines(&said);
    assert_eq!(lines.len(), 1, "encke {arguments}: {said}");
    for word in words {
        assert!(lines[0].contains(word), "no {word:?} in {said}");
    }
    assert_eq!(folder.names(), before, "encke {arguments} left something");
}

#[test]
fn every_refusal_is_one_line_for_all_processes() {
    let folder = CommandFolder::new();
    files::write(&folder.join("in.safetensors"), &files::small());
    let mut broken = files::small();
    // In rows of the last rank: only one process reads them.
    let v = broken.get_mut("v").unwrap();
    let last = v.elements.len() - 1;
    v.elements[last] = f64::NAN;
    files::write(&folder.join("nan.safetensors"), &broken);

    let attend = "attend in.safetensors -o out.safetensors";
    refused(
        &folder,
        &format!("{attend} --ranks 4"),
        &["--ranks 4", "3 processes"],
    );
    refused(
        &folder,
        &format!("{attend} --sharding 0,5"),
        &["2 ranks", "3 processes"],
    );
    refused(
        &folder,
        &format!("{attend} --memory-limit 1GiB"),
        &["--memory-limit"],
    );
    refused(&folder, &format!("{attend} --nonsense"), &["--nonsense"]);
    refused(
        &folder,
        "attend none.safetensors -o out.safetensors",
        &["none.safetensors"],
    );
    refused(
        &folder,
        "attend in.safetensors -o no/out.safetensors",
        &["no/out.safetensors"],
    );
    refused(
        &folder,
        "attend nan.safetensors -o out.safetensors",
        &["rank 2", "v has", "[0, 11, 1, 7]"],
    );
    refused(
        &folder,
        &format!("{attend} --mode fkodom --segment-lengths 4 --dilation-rates 1"),
        &["fkodom"],
    );
    for command in [
        attend,
        "verify --count 1",
        "bench",
        "profile",
        "billion --tokens 1k",
    ] {
        refused(
            &folder,
            &format!("{command} --device cuda"),
            &["--device cuda", "CUDA driver", "ENCKE_LIBCUDA"],
        );
    }
    refused(
        &folder,
        &format!("{attend} --wire ipc"),
        &["--wire ipc", "--device is cpu"],
    );
    refused(
        &folder,
        &format!("{attend} --device cuda --wire nccl --redundancy 1"),
        &["--wire nccl and --redundancy"],
    );
}

/// Runs two processes with different arguments, the second in its own folder, and expects one line
/// that has all of `words`.
fn different(folder: &CommandFolder, one: &str, (place, other): (&str, &str), words: &[&str]) {
    let before = folder.names();
    let mut job = encke_job(folder, 1, one);
    job.args([":", "-n", "1", "-wdir"]).arg(folder.join(place));
    job.arg(env!("CARGO_BIN_EXE_encke")).args(other.split(' '));
    let output = output(&mut job);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{one}, {other}: {said}");
    let lines = own_lines(&said);
    assert_eq!(lines.len(), 1, "{one}, {other}: {said}");
    for word in words {
        assert!(lines[0].contains(word), "no {word:?} in {said}");
    }
    assert_eq!(folder.names(), before, "{one}, {other}");
}

#[test]
fn processes_with_different_arguments_or_inputs_are_refused() {
    let folder = CommandFolder::new();
    files::write(&folder.join("in.safetensors"), &files::small());
    std::fs::create_dir(folder.join("host")).unwrap();
    let mut same_shapes = files::small();
    same_shapes.get_mut("k").unwrap().elements[0] += 1.0;
    files::write(&folder.join("host/in.safetensors"), &same_shapes);

    let attend = "attend in.safetensors -o out.safetensors";
    for (one, other, words) in [
        (
            " --scale 1",
            " --scale 2",
            ["rank 1 was started with --scale 2", "--scale 1;"],
        ),
        (
            "",
            " --causal",
            ["with --causal", "with no further argument"],
        ),
        // One that is wrong on this rank alone.
        (
            "",
            " --nonsense",
            ["with --nonsense", "with no further argument"],
        ),
        (" --ranks 2", " --ranks 3", ["--ranks 3", "--ranks 2"]),
    ] {
        let (one, other) = (format!("{attend}{one}"), format!("{attend}{other}"));
        different(&folder, &one, (".", &other), &words);
    }
    let other = "attend in.safetensors -o other.safetensors";
    different(&folder, attend, (".", other), &["-o other.safetensors"]);
    different(
        &folder,
        attend,
        (".", "verify --count 1"),
        &["verify", "attend"],
    );
    different(
        &folder,
        attend,
        ("host", attend),
        &["rank 1", "in.safetensors", "not the same"],
    );
}
