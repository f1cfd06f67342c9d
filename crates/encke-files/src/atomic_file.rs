//! Files that appear complete or not at all: a temporary file in the folder of the target, renamed
//! at the end. Where the system can, it has no name until then, so that not even SIGKILL leaves it
//! behind.
//!
//! The decision here: a link is followed, and the file it leads to is replaced, with its mode. What
//! cannot be replaced by a rename (a pipe, a device, an open file by its number) is refused.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
#[cfg(unix)]
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use crate::read::require_regular;
use crate::system;
use crate::temporaries::Temporary;

/// Links from one path to the next, as many as Linux follows.
const MOST_LINKS: usize = 40;

/// A file being written. Dropped before [`AtomicFile::keep`], it leaves nothing behind.
#[derive(Debug)]
pub struct AtomicFile {
    file: File,
    /// Its name, if it has one.
    temporary: Option<Temporary>,
    target: PathBuf,
}

impl AtomicFile {
    /// A file that will replace the one at `path`, with its mode, or be a new one. Refused if the
    /// one at `path` may not be written.
    pub fn create(path: &Path) -> io::Result<AtomicFile> {
        let target = follow_links(path)?;
        let replaced = match fs::metadata(&target) {
            Ok(found) => {
                require_regular(&found)?;
                Some(OpenOptions::new().write(true).open(&target)?.metadata()?)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        #[cfg(unix)]
        let mode = replaced
            .as_ref()
            .map_or(0o666, |found| found.mode() & 0o777);
        #[cfg(not(unix))]
        let mode = 0;
        let created = AtomicFile::create_with(target, mode)?;
        #[cfg(unix)]
        if let Some(found) = replaced {
            created.take_over(&found, mode)?;
        }
        Ok(created)
    }

    /// A file that only this user can read and write, whatever was at `path`.
    pub fn create_private(path: &Path) -> io::Result<AtomicFile> {
        AtomicFile::create_with(path.to_path_buf(), 0o600)
    }

    fn create_with(target: PathBuf, mode: u32) -> io::Result<AtomicFile> {
        // What cannot be written gets its error from the file with a name.
        match system::unnamed_file(folder(&target), mode) {
            Ok(file) => Ok(AtomicFile {
                file,
                temporary: None,
                target,
            }),
            Err(_) => AtomicFile::create_named(target, mode),
        }
    }

    fn create_named(target: PathBuf, mode: u32) -> io::Result<AtomicFile> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true);
        #[cfg(unix)]
        options.mode(mode);
        #[cfg(not(unix))]
        let _ = mode;
        let (temporary, file) = Temporary::create(folder(&target), |path| options.open(path))?;
        Ok(AtomicFile {
            file,
            temporary: Some(temporary),
            target,
        })
    }

    /// Gives the new file the owner, the group and the mode of the one it replaces, as far as this
    /// user may.
    #[cfg(unix)]
    fn take_over(&self, replaced: &fs::Metadata, mode: u32) -> io::Result<()> {
        let created = self.file.metadata()?;
        let (owner, group) = (replaced.uid(), replaced.gid());
        let same_group = group == created.gid() || fchown(&self.file, None, Some(group)).is_ok();
        // What a group was allowed is not allowed to another one.
        let mode = if same_group { mode } else { mode & 0o707 };
        self.file
            .set_permissions(fs::Permissions::from_mode(mode))?;
        if owner != created.uid() {
            let _ = fchown(&self.file, Some(owner), None);
        }
        Ok(())
    }

    /// The file, open to read and write.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The path that it has until it is kept, or may get, for other processes that write to it.
    pub fn announce(&self) -> PathBuf {
        match &self.temporary {
            Some(temporary) => temporary.path().to_path_buf(),
            None => Temporary::path_in(folder(&self.target)),
        }
    }

    /// Gives it the path that was announced.
    pub fn give_path(&mut self, path: PathBuf) -> io::Result<()> {
        if self.temporary.is_none() {
            let link = |path: &Path| system::link(&self.file, path);
            self.temporary = Some(Temporary::register(path, link)?.0);
        }
        Ok(())
    }

