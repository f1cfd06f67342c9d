//! Tensors of a memory-mapped safetensors file.
//!
//! What is checked here is the file: its format, its length, that it has the requested tensors, and
//! that their types are supported. Whether the tensors fit together is checked elsewhere.
//!
//! Sequences larger than memory are described here too ([`TensorHeader`]) but read elsewhere, piece
//! by piece, because pages of a map count as resident memory.
//!
//! The decision here: a tensor whose bytes are not aligned for its type is copied rather than
//! refused, because the format does not guarantee alignment.

use std::borrow::Cow;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use bytemuck::Pod;
use encke::{DType, Slice, View};
use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensorError, SafeTensors};

#[cfg(target_endian = "big")]
compile_error!("safetensors files are little-endian and are mapped without conversion");

/// A mapped file.
#[derive(Debug)]
pub struct InputFile {
    map: Mmap,
    path: PathBuf,
}

impl InputFile {
    /// Maps a file.
    pub fn open(path: &Path) -> Result<InputFile> {
        let shown = path.display();
        let file = encke_files::open(path).with_context(|| format!("cannot read {shown}"))?;
        // SAFETY: the map is only read, and only within its length. Another process must not write
        // to or truncate the file meanwhile, which `--help` states as a requirement. This process
        // never writes to it: an output that is the input is refused, and outputs are renamed to
        // their paths, which leaves a mapped file intact.
        #[allow(unsafe_code)]
        let map = unsafe { Mmap::map(&file) }.with_context(|| format!("cannot map {shown}"))?;
        Ok(InputFile {
            map,
            path: path.to_path_buf(),
        })
    }

    /// The tensors of the file, or why it is not a safetensors file.
    pub fn tensors(&self) -> Result<InputTensors<'_>> {
        let file = SafeTensors::deserialize(&self.map).map_err(|error| self.broken(&error))?;
        // The header is right so far, but of two tensors of one name only the second is there.
        let (length, _) =
            SafeTensors::read_metadata(&self.map).map_err(|error| self.broken(&error))?;
        encke_files::json::check_keys(&self.map[8..8 + length])
            .with_context(|| format!("{} is a damaged safetensors file", self.path.display()))?;
        Ok(InputTensors { file, from: self })
    }

    /// A checksum of the length and of 64 blocks spread over the file: whether processes that
    /// opened one path, each on its own host or in its own folder, read one file.
    #[cfg(feature = "mpi")]
    pub fn sample(&self) -> u64 {
        const BLOCKS: usize = 64;
        const BYTES: usize = 4096;
        let length = self.map.len();
        let mut sampled = length.to_le_bytes().to_vec();
        for block in 0..BLOCKS {
            let start = length / BLOCKS * block;
            sampled.extend(&self.map[start..length.min(start + BYTES)]);
        }
        encke_core::host::checksum(&sampled)
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
                "{shown} is truncated or damaged: its header describes more or fewer than its \
                 {length} bytes; write it again"
            ),
            other => anyhow!("{shown} is a damaged safetensors file: {other}; write it again"),
        }
    }
}

/// The tensors of a file.
#[derive(Debug)]
pub struct InputTensors<'a> {
    file: SafeTensors<'a>,
    from: &'a InputFile,
}

/// Name, shape, type and byte range of a tensor.
#[derive(Debug, Clone)]
pub struct TensorHeader {
    name: &'static str,
    shape: Vec<usize>,
    dtype: DType,
    /// Its bytes in the file.
    bytes: Range<usize>,
}

/// The elements of a tensor.
#[derive(Debug)]
pub struct TensorElements<'a> {
    data: TypedCow<'a>,
}

/// Elements in the file, or an aligned copy of them.
#[derive(Debug)]
enum TypedCow<'a> {
    F64(Cow<'a, [f64]>),
    F32(Cow<'a, [f32]>),
    Bf16(Cow<'a, [bf16]>),
    F16(Cow<'a, [f16]>),
}

impl<'a> InputTensors<'a> {
    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.file.tensor(name).is_ok()
    }

    /// The header of a floating-point tensor.
    pub fn get(&self, name: &'static str) -> Result<TensorHeader> {
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
        Ok(TensorHeader {
            name,
            shape: found.shape().to_vec(),
            dtype,
            bytes: start..start + found.data().len(),
        })
    }

    /// A tensor of one dimension, widened.
    pub fn vector(&self, name: &'static str) -> Result<Vec<f64>> {
        let header = self.get(name)?;
        match header.shape.len() {
            1 => Ok(self.elements(&header).slice().to_f64()),
            _ => Err(header.shape_error("1")),
        }
    }

    /// A tensor of integers of one dimension, none of them negative.
    pub fn integers(&self, name: &'static str) -> Result<Vec<usize>> {
        let Ok(found) = self.file.tensor(name) else {
            bail!("{} has no tensor {name}", self.from.path.display());
        };
        let signed: Vec<i64> = match found.dtype() {
            Dtype::I64 => typed::<i64>(found.data()).to_vec(),
            Dtype::I32 => (typed::<i32>(found.data()).iter())
                .map(|x| i64::from(*x))
                .collect(),
            other => bail!("{name} holds {other}; it must hold I32 or I64"),
        };
        if found.shape().len() != 1 {
            bail!(
                "{name} has shape {:?}; it must have one dimension",
                found.shape()
            );
        }
        let whole = |(index, x): (usize, &i64)| {
            usize::try_from(*x).map_err(|_| anyhow!("{name}[{index}] is {x}, below 0"))
        };
        signed.iter().enumerate().map(whole).collect()
    }

    /// The elements of a tensor of this file.
    pub fn elements(&self, header: &TensorHeader) -> TensorElements<'a> {
        let bytes = &self.from.map[header.bytes.clone()];
        let data = match header.dtype {
            DType::F64 => TypedCow::F64(typed(bytes)),
            DType::F32 => TypedCow::F32(typed(bytes)),
            DType::Bf16 => TypedCow::Bf16(typed(bytes)),
            DType::F16 => TypedCow::F16(typed(bytes)),
        };
        TensorElements { data }
    }
}

/// The bytes as elements: borrowed if they are aligned, otherwise copied.
fn typed<T: Pod>(bytes: &[u8]) -> Cow<'_, [T]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(elements) => Cow::Borrowed(elements),
        Err(_) => {
            let mut copy = vec![T::zeroed(); bytes.len() / size_of::<T>()];
            let whole = copy.len() * size_of::<T>();
            bytemuck::cast_slice_mut(&mut copy).copy_from_slice(&bytes[..whole]);
            Cow::Owned(copy)
        }
    }
}

