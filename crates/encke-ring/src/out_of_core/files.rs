//! Row-major tensors in files: rows are read and written in place.
//!
//! Uses positioned reads and writes, not a memory map: the kernel decides how long mapped pages
//! stay resident, so a memory limit could not be guaranteed. File formats are the caller's: a
//! tensor here is a file and an offset.

use std::fs::File;
use std::io;
use std::sync::Arc;

use encke_core::plan::program::Role;
use encke_core::sharding::Run;
use encke_core::{DType, Data};

use super::error::StreamError;
use super::source::{RowRange, TensorSink, TensorSource};

/// A tensor `[b, n, h, width]` in a file.
#[derive(Debug, Clone)]
pub struct TensorFile {
    /// The file.
    pub file: Arc<File>,
    /// Its first byte.
    pub offset: u64,
    /// Its type; elements are little-endian.
    pub dtype: DType,
    /// Its dimensions.
    pub dims: [usize; 4],
}

/// Elements that are contiguous both in the file and in a range.
struct FileExtent {
    /// The first byte in the file.
    at: u64,
    /// The bytes in the range.
    bytes: std::ops::Range<usize>,
}

impl TensorFile {
    /// Bytes of the whole tensor.
    pub fn bytes(&self) -> u64 {
        self.dims.iter().product::<usize>() as u64 * self.dtype.bytes() as u64
    }

    fn extents<'a>(&self, range: &RowRange<'a>) -> impl Iterator<Item = FileExtent> + use<'a> {
        let [_, n, h, d] = self.dims;
        let (width, offset) = (d * self.dtype.bytes(), self.offset);
        let RowRange {
            batch,
            tokens,
            heads,
            ..
        } = *range;
        assert!(
            tokens.count == 0 || tokens.end() <= n,
            "tokens of the tensor"
        );
        // All heads of a token are contiguous, and so are all tokens of a contiguous run.
        let together = match heads.len() == h {
            true if tokens.stride == 1 => tokens.count.max(1) * h,
            true => h,
            false => 1,
        };
        let rows = tokens.count * heads.len();
        (0..rows).step_by(together).map(move |row| {
            let token = tokens.first + row / heads.len() * tokens.stride;
            let there = (batch * n + token) * h + heads[row % heads.len()];
            FileExtent {
                at: offset + (there * width) as u64,
                bytes: row * width..(row + together) * width,
            }
        })
    }

    /// Overwrites the first elements of `to` with the rows of a range.
    pub fn read(&self, range: &RowRange<'_>, to: &mut Data) -> Result<(), StreamError> {
        let bytes = to.bytes_mut();
        let read = |extent: FileExtent| read_at(&self.file, &mut bytes[extent.bytes], extent.at);
        let done = self.extents(range).try_for_each(read);
        done.map_err(|source| failed("read", range, source))
    }

    /// Writes the rows of a range.
    pub fn write(&self, range: &RowRange<'_>, from: &Data) -> Result<(), StreamError> {
        let bytes = from.bytes();
        let write = |extent: FileExtent| write_at(&self.file, &bytes[extent.bytes], extent.at);
        let done = self.extents(range).try_for_each(write);
        done.map_err(|source| failed("write", range, source))
    }

    /// Writes a tensor that is one row.
    pub fn write_row(&self, from: &Data) -> Result<(), StreamError> {
        let tokens = Run::leading(1);
        let range = RowRange {
            role: Role::Rows,
            batch: 0,
            tokens,
            heads: &[0],
        };
        self.write(&range, from)
    }
}

fn failed(verb: &'static str, range: &RowRange<'_>, source: io::Error) -> StreamError {
    StreamError::File {
        verb,
        role: range.role,
        token: range.tokens.first,
        source,
    }
}

/// Tensors of a call that are in files.
#[derive(Debug, Clone, Default)]
pub struct Files {
    tensors: Vec<(Role, TensorFile)>,
}

impl Files {
    /// No tensors yet.
    pub fn new() -> Files {
        Files::default()
    }

    /// Adds a tensor.
    pub fn add(&mut self, role: Role, tensor: TensorFile) {
        self.tensors.push((role, tensor));
    }

    /// The file of a tensor.
    pub fn get(&self, role: Role) -> Option<&TensorFile> {
        let found = self.tensors.iter().find(|(of, _)| *of == role);
        found.map(|(_, tensor)| tensor)
    }
}

impl TensorSource for Files {
    fn dtype(&self, role: Role) -> DType {
        self.get(role).map_or(DType::F32, |tensor| tensor.dtype)
    }

    fn read(&self, range: &RowRange<'_>, to: &mut Data) -> Result<(), StreamError> {
        let (verb, role) = ("read", range.role);
        let tensor = self.get(role).ok_or(StreamError::Missing { verb, role })?;
        tensor.read(range, to)
    }
}

impl TensorSink for Files {
    fn write(&mut self, range: &RowRange<'_>, from: &Data) -> Result<(), StreamError> {
        let (verb, role) = ("write", range.role);
        let tensor = self.get(role).ok_or(StreamError::Missing { verb, role })?;
        tensor.write(range, from)
    }
}

#[cfg(unix)]
fn read_at(file: &File, bytes: &mut [u8], at: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, at)
}

#[cfg(unix)]
fn write_at(file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, at)
}

#[cfg(not(unix))]
fn read_at(mut file: &File, bytes: &mut [u8], at: u64) -> io::Result<()> {
    use std::io::{Read, Seek, SeekFrom};
    file.seek(SeekFrom::Start(at))?;
    file.read_exact(bytes)
}

#[cfg(not(unix))]
fn write_at(mut file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
    use std::io::{Seek, SeekFrom, Write};
    file.seek(SeekFrom::Start(at))?;
    file.write_all(bytes)
}
