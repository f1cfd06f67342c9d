//! Output files that appear complete or not at all: a temporary file in the same folder, renamed at
//! the end.
//!
//! The decision here: the temporary file is created before any work is done, so that an hour of
//! computation does not end in "permission denied".

use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use encke::{DType, Tensor};
use encke_ring::out_of_core::TensorFile;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Serialize;
use tempfile::NamedTempFile;

/// A file being written. Dropped before [`OutputFile::keep`], it leaves nothing behind.
#[derive(Debug)]
pub struct OutputFile {
    temporary: NamedTempFile,
    path: PathBuf,
}

impl OutputFile {
    /// Creates the temporary file; refused if the file could not be renamed to `path`, or if `path`
    /// is one of `others`, each with a description for the error.
    pub fn create(path: &Path, others: &[(&str, &Path)]) -> Result<OutputFile> {
        let shown = path.display();
        if let Ok(there) = fs::metadata(path) {
            // Renaming over a device or a folder would destroy it, or fail at the end.
            if !there.is_file() {
                bail!("cannot write {shown}: it exists and is not a regular file");
            }
        }
        for (what, other) in others {
            if same_file(path, other)? {
                bail!("{shown} is also {what}; choose another name for the output");
            }
        }
        let mut builder = tempfile::Builder::new();
        builder.prefix(".encke-").suffix(".tmp");
        #[cfg(unix)]
        {
            // The mode of any new file under the user's umask; temporary files default to 0600.
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

    /// Creates the temporary file if there is a path.
    pub fn create_optional(
        path: Option<&Path>,
        others: &[(&str, &Path)],
    ) -> Result<Option<OutputFile>> {
        path.map(|path| OutputFile::create(path, others))
            .transpose()
    }

    /// Writes a value as indented JSON to a file, if there is one, and renames it to its path.
    pub fn write_json(file: Option<OutputFile>, value: &impl Serialize) -> Result<()> {
        let Some(mut file) = file else { return Ok(()) };
        file.write(|to| {
            serde_json::to_writer_pretty(&mut *to, value)?;
            writeln!(to)
        })?;
        file.keep()
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

    /// An unnamed temporary file in the same folder; it is deleted when it is closed.
    pub fn scratch_file(&self) -> Result<fs::File> {
        let file = tempfile::tempfile_in(folder(&self.path));
        file.with_context(|| format!("cannot write beside {}", self.path.display()))
    }

    /// Renames the file to its path, where it replaces an existing file.
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

/// Whether two paths name the same file; neither needs to exist.
fn same_file(one: &Path, other: &Path) -> Result<bool> {
    let absolute = |path: &Path| -> Result<PathBuf> {
        if let Ok(absolute) = fs::canonicalize(path) {
            return Ok(absolute);
        }
        let within = folder(path);
        let folder =
            fs::canonicalize(within).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(folder.join(path.file_name().unwrap_or_default()))
    };
    Ok(absolute(one)? == absolute(other)?)
}

/// Name, shape and type of a tensor in an output file.
#[derive(Debug, Clone)]
pub struct TensorEntry {
    /// Its name.
    pub name: &'static str,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its type.
    pub dtype: DType,
}

/// The header of a safetensors file with these tensors, and the offset of each tensor in the file,
/// followed by the length of the file.
pub fn layout(entries: &[TensorEntry]) -> std::io::Result<(Vec<u8>, Vec<u64>)> {
    let mut order: Vec<usize> = (0..entries.len()).collect();
    // The format allows no gaps; with the widest type first, all tensors are aligned.
    order.sort_by_key(|&i| (usize::MAX - entries[i].dtype.bytes(), entries[i].name));
    let mut end = 0;
    let mut infos = Vec::new();
    let mut starts = vec![0; entries.len()];
    for i in order {
        let TensorEntry { name, shape, dtype } = &entries[i];
        let start = end;
        end += shape.iter().product::<usize>() * dtype.bytes();
        starts[i] = start;
        let info = TensorInfo {
            dtype: stored_type(*dtype),
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
    /// Writes the header and sets the full length; returns each tensor as a range of the file.
    pub fn prepare(&self, entries: &[TensorEntry]) -> Result<Vec<TensorFile>> {
        let shown = || format!("cannot write {}", self.path.display());
        let file = self.temporary.as_file().try_clone().with_context(shown)?;
        let (header, starts) = layout(entries).with_context(shown)?;
        (&file).write_all(&header).with_context(shown)?;
        let length = starts.last().copied().unwrap_or_default();
        file.set_len(length).with_context(shown)?;
        Ok(tensor_files(file, entries, starts))
    }

    /// The path of the temporary file, for other processes that write to it.
    pub fn temporary(&self) -> &Path {
        self.temporary.path()
    }
}

/// The tensors of a file that another process has prepared.
pub fn prepared(path: &Path, entries: &[TensorEntry]) -> Result<Vec<TensorFile>> {
    let shown = || format!("cannot write {}", path.display());
    let mut open = fs::OpenOptions::new();
    let file = open.read(true).write(true).open(path);
    let file = file
        .with_context(|| format!("{}; all processes must see the same output folder", shown()))?;
    let (_, starts) = layout(entries).with_context(shown)?;
    let length = starts.last().copied().unwrap_or_default();
    let found = file.metadata().with_context(shown)?.len();
    if found != length {
        bail!(
            "{} has {found} bytes instead of {length}; use one file system",
            path.display()
        );
    }
    Ok(tensor_files(file, entries, starts))
}

fn tensor_files(file: fs::File, entries: &[TensorEntry], starts: Vec<u64>) -> Vec<TensorFile> {
    let file = Arc::new(file);
    let tensor = |(entry, offset): (&TensorEntry, u64)| TensorFile {
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

/// Writes tensors in the safetensors format, without copying them.
pub fn write_tensors(
    to: &mut dyn Write,
    tensors: &[(&'static str, Vec<usize>, &Tensor)],
) -> std::io::Result<()> {
    let entry = |(name, shape, tensor): &(&'static str, Vec<usize>, &Tensor)| TensorEntry {
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

fn stored_type(dtype: DType) -> Dtype {
    match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::Bf16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
    }
}
