//! Tensors of a safetensors file, memory-mapped: read where they lie, copied only where they must.
//!
//! What is checked here is the file: that it is one, that it is complete, that the tensors asked
//! for are there and of a type we compute with. Whether they fit together is the library's matter.
//!
//! Sequences larger than memory are described here too ([`Header`]) but read elsewhere, piece by
//! piece: pages of a map count as this process's memory.
//!
//! The decision here: a tensor whose bytes are not aligned for its type is copied rather than
//! refused, since the format does not promise alignment.

use std::borrow::Cow;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use bytemuck::Pod;
use encke::{DType, Slice, View};
use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensorError, SafeTensors};

#[cfg(target_endian = "big")]
compile_error!("safetensors files are little-endian and are read as they lie");

/// A mapped file.
#[derive(Debug)]
pub struct InputFile {
    map: Mmap,
    path: PathBuf,
}

impl InputFile {
    /// Maps a file. Pipes and devices are refused before they are opened.
    pub fn open(path: &Path) -> Result<InputFile> {
        let shown = path.display();
        let metadata = path
            .metadata()
            .with_context(|| format!("cannot read {shown}"))?;
        if !metadata.is_file() {
            bail!("cannot read {shown}: it is not a regular file, and only those can be mapped");
        }
        let file = File::open(path).with_context(|| format!("cannot read {shown}"))?;
        // SAFETY: the map is only read, and only within the length it was made with. What remains
        // is that another process must not write to or truncate the file meanwhile; `--help` says
        // so, and it is the condition on which anyone may read a file in place. We never write to
        // it ourselves: an output that is the input is refused, and outputs are renamed into
        // place, which leaves a mapped file intact.
        #[allow(unsafe_code)]
        let map = unsafe { Mmap::map(&file) }.with_context(|| format!("cannot map {shown}"))?;
        Ok(InputFile {
            map,
            path: path.to_path_buf(),
        })
    }

    /// The tensors of the file, or how it is not a safetensors file.
    pub fn tensors(&self) -> Result<Tensors<'_>> {
        let file = SafeTensors::deserialize(&self.map).map_err(|error| self.broken(&error))?;
        Ok(Tensors { file, from: self })
    }

    fn broken(&self, error: &SafeTensorError) -> anyhow::Error {
        let (shown, length) = (self.path.display(), self.map.len());
        match error {
            SafeTensorError::HeaderTooSmall
            | SafeTensorError::HeaderTooLarge
            | SafeTensorError::InvalidHeader(_)
            | SafeTensorError::InvalidHeaderDeserialization(_) => {
                anyhow!("{shown} is not a safetensors file ({length} bytes): {error}")
            }
            SafeTensorError::InvalidHeaderLength => anyhow!(
                "{shown} is not a safetensors file, or is truncated: it ends inside its header, \
                 after {length} bytes"
            ),
            SafeTensorError::MetadataIncompleteBuffer => anyhow!(
                "{shown} is truncated or damaged: its {length} bytes are not as many as its \
                 header says; write it again"
            ),
            other => anyhow!("{shown} is a damaged safetensors file: {other}; write it again"),
        }
    }
}

/// The tensors of a file.
#[derive(Debug)]
pub struct Tensors<'a> {
    file: SafeTensors<'a>,
    from: &'a InputFile,
}

/// One tensor as the file describes it.
#[derive(Debug, Clone)]
pub struct Header {
    name: &'static str,
    shape: Vec<usize>,
    dtype: DType,
    /// Its bytes in the file.
    bytes: Range<usize>,
}

/// The numbers of a tensor.
#[derive(Debug)]
pub struct Numbers<'a> {
    data: Typed<'a>,
}