    /// The folder that it will be in.
    pub fn folder(&self) -> &Path {
        folder(&self.target)
    }

    /// Renames the file to its target.
    pub fn keep(mut self) -> io::Result<()> {
        // A new file gets its name in one step.
        if self.temporary.is_none() && system::link(&self.file, &self.target).is_ok() {
            return Ok(());
        }
        let temporary = self.announce();
        let named = self.give_path(temporary.clone());
        match named.and_then(|()| fs::rename(temporary, &self.target)) {
            #[cfg(unix)]
            Err(error) => self.keep_removed(error),
            ended => ended,
        }
    }

    /// Keeps a file that another process of the job has renamed, or removed when it was killed, and
    /// one that the system does not give a name.
    #[cfg(unix)]
    fn keep_removed(mut self, error: io::Error) -> io::Result<()> {
        let id = |found: fs::Metadata| (found.dev(), found.ino());
        let own = self.file.metadata()?;
        if fs::metadata(&self.target).is_ok_and(|found| id(found) == (own.dev(), own.ino())) {
            return Ok(());
        }
        if own.nlink() > 0 {
            return Err(error);
        }
        let copy = AtomicFile::create_named(self.target.clone(), own.mode() & 0o777)?;
        copy.take_over(&own, own.mode() & 0o777)?;
        io::Seek::rewind(&mut self.file)?;
        io::copy(&mut self.file, &mut &copy.file)?;
        fs::rename(copy.announce(), &copy.target)
    }
}

/// A file that another process of the same job is about to give a path ([`AtomicFile::announce`]).
/// Each of them removes it if it is killed or drops it, so that it is left behind by none, whenever
/// the other one is killed.
#[derive(Debug)]
pub struct ExpectedFile(Temporary);

impl ExpectedFile {
    /// The file that will be at `path`.
    pub fn new(path: PathBuf) -> io::Result<ExpectedFile> {
        Ok(ExpectedFile(Temporary::register(path, |_| Ok(()))?.0))
    }

    /// The file, which has its path now. Any process can keep it as `target`.
    pub fn open(self, target: &Path) -> io::Result<AtomicFile> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).open(self.0.path())?;
        Ok(AtomicFile {
            file,
            temporary: Some(self.0),
            target: follow_links(target)?,
        })
    }
}

/// The folder a file is in.
pub fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Creates a folder, and those it is in, for this user alone.
pub fn create_private_folder(folder: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    builder.mode(0o700);
    builder.create(folder)
}

/// Where a path leads; the last file need not exist. Links of `/proc`, and with them `/dev/stdout`
/// and `/dev/fd`, name open files, which no rename can replace.
fn follow_links(path: &Path) -> io::Result<PathBuf> {
    let refused = |reason| Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    let mut target = path.to_path_buf();
    for _ in 0..MOST_LINKS {
        let Ok(next) = fs::read_link(&target) else {
            return Ok(target);
        };
        if fs::canonicalize(folder(&target))?.starts_with("/proc") {
            return refused("it is an open file, not a path; write a file and read that");
        }
        target = folder(&target).join(next);
    }
    refused("its links lead in a circle")
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::io::Write;

    use super::*;

    /// As on a file system that has files without a name, and gives them none.
    #[test]
    fn a_file_that_cannot_be_named_is_copied() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("x");
        for _ in 0..2 {
            let unnamable = libc::O_TMPFILE | libc::O_EXCL;
            let mut options = OpenOptions::new();
            options.read(true).write(true).mode(0o604);
            let mut file = options.custom_flags(unnamable).open(folder.path()).unwrap();
            file.write_all(b"contents").unwrap();
            let written = AtomicFile {
                file,
                temporary: None,
                target: target.clone(),
            };
            written.keep().unwrap();
            assert_eq!(fs::read(&target).unwrap(), b"contents");
            assert_eq!(fs::metadata(&target).unwrap().mode() & 0o777, 0o604);
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        }
    }
}
