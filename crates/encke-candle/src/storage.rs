//! candle's storage as Encke's views, and Encke's data as candle's storage, both without a copy.

use candle_core::{CpuStorage, DType, DeviceLocation, Layout, Storage, Tensor};
use encke::{Data, Slice, View};

use crate::error::Error;

/// A device as candle's users write it.
pub fn device_name(location: DeviceLocation) -> String {
    match location {
        DeviceLocation::Cpu => "the CPU".to_string(),
        DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
        DeviceLocation::Metal { gpu_id } => format!("metal:{gpu_id}"),
    }
}

/// Four dimensions, or an error that names the tensor.
pub fn four(tensor: &'static str, dims: &[usize]) -> Result<[usize; 4], Error> {
    dims.try_into().map_err(|_| Error::Rank {
        tensor,
        got: dims.len(),
        dims: dims.to_vec(),
    })
}

/// A tensor borrowed with its strides. Its last dimension must be contiguous, which [`readable`]
/// ensures.
pub fn view<'a>(
    tensor: &'static str,
    storage: &'a CpuStorage,
    layout: &Layout,
) -> Result<View<'a>, Error> {
    let dims = four(tensor, layout.dims())?;
    let strides = four(tensor, layout.stride())?;
    let from = layout.start_offset();
    let elements = match storage {
        CpuStorage::F64(elements) => Slice::F64(&elements[from..]),
        CpuStorage::F32(elements) => Slice::F32(&elements[from..]),
        CpuStorage::BF16(elements) => Slice::Bf16(&elements[from..]),
        CpuStorage::F16(elements) => Slice::F16(&elements[from..]),
        _ => {
            return Err(Error::Type {
                tensor,
                got: candle_core::backend::BackendStorage::dtype(storage),
            });
        }
    };
    let view = View::from_slice(elements, dims, strides).map_err(encke::Error::from)?;
    Ok(view)
}

/// The storage of a tensor in host memory.
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

/// Data as candle's storage.
pub fn into_storage(data: Data) -> CpuStorage {
    match data {
        Data::F64(elements) => CpuStorage::F64(elements),
        Data::F32(elements) => CpuStorage::F32(elements),
        Data::Bf16(elements) => CpuStorage::BF16(elements),
        Data::F16(elements) => CpuStorage::F16(elements),
    }
}

/// The tensor itself if its last dimension is contiguous, otherwise a contiguous copy.
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

/// Refuses dimensions and types that no kernel supports.
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

    #[test]
    fn strided_tensors_are_borrowed_in_place() {
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
            let Slice::F32(elements) = view.data() else {
                panic!("f32 stays f32")
            };
            let own = &storage.as_slice::<f32>().unwrap()[layout.start_offset()];
            assert!(std::ptr::eq(&elements[0], own), "its own memory");
            assert_eq!(view.strides()[..], *layout.stride());
        }
        let columns = x.transpose(2, 3).unwrap();
        assert_ne!(readable(&columns).unwrap().id(), columns.id());
    }
}
