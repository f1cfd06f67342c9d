//! How much a run of the tests tries: a share of the random cases, or all of them.
//!
//! The decision here: one variable for all suites. `./test` runs shares whose seeds are fixed and
//! that reach every class of cases; `./test --long` sets `ENCKE_LONG`, and runs the rest, too.

use super::suite::KernelSuite;

/// `all` where `ENCKE_LONG` is set, and otherwise `share`: numbers of cases, seeds, sizes.
pub fn extent<T>(share: T, all: T) -> T {
    match std::env::var_os("ENCKE_LONG") {
        Some(_) => all,
        None => share,
    }
}

impl KernelSuite {
    /// All cases where `ENCKE_LONG` is set, and otherwise every fifth. What a case contains
    /// depends on the remainders of its seed by 3 and 4, so every fifth reaches all classes.
    pub fn of_this_run() -> KernelSuite {
        KernelSuite {
            share: extent((0, 5), (0, 1)),
            ..KernelSuite::default()
        }
    }
}