/// Numbers in the file, or a copy of them.
#[derive(Debug)]
enum Typed<'a> {
    F64(Cow<'a, [f64]>),
    F32(Cow<'a, [f32]>),
    Bf16(Cow<'a, [bf16]>),
    F16(Cow<'a, [f16]>),
}

impl<'a> Tensors<'a> {
    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.file.tensor(name).is_ok()
    }

    /// A tensor of floating-point numbers. None of them is read yet.
    pub fn get(&self, name: &'static str) -> Result<Header> {
        let Ok(found) = self.file.tensor(name) else {
            let mut names = self.file.names();
            names.sort_unstable();
            let names = match names.is_empty() {
                true => "no tensors at all".to_string(),
                false => names.join(", "),
            };
            bail!(
                "{} has no tensor {name}; it has {names}",
                self.from.path.display()
            );
        };
        let dtype = match found.dtype() {
            Dtype::F64 => DType::F64,
            Dtype::F32 => DType::F32,
            Dtype::BF16 => DType::Bf16,
            Dtype::F16 => DType::F16,
            other => bail!("{name} holds {other}; Encke computes with F64, F32, BF16 and F16"),
        };
        let start = found.data().as_ptr() as usize - self.from.map.as_ptr() as usize;
        Ok(Header {
            name,
            shape: found.shape().to_vec(),
            dtype,
            bytes: start..start + found.data().len(),
        })
    }

    /// The numbers of a tensor of this file.
    pub fn numbers(&self, header: &Header) -> Numbers<'a> {
        let bytes = &self.from.map[header.bytes.clone()];
        let data = match header.dtype {
            DType::F64 => Typed::F64(typed(bytes)),
            DType::F32 => Typed::F32(typed(bytes)),
            DType::Bf16 => Typed::Bf16(typed(bytes)),
            DType::F16 => Typed::F16(typed(bytes)),
        };
        Numbers { data }
    }
}

/// The bytes as numbers, where they lie if they are aligned.
fn typed<T: Pod>(bytes: &[u8]) -> Cow<'_, [T]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(numbers) => Cow::Borrowed(numbers),
        Err(_) => {
            let mut copy = vec![T::zeroed(); bytes.len() / size_of::<T>()];
            let whole = copy.len() * size_of::<T>();
            bytemuck::cast_slice_mut(&mut copy).copy_from_slice(&bytes[..whole]);
            Cow::Owned(copy)
        }
    }
}

impl Header {
    /// The tensor's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The type of the numbers.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The byte of the file at which they begin.
    pub fn offset(&self) -> u64 {
        self.bytes.start as u64
    }

    /// The dimensions `[b, n, h, d]`, or why the tensor has none such.
    pub fn dims(&self) -> Result<[usize; 4]> {
        match self.shape[..] {
            [b, n, h, d] if !self.shape.contains(&0) => Ok([b, n, h, d]),
            _ => Err(self.misshapen("4: [b, n, h, d]")),
        }
    }

    /// The dimensions `[b, n, h, 1]` of a tensor stored as `[b, n, h]`.
    pub fn row_dims(&self) -> Result<[usize; 4]> {
        match self.shape[..] {
            [b, n, h] if !self.shape.contains(&0) => Ok([b, n, h, 1]),
            _ => Err(self.misshapen("3: [b, n, h]")),
        }
    }

    fn misshapen(&self, expected: &str) -> anyhow::Error {
        let Header { name, shape, .. } = self;
        match shape.iter().position(|&size| size == 0) {
            Some(axis) => anyhow!("{name} has shape {shape:?}: dimension {axis} is empty"),
            None => anyhow!(
                "{name} has {} dimensions {shape:?}, expected {expected}",
                shape.len()
            ),
        }
    }
}

impl Numbers<'_> {
    /// The numbers.
    pub fn slice(&self) -> Slice<'_> {
        match &self.data {
            Typed::F64(x) => Slice::F64(x),
            Typed::F32(x) => Slice::F32(x),
            Typed::Bf16(x) => Slice::Bf16(x),
            Typed::F16(x) => Slice::F16(x),
        }
    }

    /// The numbers as the library takes them.
    pub fn view(&self, dims: [usize; 4]) -> Result<View<'_>> {
        let [_, n, h, d] = dims;
        Ok(View::from_slice(
            self.slice(),
            dims,
            [n * h * d, h * d, d, 1],
        )?)
    }
}
