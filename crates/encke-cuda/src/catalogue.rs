//! Every program this crate can ask for, so that all of them can be compiled without a GPU.

use encke_core::DType;

use crate::launch::{cells, hopper_forward, hopper_variants, mma, moving, plain, rows};
use crate::program::Program;

/// Compute capabilities that programs for any GPU are compiled for: Ampere, Ada, Hopper, Blackwell.
const ANY: [(i32, i32); 5] = [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)];

/// Each program with a compute capability it is meant for.
pub fn programs() -> Vec<(Program, (i32, i32))> {
    let mut all = Vec::new();
    for dtype in DType::ALL {
        all.push((cells::program(dtype), (9, 0)));
        for dim in [20, 64, 128] {
            all.push((rows::generator(dtype, dim), (9, 0)));
            all.push((rows::summer(dtype, dim), (9, 0)));
        }
        all.push((plain::program(dtype, 64), (9, 0)));
        all.push((plain::program(dtype, 256), (9, 0)));
        for other in [dtype, dtype.sum()] {
            all.push((moving::program(dtype, other), (9, 0)));
            all.push((moving::program(other, dtype), (9, 0)));
        }
    }
    all.extend(mma::programs());
    let hopper = hopper_forward::programs().into_iter();
    let hopper = hopper.chain(hopper_variants::programs());
    all.extend(hopper.map(|program| (program, (9, 0))));
    for capability in ANY {
        all.push((plain::program(DType::F32, 64), capability));
    }
    all
}
