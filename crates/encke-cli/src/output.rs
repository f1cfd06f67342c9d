//! Files that appear whole or not at all: written beside their place, then renamed into it.
//!
//! The decision here: the place is claimed before any work is done, so that an hour of computation
//! does not end in "permission denied".

use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use encke::{DType, Tensor};
use encke_ring::out_of_core::TensorFile;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use tempfile::NamedTempFile;

/// A file on its way. Dropped before [`OutputFile::keep`], it leaves nothing behind.
#[derive(Debug)]
pub struct OutputFile {
    temporary: NamedTempFile,
    path: PathBuf,
}

impl OutputFile {
    /// Claims a place; refused where no file could be put, or where one of `others` is.
    pub fn create(path: &Path, others: &[(&str, &Path)]) -> Result<OutputFile> {
        let shown = path.display();
        if let Ok(there) = fs::metadata(path) {
            // Renaming over a device or a folder would destroy it, or fail at the very end.
            if !there.is_file() {
                bail!("cannot write {shown}: there is something that is not a regular file");
            }
        }
        for (what, other) in others {
            if same_place(path, other)? {
                bail!("{shown} is also {what}; choose another name for the output");
            }
        }
        let mut builder = tempfile::Builder::new();
        builder.prefix(".encke-").suffix(".tmp");
        #[cfg(unix)]
        {
            // As any new file: what the user's mask allows, not private as temporary files are.
            use std::os::unix::fs::PermissionsExt;
            builder.permissions(fs::Permissions::from_mode(0o666));
        }
        let temporary = builder
            .tempfile_in(folder(path))
            .with_context(|| format!("cannot write {shown}"))?;
        Ok(OutputFile {
            temporary,
            path: path.to_path_buf(),
        })
    }

    /// Writes the contents.
    pub fn write(
        &mut self,
        contents: impl FnOnce(&mut dyn Write) -> std::io::Result<()>,
    ) -> Result<()> {
        let mut file = BufWriter::with_capacity(1 << 20, self.temporary.as_file_mut());
        contents(&mut file)
            .and_then(|()| file.flush())
            .with_context(|| format!("cannot write {}", self.path.display()))
    }

    /// A file without a name in the same folder: gone when it is closed.
    pub fn beside(&self) -> Result<fs::File> {
        let file = tempfile::tempfile_in(folder(&self.path));
        file.with_context(|| format!("cannot write beside {}", self.path.display()))
    }

    /// Puts the file in its place, where it replaces what was there.
    pub fn keep(self) -> Result<()> {
        let OutputFile { temporary, path } = self;
        let kept = temporary.persist(&path).map_err(|error| error.error);
        kept.with_context(|| format!("cannot write {}", path.display()))?;
        Ok(())
    }
}

/// The folder a file is in.
fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Whether two paths lead to one place, though either may have nothing there yet.
fn same_place(one: &Path, other: &Path) -> Result<bool> {
    let place = |path: &Path| -> Result<PathBuf> {
        if let Ok(place) = fs::canonicalize(path) {
            return Ok(place);
        }
        let within = folder(path);
        let folder =
            fs::canonicalize(within).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(folder.join(path.file_name().unwrap_or_default()))
    };
    Ok(place(one)? == place(other)?)
}

/// A tensor as a file will hold it.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Its name.
    pub name: &'static str,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its type.
    pub dtype: DType,
}

