//! The thread ring against the f64 reference: random patterns, shardings, ring sizes.

use encke_core::conformance::extent;
use proptest::prelude::*;

use encke_core::naive::NaiveKernel;
use encke_ring::ThreadRing;

use crate::support::{Configuration, DEADLINE, check};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(extent(120, 600)))]

    #[test]
    fn random_configurations_equal_the_reference(seed in any::<u64>()) {
        let ring = ThreadRing::new(NaiveKernel, DEADLINE);
        check(&ring, &Configuration::random(seed)).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn random_masks_equal_the_reference(seed in any::<u64>()) {
        let ring = ThreadRing::new(NaiveKernel, DEADLINE);
        check(&ring, &Configuration::masked(seed)).map_err(TestCaseError::fail)?;
    }
}
