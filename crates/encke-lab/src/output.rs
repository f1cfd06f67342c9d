//! Output files, which appear complete or not at all ([`AtomicFile`]), and tensors in them.
//!
//! The decision here: the temporary file is created before any work is done, so that an hour of
//! computation does not end in "permission denied".

use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use encke::{DType, Tensor};
use encke_files::{AtomicFile, ExpectedFile, folder};
use encke_ring::out_of_core::TensorFile;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Serialize;

/// A file being written. Dropped before [`OutputFile::keep`], it leaves nothing behind.
#[derive(Debug)]
pub struct OutputFile {
    written: AtomicFile,
    path: PathBuf,
}

impl OutputFile {
    /// Creates the temporary file; refused if the file could not be renamed to `path`, or if `path`
    /// is one of `others`, each with a description for the error.
    pub fn create(path: &Path, others: &[(&str, &Path)]) -> Result<OutputFile> {
        for (what, other) in others {
            if same_file(path, other)? {
                bail!(
                    "{} is also {what}; choose another name for the output",
                    path.display()
                );
            }
        }
        OutputFile::new(path, AtomicFile::create(path))
    }

    /// Creates a file that only this user can read and write, in a folder that is created if
    /// necessary.
    pub fn create_private(path: &Path) -> Result<OutputFile> {
        let created = encke_files::create_private_folder(folder(path));
        OutputFile::new(
            path,
            created.and_then(|()| AtomicFile::create_private(path)),
        )
    }

    /// The file that another process of this job has given its path.
    pub fn join(path: &Path, expected: ExpectedFile) -> Result<OutputFile> {
        OutputFile::new(path, expected.open(path))
            .context("all processes must see the same output folder")
    }

    fn new(path: &Path, written: std::io::Result<AtomicFile>) -> Result<OutputFile> {
        let path = path.to_path_buf();
        let written = written.with_context(|| format!("cannot write {}", path.display()))?;
        Ok(OutputFile { written, path })
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
        let mut file = BufWriter::with_capacity(1 << 20, self.written.file());
        contents(&mut file)
            .and_then(|()| file.flush())
            .with_context(|| format!("cannot write {}", self.path.display()))
    }

    /// An unnamed temporary file in the same folder; it is deleted when it is closed.
    pub fn scratch_file(&self) -> Result<fs::File> {
        let file = tempfile::tempfile_in(self.written.folder());
        file.with_context(|| format!("cannot write beside {}", self.path.display()))
    }

    /// Renames the file to its path, where it replaces an existing file.
    pub fn keep(self) -> Result<()> {
        let OutputFile { written, path } = self;
        let kept = written.keep();
        kept.with_context(|| format!("cannot write {}", path.display()))
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
        let file = self.written.file().try_clone().with_context(shown)?;
        let (header, starts) = layout(entries).with_context(shown)?;
        (&file).write_all(&header).with_context(shown)?;
        let length = starts.last().copied().unwrap_or_default();
        file.set_len(length).with_context(shown)?;
        Ok(tensor_files(file, entries, starts))
    }

    /// The tensors of the file after another process has prepared it.
    pub fn prepared(&self, entries: &[TensorEntry]) -> Result<Vec<TensorFile>> {
        let shown = || format!("cannot write {}", self.path.display());
        let file = self.written.file().try_clone().with_context(shown)?;
        let (_, starts) = layout(entries).with_context(shown)?;
        let length = starts.last().copied().unwrap_or_default();
        let found = file.metadata().with_context(shown)?.len();
        if found != length {
            bail!(
                "{} has {found} bytes instead of {length}; use one file system",
                self.path.display()
            );
        }
        Ok(tensor_files(file, entries, starts))
    }

    /// The path that the temporary file has, or may get, for other processes that write to it.
    pub fn announce(&self) -> PathBuf {
        self.written.announce()
    }

    /// Gives the temporary file the path that was announced.
    pub fn give_path(&mut self, path: PathBuf) -> Result<()> {
        let shown = || format!("cannot write {}", self.path.display());
        self.written.give_path(path).with_context(shown)
    }
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
