//! Copies a whole tensor from a source to a sink in chunks, rounding it.

use encke_core::host;
use encke_core::job::Block;
use encke_core::plan::program::Role;
use encke_core::sharding::Run;
use encke_core::{DType, Data};

use super::error::StreamError;
use super::source::{RowRange, TensorSink, TensorSource};

/// Elements of a chunk, unless one token has more.
const CHUNK: usize = 1 << 18;

/// Copies the tensor of a role, `[b, n, h, width]`, rounded to `dtype`.
pub fn copy_tensor(
    source: &dyn TensorSource,
    sink: &mut dyn TensorSink,
    role: Role,
    [b, n, h, width]: [usize; 4],
    dtype: DType,
) -> Result<(), StreamError> {
    let heads: Vec<usize> = (0..h).collect();
    let most = (CHUNK / (h * width)).clamp(1, n);
    let (mut read, mut rounded) = (Data::default(), Data::default());
    for batch in 0..b {
        for first in (0..n).step_by(most) {
            let count = most.min(n - first);
            let elements = count * h * width;
            if read.as_slice().len() != elements {
                read = Data::try_zeros(source.dtype(role), elements)?;
                rounded = Data::try_zeros(dtype, elements)?;
            }
            let tokens = Run {
                first,
                stride: 1,
                count,
            };
            let range = RowRange {
                role,
                batch,
                tokens,
                heads: &heads,
            };
            source.read(&range, &mut read)?;
            host::copy(
                &Block::contiguous(elements, 0, 0),
                false,
                read.as_slice(),
                &mut rounded,
            );
            sink.write(&range, &rounded)?;
        }
    }
    Ok(())
}
