//! Files that several processes hold: each of them can keep the file.
#![cfg(unix)]

use std::fs;
use std::io::Write;
#[cfg(target_os = "linux")]
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use encke_files::{AtomicFile, ExpectedFile};

fn created(target: &Path) -> AtomicFile {
    let file = AtomicFile::create(target).unwrap();
    (&mut file.file()).write_all(b"contents").unwrap();
    file
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let mut names: Vec<_> = entries
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_dropped_file_leaves_nothing_and_a_kept_one_only_itself() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("x");
    drop(created(&target));
    assert!(names(folder.path()).is_empty());
    created(&target).keep().unwrap();
    created(&target).keep().unwrap();
    assert_eq!(names(folder.path()), ["x"]);
    assert_eq!(fs::read(&target).unwrap(), b"contents");
}

/// As after SIGKILL: nothing of this process runs, the system closes the file.
#[cfg(target_os = "linux")]
#[test]
fn a_file_that_is_neither_kept_nor_dropped_has_no_name() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("x");
    std::mem::forget(created(&target));
    std::mem::forget(AtomicFile::create_private(&target).unwrap());
    assert!(names(folder.path()).is_empty());
    // Also where it replaces another one, whose mode it then gets.
    fs::write(&target, b"before").unwrap();
    fs::set_permissions(&target, PermissionsExt::from_mode(0o640)).unwrap();
    std::mem::forget(created(&target));
    assert_eq!(names(folder.path()), ["x"]);
    assert_eq!(fs::read(&target).unwrap(), b"before");
    created(&target).keep().unwrap();
    assert_eq!(names(folder.path()), ["x"]);
    assert_eq!(fs::read(&target).unwrap(), b"contents");
    let mode = fs::metadata(&target).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
}

/// The file of another process of the job.
fn joined(creator: &mut AtomicFile, target: &Path) -> AtomicFile {
    let path = creator.announce();
    let expected = ExpectedFile::new(path.clone()).unwrap();
    creator.give_path(path).unwrap();
    expected.open(target).unwrap()
}

#[test]
fn a_joined_file_is_kept_by_either_process() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("x");
    for creator_keeps in [true, false] {
        let mut creator = created(&target);
        let other = joined(&mut creator, &target);
        let (first, second) = match creator_keeps {
            true => (creator, other),
            false => (other, creator),
        };
        first.keep().unwrap();
        // The second finds that it has been done.
        second.keep().unwrap();
        assert_eq!(names(folder.path()), ["x"]);
        assert_eq!(fs::read(&target).unwrap(), b"contents");
        fs::remove_file(&target).unwrap();
    }
}

/// SIGKILL of the process that creates the file, once it has its path and before: the others, which
/// know the path, leave nothing behind.
#[test]
fn a_file_whose_process_is_killed_is_removed_by_those_that_expect_it() {
    let folder = tempfile::tempdir().unwrap();
    for has_path in [true, false] {
        let mut killed = created(&folder.path().join("x"));
        let path = killed.announce();
        let expected = ExpectedFile::new(path.clone()).unwrap();
        if has_path {
            killed.give_path(path).unwrap();
            assert_eq!(names(folder.path()).len(), 1);
        }
        std::mem::forget(killed);
        drop(expected);
        assert!(names(folder.path()).is_empty());
    }
}

/// A process that is killed removes the file; those that survive still have it open.
#[test]
fn a_file_that_a_killed_process_removed_is_kept_by_a_survivor() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("x");
    let mut killed = created(&target);
    let survivor = joined(&mut killed, &target);
    drop(killed);
    assert!(names(folder.path()).is_empty());
    survivor.keep().unwrap();
    assert_eq!(names(folder.path()), ["x"]);
    assert_eq!(fs::read(&target).unwrap(), b"contents");
}
