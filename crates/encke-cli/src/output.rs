//! Files that appear whole or not at all: written beside their place, then renamed into it.
//!
//! The decision here: the place is claimed before any work is done, so that an hour of computation
//! does not end in "permission denied".

use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use encke::{DType, Tensor};
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

/// Writes tensors in the safetensors format, straight from where they lie.
pub fn write_tensors(
    to: &mut dyn Write,
    tensors: &[(&str, Vec<usize>, &Tensor)],
) -> std::io::Result<()> {
    let mut tensors: Vec<_> = tensors.iter().collect();
    // The format asks for no gaps; the widest type first keeps all of them aligned.
    tensors.sort_by_key(|(name, _, tensor)| (usize::MAX - tensor.dtype().bytes(), *name));
    let mut end = 0;
    let mut infos = Vec::new();
    for (name, shape, tensor) in &tensors {
        let start = end;
        end += tensor.data().bytes().len();
        let info = TensorInfo {
            dtype: stored(tensor.dtype()),
            shape: shape.clone(),
            data_offsets: (start, end),
        };
        infos.push((name.to_string(), info));
    }
    let header = Metadata::new(None, infos).map_err(std::io::Error::other)?;
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    to.write_all(&(header.len() as u64).to_le_bytes())?;
    to.write_all(&header)?;
    for (_, _, tensor) in tensors {
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
