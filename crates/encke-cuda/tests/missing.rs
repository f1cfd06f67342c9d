//! Libraries that are not there, or not what they should be: an error that says which file.
//!
//! Where a library is looked for depends on the environment, so each case runs in a process of its
//! own: this very test, told by a variable that it is the child.

use std::process::Command;

use encke_cuda::{Device, Error, Nccl, Nvrtc};

const CHILD: &str = "ENCKE_TEST_CHILD";

/// Runs the test `name` again with `variable` set to `value`.
fn again(name: &str, variable: &str, value: &str) {
    let program = std::env::current_exe().expect("this test is a file");
    let output = Command::new(program)
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, value)
        .env(variable, value)
        .output()
        .expect("this test can be started");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{variable}={value}: {said}");
}

/// What the child was told, if this is one.
fn told() -> Option<String> {
    std::env::var(CHILD).ok()
}

/// The error names what was looked for, where, and the variable that says where else.
fn names<T>(loaded: encke_cuda::Result<T>, file: &str, variable: &str) {
    let error = loaded.err().expect("there is no such library");
    let words = error.to_string();
    assert!(matches!(error, Error::Library { .. }), "{words}");
    assert!(words.contains(file) && words.contains(variable), "{words}");
}

fn text_file() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), "not a library").expect("a temporary file can be written");
    file
}

#[test]
fn nccl_that_is_missing_or_no_library_is_named() {
    match told() {
        Some(file) => names(Nccl::load(), &file, "ENCKE_NCCL"),
        None => {
            let text = text_file();
            let text = text.path().to_str().expect("a plain name");
            for file in ["/nonexistent/libnccl.so.2", text] {
                again(
                    "nccl_that_is_missing_or_no_library_is_named",
                    "ENCKE_NCCL",
                    file,
                );
            }
        }
    }
}

#[test]
fn a_library_that_is_not_nccl_lacks_a_function() {
    match told() {
        Some(_) => {
            let error = Nccl::load().err().expect("the C library is not NCCL");
            let lacking =
                matches!(&error, Error::Function { function, .. } if function == "ncclGetVersion");
            assert!(lacking, "{error}");
        }
        None => again(
            "a_library_that_is_not_nccl_lacks_a_function",
            "ENCKE_NCCL",
            "libc.so.6",
        ),
    }
}

#[test]
fn a_compiler_that_is_missing_is_named() {
    match told() {
        Some(file) => names(Nvrtc::load(), &file, "ENCKE_NVRTC"),
        None => again(
            "a_compiler_that_is_missing_is_named",
            "ENCKE_NVRTC",
            "/nonexistent/libnvrtc.so",
        ),
    }
}

#[test]
fn a_driver_that_is_missing_is_named() {
    match told() {
        Some(file) => names(Device::open(0), &file, "ENCKE_LIBCUDA"),
        None => again(
            "a_driver_that_is_missing_is_named",
            "ENCKE_LIBCUDA",
            "/nonexistent/libcuda.so",
        ),
    }
}
