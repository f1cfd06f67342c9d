//! Options of the kernel suite.

/// Head dimensions below, at and above vector widths.
const DIMS: [usize; 9] = [1, 2, 3, 8, 16, 40, 64, 80, 128];

/// Options of the kernel suite.
#[derive(Debug, Clone, Copy)]
pub struct KernelSuite {
    /// Head dimensions of the cases.
    pub dims: &'static [usize],
    /// Whether gradients are bitwise repeatable. If not, gradients that must not change may differ
    /// by the rounding of their sums.
    pub repeatable: bool,
    /// Whether to test negative and zero scales.
    pub signs: bool,
    /// Whether weights and gradients of scores are rounded to the type of the inputs, and so are 0
    /// below its least number (f16: 6e-8).
    pub narrow_weights: bool,
    /// Whether to test windows and documents; otherwise masks are causal, and scores are plain.
    pub masks: bool,
    /// Whether to test softcaps and slopes beside them.
    pub transforms: bool,
    /// Whether a document of a packed job has the bits of a job of its own. If not, packed jobs are
    /// compared with the oracle alone.
    pub document_bits: bool,
    /// Whether to test values of another width than keys.
    pub value_dims: bool,
    /// Whether to test dropout.
    pub dropout: bool,
    /// Whether a dropped pair leaves out its value also where that is not finite.
    pub dropped_values: bool,
    /// Whether cases have few queries and thousands of keys, which kernels may split; otherwise
    /// they have at most 200 of each.
    pub long_keys: bool,
    /// (i, n): run the i-th of n shares of the cases, for parallel test runs.
    pub share: (u64, u64),
}

impl Default for KernelSuite {
    fn default() -> KernelSuite {
        KernelSuite {
            dims: &DIMS,
            repeatable: true,
            signs: false,
            narrow_weights: false,
            masks: true,
            transforms: true,
            document_bits: true,
            value_dims: true,
            dropout: true,
            dropped_values: true,
            long_keys: false,
            share: (0, 1),
        }
    }
}
