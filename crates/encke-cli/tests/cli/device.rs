//! `--device` of the commands that compute: whoever asks for a GPU that is not there hears what is
//! missing, before any file is made.

use crate::command::Folder;
use crate::files;

#[test]
fn a_gpu_that_is_not_there_is_never_the_cpu() {
    let folder = Folder::new();
    files::write(&folder.join("in.safetensors"), &files::small());
    for command in [
        "attend in.safetensors -o out.safetensors --device cuda:3",
        "attend in.safetensors -o out.safetensors --device cuda:3 --memory-limit 1GiB",
        "verify --count 1 --device cuda:3",
        "profile --tokens 64 --ranks 1 --plan-ranks 0 --device cuda:3",
        "profile --tokens 64 --ranks 1 --plan-ranks 0 --policies --device cuda:3",
    ] {
        let said = folder.refuses(command, &["--device cuda:3", "CUDA driver"]);
        assert!(said.contains("ENCKE_LIBCUDA"), "{command}: {said}");
    }
    assert_eq!(folder.names(), ["in.safetensors"]);
    folder.refuses(
        "verify --faults --device cuda",
        &["--faults", "--device cuda:0"],
    );
}

#[test]
fn the_cpu_is_a_device_and_is_named() {
    let folder = Folder::new();
    files::write(&folder.join("in.safetensors"), &files::small());
    let output = folder.encke("attend in.safetensors -o out.safetensors --device cpu --ranks 2");
    let said = crate::command::text(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("2 ranks, contiguous, on cpu"), "{said}");
}
