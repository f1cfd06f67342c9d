//! Errors of the caller are reported once, in one line, for all processes, and leave no file.

use crate::command::{CommandFolder, text};
use crate::files;
use crate::launch::{own_lines, run};

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
}
