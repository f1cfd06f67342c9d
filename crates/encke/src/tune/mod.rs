//! The profile of this machine: measured once, stored in the user's configuration directory,
//! optional.
//!
//! The description itself is the cost model's [`Machine`]. This module adds which machine it
//! belongs to ([`MachineId`]), where it is stored, and the figures used without a profile.
//!
//! The decision here: the file name is a hash of everything the profile depends on (processor,
//! cores, GPU, version), so that machines and versions can share a home directory.

mod builtin;
mod check;
#[cfg(feature = "cuda")]
mod gpu;
mod machine_id;
mod measure;
mod profile;

use encke_cost::Machine;

pub use builtin::builtin_machine;
pub use check::{
    ChoiceCheck, GOOD_MARGIN, MeasuredAlternative, check, median_error, raw_median_error,
};
pub use machine_id::MachineId;
pub use measure::{DEFAULT_LIMIT, measure};
pub use profile::{FORMAT, MachineProfile, MachineSource, TuneError};

/// Built without the feature `cuda`, a machine has no GPU that could be measured.
#[cfg(not(feature = "cuda"))]
mod gpu {
    use encke_cost::Machine;

    use super::profile::TuneError;

    pub fn measure() -> Result<Option<Machine>, TuneError> {
        Ok(None)
    }
}

/// Threads of this machine as ranks: from its profile, or else from built-in figures.
pub fn threads_here() -> Result<(Machine, MachineSource), TuneError> {
    let here = MachineId::current();
    let built_in = || (builtin_machine(&here), MachineSource::BuiltIn);
    let path = match MachineProfile::path(&here) {
        Ok(path) => path,
        Err(TuneError::NoConfigDir) => return Ok(built_in()),
        Err(error) => return Err(error),
    };
    Ok(match MachineProfile::load(&here)? {
        Some(profile) => (profile.machine, MachineSource::Measured(path)),
        None => built_in(),
    })
}
