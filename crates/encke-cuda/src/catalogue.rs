//! All programs of this crate, so that they can be compiled without a GPU.

use std::cmp::Reverse;
use std::collections::HashSet;

use encke_core::DType;

use crate::generated_rows;
use crate::launch::{
    branches, cells, copy, hopper_backward_variants, hopper_forward, mma, plain, split_tilings,
};
use crate::program::Program;

/// Compute capabilities for programs that run on any GPU: Ampere, Ada, Hopper, Blackwell.
const ANY: [(i32, i32); 5] = [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)];

/// Each program with a compute capability it runs on.
pub fn programs() -> Vec<(Program, (i32, i32))> {
    let mut all = Vec::new();
    for dtype in DType::ALL {
        all.push((cells::program(dtype), (9, 0)));
        all.push((branches::program(dtype), (9, 0)));
        for dim in [20, 64, 128] {
            all.push((generated_rows::generator_program(dtype, dim), (9, 0)));
            all.push((generated_rows::checksum_program(dtype, dim), (9, 0)));
        }
        for masked in [false, true] {
            all.push((plain::program(dtype, 64, masked), (9, 0)));
            all.push((plain::program(dtype, 256, masked), (9, 0)));
            if dtype != DType::F64 {
                // Tiles of f64 rows of that length do not fit into shared memory.
                all.push((plain::program(dtype, 576, masked), (9, 0)));
            }
        }
        for other in [dtype, dtype.sum()] {
            all.push((copy::program(dtype, other), (9, 0)));
            all.push((copy::program(other, dtype), (9, 0)));
        }
    }
    all.extend(mma::programs());
    all.extend(split_tilings::programs());
    let hopper = hopper_forward::programs().into_iter();
    let hopper = hopper.chain(hopper_backward_variants::programs());
    all.extend(hopper.map(|program| (program, (9, 0))));
    for capability in ANY {
        all.push((plain::program(DType::F32, 64, true), capability));
    }
    all
}

/// Few programs that together have every value of every macro of their kernels, every text and
/// every architecture: again and again the one that brings most that is new.
pub fn covering(mut programs: Vec<(Program, (i32, i32))>) -> Vec<(Program, (i32, i32))> {
    let parts = |(program, capability): &(Program, (i32, i32))| -> Vec<_> {
        // Programs of one name may have several texts, each with macros of its own.
        let text = program.text().len();
        let mut parts = program.options();
        parts.push(program.architecture(*capability));
        parts
            .into_iter()
            .map(|part| (program.name, text, part))
            .collect()
    };
    let mut all: Vec<_> = programs.iter().map(parts).collect();
    let (mut seen, mut chosen) = (HashSet::new(), Vec::new());
    loop {
        let new = all.iter_mut().map(|parts| {
            parts.retain(|part| !seen.contains(part));
            parts.len()
        });
        // The first of those with as much.
        let most = new.enumerate().max_by_key(|&(at, new)| (new, Reverse(at)));
        match most {
            Some((at, new)) if new > 0 => {
                seen.extend(all.swap_remove(at));
                chosen.push(programs.swap_remove(at));
            }
            _ => return chosen,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_of_every_macro_is_covered_by_fewer_programs() {
        let values = |programs: &[(Program, (i32, i32))]| -> HashSet<(&'static str, String)> {
            let of = |(program, _): &(Program, (i32, i32))| {
                let options = program.options().into_iter();
                let name = program.name;
                options
                    .map(move |option| (name, option))
                    .collect::<Vec<_>>()
            };
            programs.iter().flat_map(of).collect()
        };
        let all = programs();
        let some = covering(programs());
        assert_eq!(values(&some), values(&all));
        assert!(
            2 * some.len() < all.len(),
            "{} of {}",
            some.len(),
            all.len()
        );
    }
}
