//! All programs of this crate, so that they can be compiled without a GPU.

use std::collections::HashSet;

use encke_core::DType;

use crate::generated_rows;
use crate::launch::{
    cells, copy, hopper_backward_variants, hopper_forward, mma, plain, split_tilings,
};
use crate::program::Program;

/// Compute capabilities for programs that run on any GPU: Ampere, Ada, Hopper, Blackwell.
const ANY: [(i32, i32); 5] = [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)];

/// Each program with a compute capability it runs on.
pub fn programs() -> Vec<(Program, (i32, i32))> {
    let mut all = Vec::new();
    for dtype in DType::ALL {
        all.push((cells::program(dtype), (9, 0)));
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

/// The programs that bring something new to those before them: a macro of their kernel that had
/// another value so far, or an architecture. Together they have every value and every text.
pub fn covering(programs: Vec<(Program, (i32, i32))>) -> Vec<(Program, (i32, i32))> {
    let mut seen = HashSet::new();
    let mut brings_new = |(program, capability): &(Program, (i32, i32))| {
        let mut parts = program.options();
        parts.push(program.architecture(*capability));
        // Programs of one name may have several texts, each with macros of its own.
        let text = program.text().len();
        let new = parts
            .into_iter()
            .map(|part| seen.insert((program.name, text, part)));
        new.fold(false, |any, new| any | new)
    };
    let mut programs = programs;
    programs.retain(|program| brings_new(program));
    programs
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