impl TensorHeader {
    /// The tensor's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The offset of the first element in the file.
    pub fn offset(&self) -> u64 {
        self.bytes.start as u64
    }

    /// The dimensions `[b, n, h, d]`, or why the tensor does not have them.
    pub fn dims(&self) -> Result<[usize; 4]> {
        match self.shape[..] {
            [b, n, h, d] if !self.shape.contains(&0) => Ok([b, n, h, d]),
            _ => Err(self.shape_error("4: [b, n, h, d]")),
        }
    }

    /// The dimensions `[b, n, h, 1]` of a tensor stored as `[b, n, h]`.
    pub fn row_dims(&self) -> Result<[usize; 4]> {
        match self.shape[..] {
            [b, n, h] if !self.shape.contains(&0) => Ok([b, n, h, 1]),
            _ => Err(self.shape_error("3: [b, n, h]")),
        }
    }

    fn shape_error(&self, expected: &str) -> anyhow::Error {
        let TensorHeader { name, shape, .. } = self;
        match shape.iter().position(|&size| size == 0) {
            Some(axis) => anyhow!("{name} has shape {shape:?}: dimension {axis} is empty"),
            None => anyhow!(
                "{name} has {} dimensions {shape:?}, expected {expected}",
                shape.len()
            ),
        }
    }
}

impl TensorElements<'_> {
    /// The elements.
    pub fn slice(&self) -> Slice<'_> {
        match &self.data {
            TypedCow::F64(x) => Slice::F64(x),
            TypedCow::F32(x) => Slice::F32(x),
            TypedCow::Bf16(x) => Slice::Bf16(x),
            TypedCow::F16(x) => Slice::F16(x),
        }
    }

    /// The elements as a tensor view.
    pub fn view(&self, dims: [usize; 4]) -> Result<View<'_>> {
        let [_, n, h, d] = dims;
        Ok(View::from_slice(
            self.slice(),
            dims,
            [n * h * d, h * d, d, 1],
        )?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use encke_core::conformance::{Random, mutate};
    use safetensors::tensor::TensorView;

    /// Reads everything of a file that `encke attend` reads before it computes.
    fn read(path: &Path) -> Result<usize> {
        let file = InputFile::open(path)?;
        let tensors = file.tensors()?;
        let mut elements = 0;
        for name in ["q", "k", "v"] {
            let header = tensors.get(name)?;
            let dims = header.dims()?;
            tensors.elements(&header).view(dims)?;
            elements += dims.iter().product::<usize>();
        }
        Ok(elements)
    }

    #[test]
    fn a_damaged_file_is_refused_in_one_line_or_read_within_its_length() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let data = [0u8; 4 * 24];
        let view = || TensorView::new(Dtype::F32, vec![1, 6, 2, 2], &data).unwrap();
        let names = ["q", "k", "v"].map(|name| (name, view()));
        let whole = safetensors::serialize(names, None).unwrap();
        std::fs::write(&path, &whole).unwrap();
        assert_eq!(read(&path).unwrap(), 72);
        // The number of damages; hours of them by ENCKE_MUTATIONS.
        let count = std::env::var("ENCKE_MUTATIONS").ok();
        let count = count.map_or(3000, |count| count.parse().unwrap());
        for seed in 0..count {
            let mut random = Random::new(seed);
            let header = whole.len() - 3 * data.len();
            let mut damaged = mutate(&mut random, &whole[8..header]);
            // Mostly with a length that fits, so that the rest of the header is read.
            let length = match random.once_in(8) {
                true => random.bits() >> random.below(64),
                false => damaged.len() as u64,
            };
            damaged.splice(0..0, length.to_le_bytes());
            damaged.extend(&whole[header..]);
            std::fs::write(&path, &damaged).unwrap();
            if let Ok(elements) = read(&path) {
                assert!(elements <= damaged.len() / 2, "seed {seed}");
            }
        }
    }

    #[test]
    fn a_tensor_that_is_there_twice_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let entry = r#""q":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
        let header = format!("{{{entry},{entry}}}");
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend([0; 4]);
        std::fs::write(&path, &bytes).unwrap();
        let error = format!("{:#}", read(&path).unwrap_err());
        assert!(error.contains("\"q\" is there twice"), "{error}");
    }
}
