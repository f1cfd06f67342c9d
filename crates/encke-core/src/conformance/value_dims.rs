//! Cases whose values have another width than keys.
//!
//! The decision here: such a case is one with equal widths whose v, dv and dout are drawn anew.
//! Keys begin at multiples of the head dimension, so each has a row of values.

use super::case::{Case, rows};
use super::layout::GAP;
use super::random::Random;
use crate::dtype::DType;

/// Multiplications of values per job that no width exceeds.
const WORK: usize = 1_000_000;

impl Case {
    /// This case with values of another width, one of `dims` that is not too wide for its pairs.
    pub fn with_value_dim(mut self, seed: u64, dtype: DType, dims: &[usize]) -> Case {
        let random = &mut Random::new(seed ^ 0x7a1e);
        let pairs = |case: &Case| {
            let jobs = case.parts.iter().map(|part| &part.job);
            let each =
                jobs.map(|job| job.batch * job.segments * job.heads * job.queries * job.keys);
            each.max().expect("a case has jobs")
        };
        let fits = |&dim: &usize| dim != self.dim && dim * pairs(&self) <= WORK;
        let fitting: Vec<usize> = dims.iter().copied().filter(fits).collect();
        if fitting.is_empty() {
            return self;
        }
        let value_dim = random.pick(&fitting);
        self.value_dim = value_dim;
        let sum = dtype.sum();
        for part in &mut self.parts {
            let job = &mut part.job;
            job.value_dim = value_dim;
            let elements = part.k.len() / job.dim * value_dim;
            (part.v, part.dv) = (vec![GAP; elements], vec![GAP; elements]);
            for (b, s, row, h) in rows(job, job.keys) {
                let at = job.value(job.k.at(b, s, row, h));
                for i in at..at + value_dim {
                    part.v[i] = dtype.round(random.unit());
                    part.dv[i] = sum.round(random.unit());
                }
            }
        }
        // Gaps of cells are NaN in dlse.
        let cells = self.dlse.iter();
        let of_cell = |gap: bool| match gap {
            true => GAP,
            false => dtype.round(random.unit()),
        };
        let gaps = cells.flat_map(|x| std::iter::repeat_n(x.is_nan(), value_dim));
        self.dout = gaps.map(of_cell).collect();
        self
    }
}
