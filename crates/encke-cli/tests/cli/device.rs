//! `--device` of the commands that compute: a missing GPU is an error that names what is missing,
//! before any file is created.

use crate::command::CommandFolder;
use crate::files;

#[test]
fn a_missing_gpu_is_never_replaced_by_the_cpu() {
    let folder = CommandFolder::new();
    files::write(&folder.join("in.safetensors"), &files::small());
    for command in [
        "attend in.safetensors -o out.safetensors --device cuda:3",
        "attend in.safetensors -o out.safetensors --device cuda:3 --memory-limit 1GiB",
        "verify --count 1 --device cuda:3",
        "profile --tokens 64 --ranks 1 --plan-ranks 0 --device cuda:3",
        "profile --tokens 64 --ranks 1 --plan-ranks 0 --policies --device cuda:3",
    ] {
        let error = folder.refuses(command, &["--device cuda:3", "CUDA driver"]);
        assert!(error.contains("ENCKE_LIBCUDA"), "{command}: {error}");
    }
    assert_eq!(folder.names(), ["in.safetensors"]);
    folder.refuses(
        "verify --faults --device cuda",
        &["--faults", "--device cuda out"],
    );
}

#[test]
fn a_wire_is_for_gpus_of_several_processes() {
    let folder = CommandFolder::new();
    files::write(&folder.join("in.safetensors"), &files::small());
    let attend = "attend in.safetensors -o out.safetensors";
    folder.refuses(
        &format!("{attend} --wire ipc"),
        &["--wire ipc", "--device is cpu"],
    );
    folder.refuses(
        &format!("{attend} --wire host --device cuda"),
        &["--wire host", "several processes"],
    );
    folder.refuses(
        &format!("{attend} --wire mpi"),
        &["auto, ipc, nccl or host"],
    );
    folder.refuses("billion --tokens 1k --wire nccl", &["no parcels travel"]);
    assert_eq!(folder.names(), ["in.safetensors"]);
}

#[test]
fn the_summary_names_the_cpu() {
    let folder = CommandFolder::new();
    files::write(&folder.join("in.safetensors"), &files::small());
    let output = folder.encke("attend in.safetensors -o out.safetensors --device cpu --ranks 2");
    let stderr = crate::command::text(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(stderr.contains("2 ranks, contiguous, on cpu"), "{stderr}");
}
