//! A whole tensor from a source to a sink, piece by piece, rounded on the way.

use encke_core::host;
use encke_core::job::Block;
use encke_core::plan::program::Role;
use encke_core::sharding::Run;
use encke_core::{DType, Data};

use super::error::StreamError;
use super::source::{RowRange, Sink, Source};

/// Numbers of a piece, unless one token has more.
const PIECE: usize = 1 << 18;

/// Copies the tensor of a role, `[b, n, h, width]`, to where it is stored as `dtype`.
pub fn transfer(
    source: &dyn Source,
    sink: &mut dyn Sink,
    role: Role,
    [b, n, h, width]: [usize; 4],
    dtype: DType,
) -> Result<(), StreamError> {
    let heads: Vec<usize> = (0..h).collect();
    let most = (PIECE / (h * width)).clamp(1, n);
    let mut read = Data::zeros(source.dtype(role), most * h * width);
    let mut rounded = Data::zeros(dtype, most * h * width);
    for batch in 0..b {
        for first in (0..n).step_by(most) {
            let count = most.min(n - first);
            let numbers = count * h * width;
            if count < most {
                read = Data::zeros(source.dtype(role), numbers);
                rounded = Data::zeros(dtype, numbers);
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
                &Block::contiguous(numbers, 0, 0),
                false,
                read.as_slice(),
                &mut rounded,
            );
            sink.write(&range, &rounded)?;
        }
        if !n.is_multiple_of(most) {
            read = Data::zeros(source.dtype(role), most * h * width);
            rounded = Data::zeros(dtype, most * h * width);
        }
    }
    Ok(())
}
