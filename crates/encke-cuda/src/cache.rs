//! A cache of machine code on disk, so that a program is compiled once, not once per process.
//!
//! A file is named by a hash of everything its contents depend on and ends with a checksum. It
//! holds code that will run, so it is written for this user alone. A file that is damaged,
//! truncated, another user's or open to others is rebuilt and replaced. The cache can always be
//! deleted.

use std::io::Write;
use std::path::{Path, PathBuf};

use encke_core::host::checksum;
use encke_files::AtomicFile;

use crate::nvrtc::CompiledProgram;

const MAGIC: &[u8; 8] = b"encke\x00c1";
/// The most bytes of a program.
const LIMIT: u64 = 64 << 20;

/// A folder of compiled programs.
#[derive(Debug, Clone)]
pub struct Cache {
    folder: Option<PathBuf>,
}

impl Cache {
    /// The user's cache: `ENCKE_CACHE`, or `encke` in the system's cache folder. Without either,
    /// nothing is cached.
    pub fn of_user() -> Cache {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let own = set("ENCKE_CACHE").map(PathBuf::from);
        let system = || set("XDG_CACHE_HOME").map(|root| Path::new(&root).join("encke"));
        let home = || set("HOME").map(|root| Path::new(&root).join(".cache").join("encke"));
        Cache {
            folder: own.or_else(system).or_else(home),
        }
    }

    /// A cache in this folder.
    pub fn at(folder: &Path) -> Cache {
        Cache {
            folder: Some(folder.into()),
        }
    }

    /// The cached program under `key`, or the one that `build` compiles, which is then cached.
    pub fn get<E>(
        &self,
        name: &str,
        key: &[&str],
        build: impl FnOnce() -> Result<CompiledProgram, E>,
    ) -> Result<CompiledProgram, E> {
        let Some(folder) = &self.folder else {
            return build();
        };
        let key = checksum(key.join("\0").as_bytes());
        let file = folder.join(format!("{name}-{key:016x}.cubin"));
        if let Some(built) = encke_files::read_own(&file, LIMIT)
            .ok()
            .and_then(|bytes| decode(&bytes, key))
        {
            return Ok(built);
        }
        let built = build()?;
        // If the cache cannot be written, the next process compiles again.
        let _ = write(&file, &encode(&built, key));
        Ok(built)
    }
}

/// Writes a file for this user alone.
fn write(file: &Path, bytes: &[u8]) -> std::io::Result<()> {
    encke_files::create_private_folder(encke_files::folder(file))?;
    let written = AtomicFile::create_private(file)?;
    (&mut written.file()).write_all(bytes)?;
    written.keep()
}

fn encode(built: &CompiledProgram, key: u64) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(key.to_le_bytes());
    bytes.extend((built.log.len() as u64).to_le_bytes());
    bytes.extend(built.log.as_bytes());
    bytes.extend(&built.cubin);
    bytes.extend(checksum(&bytes).to_le_bytes());
    bytes
}

fn decode(bytes: &[u8], key: u64) -> Option<CompiledProgram> {
    let (body, sum) = bytes.split_last_chunk::<8>()?;
    if checksum(body) != u64::from_le_bytes(*sum) {
        return None;
    }
    let body = body.strip_prefix(MAGIC)?;
    let (own, body) = body.split_first_chunk::<8>()?;
    let (log, body) = body.split_first_chunk::<8>()?;
    if u64::from_le_bytes(*own) != key {
        return None;
    }
    let (log, cubin) = body.split_at_checked(u64::from_le_bytes(*log) as usize)?;
    Some(CompiledProgram {
        log: String::from_utf8(log.to_vec()).ok()?,
        cubin: cubin.to_vec(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    fn made(cubin: &[u8]) -> Result<CompiledProgram, Infallible> {
        Ok(CompiledProgram {
            cubin: cubin.to_vec(),
            log: "clean".into(),
        })
    }

    #[test]
    fn a_cached_program_is_found_and_a_damaged_one_is_rebuilt() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path());
        let key = ["text", "options", "13.0"];
        assert_eq!(
            cache.get("x", &key, || made(b"code")).unwrap().cubin,
            b"code"
        );
        let found = cache.get("x", &key, || made(b"other")).unwrap();
        assert_eq!(
            (found.cubin.as_slice(), found.log.as_str()),
            (&b"code"[..], "clean")
        );
        let other = ["text", "options", "13.1"];
        assert_eq!(
            cache.get("x", &other, || made(b"new")).unwrap().cubin,
            b"new"
        );

        let files = || {
            std::fs::read_dir(folder.path())
                .unwrap()
                .map(|x| x.unwrap().path())
        };
        assert_eq!(files().count(), 2, "no temporary file is left");
        for file in files() {
            let whole = std::fs::read(&file).unwrap();
            for at in 0..whole.len() {
                let mut damaged = whole.clone();
                damaged[at] ^= 0x20;
                std::fs::write(&file, &damaged).unwrap();
                let name = if whole.windows(4).any(|x| x == b"code") {
                    &key
                } else {
                    &other
                };
                assert_eq!(
                    cache.get("x", name, || made(b"again")).unwrap().cubin,
                    b"again"
                );
                std::fs::write(&file, &whole[..at]).unwrap();
                assert_eq!(
                    cache.get("x", name, || made(b"short")).unwrap().cubin,
                    b"short"
                );
            }
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_program_that_others_can_write_is_rebuilt() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("cache");
        let cache = Cache::at(&folder);
        let get = |cubin: &[u8]| cache.get("x", &["key"], || made(cubin)).unwrap().cubin;
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(get(b"first"), b"first");
        assert_eq!(mode(&folder), 0o700);
        let file = folder.read_dir().unwrap().next().unwrap().unwrap().path();
        assert_eq!(mode(&file), 0o600);
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o666)).unwrap();
        assert_eq!(get(b"second"), b"second");
        assert_eq!(mode(&file), 0o600);
        // A link is replaced, not followed.
        let other = root.path().join("other");
        std::fs::write(&other, "mine").unwrap();
        std::fs::remove_file(&file).unwrap();
        symlink(&other, &file).unwrap();
        assert_eq!(get(b"third"), b"third");
        assert_eq!(std::fs::read(&other).unwrap(), b"mine");
        assert!(!file.is_symlink());
    }

    #[test]
    fn without_a_folder_nothing_is_cached() {
        let cache = Cache { folder: None };
        assert_eq!(cache.get("x", &[], || made(b"a")).unwrap().cubin, b"a");
        assert_eq!(cache.get("x", &[], || made(b"b")).unwrap().cubin, b"b");
    }
}
