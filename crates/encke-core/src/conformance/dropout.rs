//! Cases with dropout.
//!
//! The decision here: tokens, documents and heads of the coins are drawn independently of each
//! other and of the mask, so that a kernel cannot take one for the other.

use super::case::Case;
use super::masks;
use super::random::Random;
use crate::dropout::Dropout;
use crate::job::{Band, JobDropout, Mask, Window};

impl Case {
    /// This case with dropout in its jobs, and with bands as masks.
    pub fn with_dropout(mut self, seed: u64) -> Case {
        let random = &mut Random::new(seed ^ 0xc01a);
        for job in self.parts.iter_mut().map(|part| &mut part.job) {
            let transform = job.transform.as_ref();
            let sloping = transform.is_some_and(|transform| transform.slopes.is_some());
            let size = [job.queries, job.keys];
            let band = match &job.mask {
                Some(Mask::Band(band)) => *band,
                _ => masks::band(random, size, sloping),
            };
            let window = match random.once_in(3) {
                true => Window::ALL,
                false => band.window,
            };
            job.mask = Some(Mask::Band(Band { window, ..band }));
            // Outputs stay below the mark of cells that a job must not write.
            let probability = random.pick(&[0.0, 0.1, 0.3, 0.5, 0.8]);
            let all_heads = job.heads + random.below(5);
            job.dropout = Some(JobDropout {
                dropout: Dropout::new(probability, random.bits()).expect("a probability"),
                first_token: random.pick(&[0, 1, 2, 3, 70, 3_000_000_001]),
                segment_step: random.pick(&[0, 1, 64, 1001]),
                document: random.pick(&[0, 1, 5, 4096]),
                heads: (0..job.heads).map(|_| random.below(all_heads)).collect(),
                all_heads,
            });
        }
        self
    }
}