/// The first bytes of a safetensors file with these tensors, and for each of them the byte at which
/// it begins; the last number is the length of the file.
pub fn layout(entries: &[Entry]) -> std::io::Result<(Vec<u8>, Vec<u64>)> {
    let mut order: Vec<usize> = (0..entries.len()).collect();
    // The format asks for no gaps; the widest type first keeps all of them aligned.
    order.sort_by_key(|&i| (usize::MAX - entries[i].dtype.bytes(), entries[i].name));
    let mut end = 0;
    let mut infos = Vec::new();
    let mut starts = vec![0; entries.len()];
    for i in order {
        let Entry { name, shape, dtype } = &entries[i];
        let start = end;
        end += shape.iter().product::<usize>() * dtype.bytes();
        starts[i] = start;
        let info = TensorInfo {
            dtype: stored(*dtype),
            shape: shape.clone(),
            data_offsets: (start, end),
        };
        infos.push((name.to_string(), info));
    }
    let header = Metadata::new(None, infos).map_err(std::io::Error::other)?;
    let header = serde_json::to_vec(&header)?;
    let padded = header.len().next_multiple_of(8);
    let mut bytes = (padded as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.resize(8 + padded, b' ');
    starts.push(end);
    let data = bytes.len();
    Ok((
        bytes,
        starts.into_iter().map(|at| (data + at) as u64).collect(),
    ))
}

impl OutputFile {
    /// Gives the file its header and its full length, and says where each tensor lies in it.
    pub fn prepare(&self, entries: &[Entry]) -> Result<Vec<TensorFile>> {
        let shown = || format!("cannot write {}", self.path.display());
        let file = self.temporary.as_file().try_clone().with_context(shown)?;
        let (header, starts) = layout(entries).with_context(shown)?;
        (&file).write_all(&header).with_context(shown)?;
        let length = starts.last().copied().unwrap_or_default();
        file.set_len(length).with_context(shown)?;
        Ok(places(file, entries, starts))
    }

    /// Where it is until it is kept, for other processes that write to it.
    #[cfg(feature = "mpi")]
    pub fn temporary(&self) -> &Path {
        self.temporary.path()
    }
}

/// Where tensors lie in a file that another process has prepared.
#[cfg(feature = "mpi")]
pub fn prepared(path: &Path, entries: &[Entry]) -> Result<Vec<TensorFile>> {
    let shown = || format!("cannot write {}", path.display());
    let mut open = fs::OpenOptions::new();
    let file = open.read(true).write(true).open(path);
    let file =
        file.with_context(|| format!("{}; all processes must see one folder of outputs", shown()))?;
    let (_, starts) = layout(entries).with_context(shown)?;
    let length = starts.last().copied().unwrap_or_default();
    let there = file.metadata().with_context(shown)?.len();
    if there != length {
        bail!(
            "{} has {there} bytes instead of {length}; use one file system",
            path.display()
        );
    }
    Ok(places(file, entries, starts))
}

fn places(file: fs::File, entries: &[Entry], starts: Vec<u64>) -> Vec<TensorFile> {
    let file = Arc::new(file);
    let tensor = |(entry, offset): (&Entry, u64)| TensorFile {
        file: Arc::clone(&file),
        offset,
        dtype: entry.dtype,
        dims: match entry.shape[..] {
            [b, n, h, d] => [b, n, h, d],
            [b, n, h] => [b, n, h, 1],
            _ => [1, 1, 1, entry.shape.iter().product()],
        },
    };
    entries.iter().zip(starts).map(tensor).collect()
}

/// Writes tensors in the safetensors format, straight from where they lie.
pub fn write_tensors(
    to: &mut dyn Write,
    tensors: &[(&'static str, Vec<usize>, &Tensor)],
) -> std::io::Result<()> {
    let entry = |(name, shape, tensor): &(&'static str, Vec<usize>, &Tensor)| Entry {
        name,
        shape: shape.clone(),
        dtype: tensor.dtype(),
    };
    let (header, starts) = layout(&tensors.iter().map(entry).collect::<Vec<_>>())?;
    to.write_all(&header)?;
    let mut order: Vec<_> = tensors.iter().zip(starts).collect();
    order.sort_by_key(|(_, start)| *start);
    for ((_, _, tensor), _) in order {
        to.write_all(tensor.data().bytes())?;
    }
    Ok(())
}

fn stored(dtype: DType) -> Dtype {
    match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::Bf16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
    }
}
