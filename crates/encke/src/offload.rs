//! Tensors in a temporary file: the storage of [`CheckpointPolicy::Offload`].
//!
//! A forward pass returns its results in host memory, whatever device it ran on, so offloading
//! means a file. The decision here: the file has no name, so none is left behind however the
//! process ends. It can be read any number of times.
//!
//! [`CheckpointPolicy::Offload`]: crate::CheckpointPolicy::Offload

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::sync::{Arc, Mutex, PoisonError};

use encke_core::{DType, Data, Tensor};
use encke_ring::RingError as Error;

/// Tensors in a file.
#[derive(Debug, Clone)]
pub(crate) struct Offloaded {
    file: Arc<Mutex<File>>,
    tensors: Vec<(DType, [usize; 4])>,
}

impl Offloaded {
    /// Writes tensors to a new file in the system's temporary directory.
    pub fn store(tensors: &[&Tensor]) -> Result<Offloaded, Error> {
        let mut file = tempfile::tempfile().map_err(failed)?;
        for tensor in tensors {
            file.write_all(tensor.data().bytes()).map_err(failed)?;
        }
        Ok(Offloaded {
            file: Arc::new(Mutex::new(file)),
            tensors: tensors.iter().map(|of| (of.dtype(), of.dims())).collect(),
        })
    }

    /// Reads the tensors back, in the order of `store`.
    pub fn load(&self) -> Result<Vec<Tensor>, Error> {
        // A panic while reading changes nothing but the file position, which is reset here.
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.seek(SeekFrom::Start(0)).map_err(failed)?;
        let tensor = |&(dtype, dims): &(DType, [usize; 4])| {
            let mut data = Data::try_zeros(dtype, dims.iter().product())?;
            file.read_exact(data.bytes_mut()).map_err(failed)?;
            Ok(Tensor::from_data(data, dims)?)
        };
        self.tensors.iter().map(tensor).collect()
    }

    /// Bytes in the file.
    pub fn bytes(&self) -> usize {
        let of =
            |(dtype, dims): &(DType, [usize; 4])| dtype.bytes() * dims.iter().product::<usize>();
        self.tensors.iter().map(of).sum()
    }
}

fn failed(error: io::Error) -> Error {
    Error::Offload {
        reason: error.to_string(),
    }
}
