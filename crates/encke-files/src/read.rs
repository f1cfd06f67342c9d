//! The one reader of files from outside.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::path::Path;

/// Opens a regular file; a pipe, a device or a folder is refused, without waiting for it.
pub fn open(path: &Path) -> io::Result<File> {
    // Before it is opened, because opening a device has effects; after it, because the name may
    // belong to another file by then.
    require_regular(&fs::metadata(path)?)?;
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(
        &mut options,
        libc::O_NONBLOCK | libc::O_NOCTTY,
    );
    let file = options.open(path)?;
    require_regular(&file.metadata()?)?;
    Ok(file)
}

/// Reads a regular file of at most `limit` bytes.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    read_open(open(path)?, limit)
}

/// Reads a file whose contents are trusted: it must belong to this user or to root, and no other
/// user may be able to write it.
pub fn read_own(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    require_own(&file.metadata()?)?;
    read_open(file, limit)
}

fn read_open(file: File, limit: u64) -> io::Result<Vec<u8>> {
    let length = file.metadata()?.len();
    let mut bytes = Vec::new();
    if length <= limit {
        // Files of the system have no length, and others may grow.
        file.take(limit + 1).read_to_end(&mut bytes)?;
    }
    let length = length.max(bytes.len() as u64);
    match length <= limit {
        true => Ok(bytes),
        false => Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("it has {length} bytes, and such a file has at most {limit}"),
        )),
    }
}

pub(crate) fn require_regular(found: &Metadata) -> io::Result<()> {
    match found.is_file() {
        true => Ok(()),
        false => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is not a regular file",
        )),
    }
}

#[cfg(unix)]
fn require_own(found: &Metadata) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    let (owner, mode) = (found.uid(), found.mode() & 0o777);
    let reason = match owner == crate::system::user() || owner == 0 {
        false => format!("it belongs to user {owner}, neither to this user nor to root"),
        true if mode & 0o022 != 0 => format!("other users may write it (mode {mode:o})"),
        true => return Ok(()),
    };
    Err(io::Error::new(io::ErrorKind::PermissionDenied, reason))
}

#[cfg(not(unix))]
fn require_own(_: &Metadata) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_within_the_limit_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("x");
        fs::write(&file, "12345").unwrap();
        assert_eq!(read(&file, 5).unwrap(), b"12345");
        let error = read(&file, 4).unwrap_err().to_string();
        assert!(
            error.contains("5 bytes") && error.contains("at most 4"),
            "{error}"
        );
        let error = read(folder.path(), 9).unwrap_err().to_string();
        assert!(error.contains("not a regular file"), "{error}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn endless_and_foreign_files_are_refused() {
        use std::os::unix::fs::PermissionsExt;
        for path in ["/dev/zero", "/dev/null", "/dev/tty"] {
            assert!(read(Path::new(path), 9).is_err(), "{path}");
        }
        // A regular file without a length.
        let error = read(Path::new("/proc/self/status"), 9).unwrap_err();
        assert!(error.to_string().contains("at most 9"), "{error}");

        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("x");
        fs::write(&file, "1").unwrap();
        for (mode, trusted) in [(0o600, true), (0o644, true), (0o620, false), (0o602, false)] {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(read_own(&file, 9).is_ok(), trusted, "{mode:o}");
        }
    }
}
