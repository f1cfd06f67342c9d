//! Where outputs go: links, modes, what is not a file, and a standard output that is closed.
#![cfg(unix)]

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::process::Stdio;

use crate::command::{CommandFolder, text};
use crate::files;

const SIMULATE: &str = "simulate --tokens 64 --heads 1 --dim 8 --ranks 2";

/// A folder with an input.
fn folder() -> CommandFolder {
    let folder = CommandFolder::new();
    files::write(&folder.join("in"), &files::small());
    folder
}

#[test]
fn a_link_is_followed_and_stays() {
    let folder = folder();
    fs::create_dir(folder.join("far")).unwrap();
    fs::write(folder.join("far/old"), "old").unwrap();
    symlink("far/old", folder.join("to-old")).unwrap();
    symlink("to-old", folder.join("twice")).unwrap();
    symlink("far/new", folder.join("to-new")).unwrap();
    symlink("circle", folder.join("circle")).unwrap();
    for (output, target) in [
        ("to-old", "far/old"),
        ("twice", "far/old"),
        ("to-new", "far/new"),
    ] {
        folder.succeeds(&format!("attend in -o {output}"));
        assert!(folder.join(output).is_symlink(), "{output}");
        assert_eq!(files::read(&folder.join(target)).len(), 2, "{output}");
        fs::write(folder.join(target), "old").unwrap();
    }
    folder.succeeds(&format!("{SIMULATE} --json to-old --trace to-new"));
    assert!(fs::read(folder.join("far/old")).unwrap().starts_with(b"{"));
    let before = folder.names();
    folder.refuses("attend in -o circle", &["cannot write circle"]);
    // A link to the input is the input.
    symlink("in", folder.join("to-in")).unwrap();
    folder.refuses("attend in -o to-in", &["also the input"]);
    assert_eq!(folder.names().len(), before.len() + 1);
    assert_eq!(fs::read_dir(folder.join("far")).unwrap().count(), 2);
}

#[test]
fn a_file_keeps_its_mode_and_a_new_one_has_that_of_the_umask() {
    let folder = folder();
    let mode = |name: &str| folder.join(name).metadata().unwrap().mode() & 0o7777;
    for kept in [0o600, 0o640, 0o644, 0o666, 0o777] {
        fs::write(folder.join("out"), "").unwrap();
        fs::set_permissions(folder.join("out"), fs::Permissions::from_mode(kept)).unwrap();
        folder.succeeds("attend in -o out");
        assert_eq!(mode("out"), kept, "{kept:o}");
    }
    for (umask, expected) in [("0", 0o666), ("077", 0o600), ("022", 0o644)] {
        let _ = fs::remove_file(folder.join("out"));
        let mut shell = folder.command("attend in -o out");
        let program = shell.get_program().to_owned();
        shell = std::process::Command::new("sh");
        shell.current_dir(folder.path());
        shell.args([
            "-c",
            &format!("umask {umask}; exec \"$0\" attend in -o out"),
        ]);
        assert!(shell.arg(program).output().unwrap().status.success());
        assert_eq!(mode("out"), expected, "{umask}");
    }
    assert_eq!(folder.names(), ["in", "out"]);
}

#[test]
fn what_is_not_a_regular_file_is_refused_and_stays() {
    let folder = folder();
    let made = std::process::Command::new("mkfifo")
        .arg(folder.join("fifo"))
        .status();
    assert!(made.unwrap().success());
    fs::create_dir(folder.join("folder")).unwrap();
    symlink("/dev/null", folder.join("null")).unwrap();
    symlink("/proc/self/fd/1", folder.join("one")).unwrap();
    let places = [
        "fifo",
        "folder",
        "null",
        "one",
        "/dev/null",
        "/dev/stdout",
        "/dev/fd/2",
    ];
    for place in places.into_iter().chain(["/dev/full", "/proc/self/fd/1"]) {
        for command in [
            format!("attend in -o {place}"),
            format!("attend in -o o --trace {place}"),
            format!("generate {place} --tokens 8 --heads 1 --dim 8"),
            format!("{SIMULATE} --json {place}"),
            format!("{SIMULATE} --trace {place}"),
            format!("billion --tokens 1k --record {place}"),
        ] {
            folder.refuses(&command, &[&format!("cannot write {place}: it is ")]);
        }
    }
    assert!(folder.join("null").is_symlink() && folder.join("one").is_symlink());
}

/// The same, where standard output is a regular file that a link of /dev leads to.
#[test]
fn the_link_of_standard_output_is_not_replaced() {
    let folder = folder();
    for place in ["/dev/stdout", "/proc/self/fd/1"] {
        let to = fs::File::create(folder.join("redirected")).unwrap();
        let mut command = folder.command(&format!("attend in -o {place}"));
        let ended = command.stdout(to).output().unwrap();
        assert_eq!(ended.status.code(), Some(2), "{}", text(&ended.stderr));
        assert!(fs::symlink_metadata("/dev/stdout").unwrap().is_symlink());
    }
    assert_eq!(folder.names(), ["in", "redirected"]);
}

#[test]
fn files_are_written_though_standard_output_is_closed() {
    let folder = CommandFolder::new();
    for (command, files) in [
        ("billion --tokens 4k --record r.json", &["r.json"][..]),
        (
            "profile --tokens 64 --heads 1 --dim 8 --ranks 2 --csv p.csv --json p.json",
            &["p.csv", "p.json"],
        ),
        (
            &format!("{SIMULATE} --json s.json --trace t.json"),
            &["s.json", "t.json"],
        ),
        ("plan --tokens 64 --heads 1 --dim 8 --ranks 2", &[]),
    ] {
        let mut child = folder.command(command);
        child.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = child.spawn().unwrap();
        drop(child.stdout.take());
        let ended = child.wait_with_output().unwrap();
        let stderr = text(&ended.stderr);
        assert_eq!(ended.status.code(), Some(0), "{command}: {stderr}");
        assert!(stderr.is_empty(), "{command}: {stderr}");
        assert_eq!(folder.names(), files, "{command}");
        for file in files {
            assert!(folder.join(file).metadata().unwrap().len() > 0, "{command}");
            fs::remove_file(folder.join(file)).unwrap();
        }
    }
    // What cannot be written at all is an error, after the files.
    let full = fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let mut command = folder.command("billion --tokens 4k --record r.json");
    let ended = command.stdout(full).output().unwrap();
    assert_eq!(ended.status.code(), Some(2));
    assert_eq!(folder.names(), ["r.json"]);
}
