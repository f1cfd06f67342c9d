//! Tensor maps: descriptors of operands for Hopper's TMA.
//!
//! The decision here: one form for all operands, five dimensions (column, row, head, segment,
//! batch entry) with a box of 64 columns. Dilation, phases and grouped heads are strides and
//! coordinates, and elements out of bounds (beyond the last row, or beyond a head dimension that is
//! no multiple of 64) arrive in shared memory as zeros. Sums in f32, which TMA only adds to, have
//! the same form with boxes of 32 columns, and additions out of bounds are dropped.

use cudarc::driver::{DeviceRepr, DriverError, sys};
use encke_core::DType;
use encke_core::job::Operand;

use crate::allocation::DeviceAllocation;
use crate::error::{Error, Result};

/// Bytes of a box row: the width of the swizzle.
const BOX_BYTES: usize = 128;
/// Addresses and strides are multiples of this many 16-bit elements.
const ALIGNMENT: usize = 8;
/// The limit of strides in bytes.
const STRIDE_BYTES: usize = 1 << 40;

/// The kernels' `TensorMap`, passed as `const __grid_constant__`.
#[repr(C, align(128))]
#[derive(Clone, Copy)]
pub(crate) struct TensorMap(sys::CUtensorMap);

// SAFETY: an opaque value that the driver encodes, passed by value as documented.
unsafe impl DeviceRepr for TensorMap {}

/// The extents of an operand.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Extents {
    pub dim: usize,
    pub rows: usize,
    pub segments: usize,
    pub batch: usize,
}

/// The unit of head coordinates: a common divisor of all head offsets.
pub(crate) fn unit(operand: &Operand) -> usize {
    match common_divisor(&operand.heads) {
        0 => ALIGNMENT,
        common => common,
    }
}

/// The greatest common divisor; 0 if all are 0.
pub(crate) fn common_divisor(values: &[usize]) -> usize {
    fn gcd(a: usize, b: usize) -> usize {
        if b == 0 { a } else { gcd(b, a % b) }
    }
    values.iter().fold(0, |common, &value| gcd(value, common))
}

/// Extents and strides of the outer dimensions: rows, heads, segments, batch entries.
fn dimensions(operand: &Operand, extents: &Extents) -> [(usize, usize); 4] {
    let unit = unit(operand);
    let heads = operand.heads.iter().max().map_or(1, |last| last / unit + 1);
    [
        (extents.rows, operand.row),
        (heads, unit),
        (extents.segments, operand.segment),
        (extents.batch, operand.batch),
    ]
}

/// Whether a tensor map can describe an operand of 16-bit elements.
pub(crate) fn fits(operand: &Operand, extents: &Extents) -> bool {
    let aligned = |(extent, stride): &(usize, usize)| {
        let in_range = *stride > 0 && 2 * stride < STRIDE_BYTES && stride.is_multiple_of(ALIGNMENT);
        *extent == 1 || (in_range && u32::try_from(*extent).is_ok())
    };
    extents.dim.is_multiple_of(ALIGNMENT)
        && operand.offset.is_multiple_of(ALIGNMENT)
        && dimensions(operand, extents).iter().all(aligned)
}

/// The map of an operand that [`fits`], with boxes of `rows` rows.
pub(crate) fn encode(
    dtype: DType,
    memory: &DeviceAllocation,
    operand: &Operand,
    extents: &Extents,
    rows: usize,
) -> Result<TensorMap> {
    use sys::CUtensorMapDataType as Type;
    let element = match dtype {
        DType::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        DType::Bf16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        DType::F32 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        DType::F64 => {
            return Err(Error::Unsupported {
                what: format!("a tensor map of {dtype:?}: elements must have two or four bytes"),
            });
        }
    };
    let bytes = dtype.bytes();
    let outer = dimensions(operand, extents);
    let mut sizes = [extents.dim as u64; 5];
    let mut strides = [0u64; 4];
    for (i, (extent, stride)) in outer.into_iter().enumerate() {
        sizes[i + 1] = extent as u64;
        // The stride of a dimension of extent 1 is unused, but must be valid.
        let stride = if extent == 1 { ALIGNMENT } else { stride };
        strides[i] = (bytes * stride) as u64;
    }
    let (box_sizes, steps) = (
        [(BOX_BYTES / bytes) as u32, rows as u32, 1, 1, 1],
        [1u32; 5],
    );
    let address = memory.pointer() + (bytes * operand.offset) as u64;
    let failed = |error| {
        let what = format!("a tensor map of {sizes:?} with strides of {strides:?} bytes");
        Error::driver(what, error)
    };
    // This may be the first driver call of a rank's thread.
    let context = memory.device().context();
    context.bind_to_thread().map_err(failed)?;
    let mut map = std::mem::MaybeUninit::<sys::CUtensorMap>::uninit();
    // SAFETY: five extents, four strides, five box sizes and five steps for rank 5; the driver
    // checks the rest and writes the map.
    let code = unsafe {
        sys::cuTensorMapEncodeTiled(
            map.as_mut_ptr(),
            element,
            5,
            address as *mut std::ffi::c_void,
            sizes.as_ptr(),
            strides.as_ptr(),
            box_sizes.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    if code != sys::CUresult::CUDA_SUCCESS {
        return Err(failed(DriverError(code)));
    }
    // SAFETY: the driver has written it.
    Ok(TensorMap(unsafe { map.assume_init() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operand(row: usize, heads: &[usize]) -> Operand {
        Operand {
            offset: 0,
            batch: 0,
            segment: 4096,
            row,
            heads: heads.into(),
        }
    }

    const EXTENTS: Extents = Extents {
        dim: 64,
        rows: 8,
        segments: 2,
        batch: 1,
    };

    #[test]
    fn the_unit_divides_all_head_offsets() {
        assert_eq!(unit(&operand(1, &[64, 192, 64])), 64);
        assert_eq!(unit(&operand(1, &[0])), ALIGNMENT);
        let dimensions = dimensions(&operand(512, &[0, 64, 576]), &EXTENTS);
        assert_eq!(dimensions, [(8, 512), (10, 64), (2, 4096), (1, 0)]);
    }

    #[test]
    fn misaligned_operands_do_not_fit() {
        assert!(fits(&operand(512, &[0, 64]), &EXTENTS));
        assert!(!fits(&operand(516, &[0, 64]), &EXTENTS));
        assert!(!fits(&operand(512, &[0, 4]), &EXTENTS));
        let dim = Extents { dim: 60, ..EXTENTS };
        assert!(!fits(&operand(512, &[0, 64]), &dim));
    }
}
