//! Missing or wrong libraries: the error names the file.
//!
//! The search depends on the environment, so each case runs in a child process: this test again,
//! with a variable that marks it as the child.

use std::process::Command;

use encke_cuda::{Device, Error, Nccl, Nvrtc};

const CHILD: &str = "ENCKE_TEST_CHILD";

/// Runs the test `name` again with `variable` set to `value`.
fn run_child(name: &str, variable: &str, value: &str) {
    let program = std::env::current_exe().expect("this test is a file");
    let output = Command::new(program)
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, value)
        .env(variable, value)
        .output()
        .expect("this test can be started");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{variable}={value}: {errors}");
}

/// The file under test, if this is the child.
fn child() -> Option<String> {
    std::env::var(CHILD).ok()
}

/// Asserts that the error names the file and the environment variable.
fn assert_names<T>(loaded: encke_cuda::Result<T>, file: &str, variable: &str) {
    let error = loaded.err().expect("there is no such library");
    let text = error.to_string();
    assert!(matches!(error, Error::Library { .. }), "{text}");
    assert!(text.contains(file) && text.contains(variable), "{text}");
}

fn text_file() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), "not a library").expect("a temporary file can be written");
    file
}

#[test]
fn the_error_for_a_missing_or_invalid_nccl_names_the_file() {
    match child() {
        Some(file) => assert_names(Nccl::load(), &file, "ENCKE_NCCL"),
        None => {
            let text = text_file();
            let text = text.path().to_str().expect("a plain name");
            for file in ["/nonexistent/libnccl.so.2", text] {
                run_child(
                    "the_error_for_a_missing_or_invalid_nccl_names_the_file",
                    "ENCKE_NCCL",
                    file,
                );
            }
        }
    }
}

#[test]
fn a_library_that_is_not_nccl_is_refused_for_a_missing_function() {
    match child() {
        Some(_) => {
            let error = Nccl::load().err().expect("the C library is not NCCL");
            let lacking =
                matches!(&error, Error::Function { function, .. } if function == "ncclGetVersion");
            assert!(lacking, "{error}");
        }
        None => run_child(
            "a_library_that_is_not_nccl_is_refused_for_a_missing_function",
            "ENCKE_NCCL",
            "libc.so.6",
        ),
    }
}

#[test]
fn the_error_for_a_missing_nvrtc_names_the_file() {
    match child() {
        Some(file) => assert_names(Nvrtc::load(), &file, "ENCKE_NVRTC"),
        None => run_child(
            "the_error_for_a_missing_nvrtc_names_the_file",
            "ENCKE_NVRTC",
            "/nonexistent/libnvrtc.so",
        ),
    }
}

#[test]
fn the_error_for_a_missing_driver_names_the_file() {
    match child() {
        Some(file) => assert_names(Device::open(0), &file, "ENCKE_LIBCUDA"),
        None => run_child(
            "the_error_for_a_missing_driver_names_the_file",
            "ENCKE_LIBCUDA",
            "/nonexistent/libcuda.so",
        ),
    }
}
