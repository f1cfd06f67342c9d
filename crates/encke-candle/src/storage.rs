//! candle's memory as Encke reads it, and Encke's as candle keeps it: neither is copied.

use candle_core::{CpuStorage, DType, Layout, Storage, Tensor};
use encke::{Data, Slice, View};

use crate::error::Error;

/// Four dimensions, or which tensor has not.
pub fn four(tensor: &'static str, dims: &[usize]) -> Result<[usize; 4], Error> {
    dims.try_into().map_err(|_| Error::Rank {
        tensor,
        got: dims.len(),
        dims: dims.to_vec(),
    })
}

/// The numbers of a tensor, borrowed with its strides. Those of its last dimension must lie side by
/// side, which [`readable`] sees to.
pub fn view<'a>(
    tensor: &'static str,
    storage: &'a CpuStorage,
    layout: &Layout,
) -> Result<View<'a>, Error> {
    let dims = four(tensor, layout.dims())?;
    let strides = four(tensor, layout.stride())?;
    let from = layout.start_offset();
    let numbers = match storage {
        CpuStorage::F64(numbers) => Slice::F64(&numbers[from..]),
        CpuStorage::F32(numbers) => Slice::F32(&numbers[from..]),
        CpuStorage::BF16(numbers) => Slice::Bf16(&numbers[from..]),
        CpuStorage::F16(numbers) => Slice::F16(&numbers[from..]),
        _ => {
            return Err(Error::Type {
                tensor,
                got: candle_core::backend::BackendStorage::dtype(storage),
            });
        }
    };
    let view = View::from_slice(numbers, dims, strides).map_err(encke::Error::from)?;
    Ok(view)
}

/// The memory of a tensor on the host. Where tensors of a GPU are taken, they do not come here.
pub fn on_host<'a>(tensor: &'static str, storage: &'a Storage) -> Result<&'a CpuStorage, Error> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        Storage::Cuda(_) => Err(Error::Device {
            tensor,
            device: "a CUDA device",
        }),
        Storage::Metal(_) => Err(Error::Device {
            tensor,
            device: "a Metal device",
        }),
    }
}

/// Numbers for candle to own.
pub fn owned(data: Data) -> CpuStorage {
    match data {
        Data::F64(numbers) => CpuStorage::F64(numbers),
        Data::F32(numbers) => CpuStorage::F32(numbers),
        Data::Bf16(numbers) => CpuStorage::BF16(numbers),
        Data::F16(numbers) => CpuStorage::F16(numbers),
    }
}

/// The tensor itself where rows of it can be read, and otherwise a copy whose rows can.
pub fn readable(tensor: &Tensor) -> candle_core::Result<Tensor> {
    let contiguous_rows = match (tensor.dims().last(), tensor.stride().last()) {
        (Some(&dim), Some(&stride)) => dim <= 1 || stride == 1,
        _ => true,
    };
    match contiguous_rows {
        true => Ok(tensor.clone()),
        false => tensor.contiguous(),
    }
}

/// Refuses what no kernel takes, before anything is done.
pub fn check(name: &'static str, tensor: &Tensor) -> Result<(), Error> {
    four(name, tensor.dims())?;
    match tensor.dtype() {
        DType::F64 | DType::F32 | DType::BF16 | DType::F16 => Ok(()),
        got => Err(Error::Type { tensor: name, got }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    /// Whatever the strides, what the library reads is candle's own memory.
    #[test]
    fn strided_tensors_are_borrowed_where_they_are() {
        let x = Tensor::zeros((2, 3, 6, 4), DType::F32, &Device::Cpu).unwrap();
        let strided = [
            x.transpose(1, 2).unwrap(),
            x.narrow(2, 1, 3).unwrap(),
            x.narrow(1, 1, 1)
                .unwrap()
                .broadcast_as((2, 5, 6, 4))
                .unwrap(),
        ];
        for tensor in strided {
            let read = readable(&tensor).unwrap();
            assert_eq!(read.id(), tensor.id(), "the tensor itself");
            let (storage, layout) = tensor.storage_and_layout();
            let storage = on_host("x", &storage).unwrap();
            let view = view("x", storage, layout).unwrap();
            let Slice::F32(numbers) = view.data() else {
                panic!("f32 stays f32")
            };
            let own = &storage.as_slice::<f32>().unwrap()[layout.start_offset()];
            assert!(std::ptr::eq(&numbers[0], own), "its own memory");
            assert_eq!(view.strides()[..], *layout.stride());
        }
        let columns = x.transpose(2, 3).unwrap();
        assert_ne!(readable(&columns).unwrap().id(), columns.id());
    }
}
