//! Burn's CPU tensors as Encke's views, and Encke's tensors as Burn's, both without a copy.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, TensorData, bf16, f16};
use encke::{Data, Slice, View};

use crate::error::Error;

/// The tensor itself if its last dimension is contiguous and no stride is negative (as those of a
/// flipped tensor are), otherwise a contiguous copy.
pub fn readable(tensor: FlexTensor) -> FlexTensor {
    let layout = tensor.layout();
    let strides = layout.strides();
    let dim = layout.shape().iter().next_back().copied().unwrap_or(1);
    let contiguous_rows = dim <= 1 || strides.last() == Some(&1);
    match contiguous_rows && strides.iter().all(|stride| *stride >= 0) {
        true => tensor,
        false => tensor.to_contiguous(),
    }
}

/// A tensor of four dimensions borrowed with its strides, which [`readable`] makes fit.
pub fn view<'a>(name: &'static str, tensor: &'a FlexTensor) -> Result<View<'a>, Error> {
    let layout = tensor.layout();
    let from = layout.start_offset();
    let mut dims = [0; 4];
    let mut strides = [0; 4];
    assert_eq!(layout.num_dims(), 4, "a Tensor<4> has four dimensions");
    for axis in 0..4 {
        dims[axis] = layout.shape()[axis];
        strides[axis] = layout.strides()[axis].unsigned_abs();
    }
    let elements = match tensor.dtype() {
        DType::F64 => Slice::F64(&tensor.storage::<f64>()[from..]),
        DType::F32 => Slice::F32(&tensor.storage::<f32>()[from..]),
        DType::BF16 => Slice::Bf16(&tensor.storage::<bf16>()[from..]),
        DType::F16 => Slice::F16(&tensor.storage::<f16>()[from..]),
        got => return Err(Error::Type { tensor: name, got }),
    };
    let view = View::from_slice(elements, dims, strides).map_err(encke::Error::from)?;
    Ok(view)
}

/// A tensor of Encke as one of Burn, in the same memory.
pub fn from_tensor(tensor: encke::Tensor) -> FlexTensor {
    let dims = tensor.dims();
    FlexTensor::from_data(match tensor.into_data() {
        Data::F64(elements) => TensorData::new(elements, dims),
        Data::F32(elements) => TensorData::new(elements, dims),
        Data::Bf16(elements) => TensorData::new(elements, dims),
        Data::F16(elements) => TensorData::new(elements, dims),
    })
}

/// A gradient in the type of the tensor that it belongs to.
pub fn cast_like(gradient: FlexTensor, of: &FlexTensor) -> FlexTensor {
    match gradient.dtype() == of.dtype() {
        true => gradient,
        false => Flex::float_cast(gradient, of.dtype().into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ramp() -> FlexTensor {
        let values: Vec<f32> = (0..2 * 3 * 6 * 4).map(|i| i as f32).collect();
        FlexTensor::from_data(TensorData::new(values, [2, 3, 6, 4]))
    }

    #[test]
    fn strided_tensors_are_borrowed_in_place() {
        let whole = ramp();
        for strided in [whole.transpose(1, 2), whole.narrow(2, 1, 3)] {
            let read = readable(strided.clone());
            assert!(std::ptr::eq(
                read.bytes().as_ptr(),
                strided.bytes().as_ptr()
            ));
            let from = strided.layout().start_offset();
            let view = view("x", &read).unwrap();
            let Slice::F32(elements) = view.data() else {
                panic!("f32 stays f32")
            };
            assert!(std::ptr::eq(&elements[0], &strided.storage::<f32>()[from]));
        }
        let columns = whole.transpose(2, 3);
        assert!(readable(columns).is_contiguous());
    }

    #[test]
    fn results_keep_their_memory() {
        let values = vec![1.5f32; 2 * 8];
        let address = values.as_ptr().cast::<u8>();
        let tensor = encke::Tensor::from_data(Data::F32(values), [1, 2, 1, 8]).unwrap();
        assert!(std::ptr::eq(from_tensor(tensor).bytes().as_ptr(), address));
    }
}
