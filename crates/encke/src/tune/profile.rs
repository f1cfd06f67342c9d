//! The profile file of a machine: its contents, its path, and why it cannot be read.

use std::io;
use std::path::PathBuf;

use encke_core::host::checksum;
use encke_core::kernel::KernelError;
use encke_cost::{CostError, Machine};
use encke_files::json;
use serde::{Deserialize, Serialize};

use super::machine_id::MachineId;

/// The most bytes of a profile.
const LIMIT: u64 = 1 << 20;

/// Version of the file format.
pub const FORMAT: u32 = 1;

/// The measured description of a machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MachineProfile {
    /// Version of the file format: [`FORMAT`].
    pub format: u32,
    /// The machine it was measured on.
    pub here: MachineId,
    /// Seconds the measurement took.
    pub measured_s: f64,
    /// Median relative error of the fit, over all measured jobs.
    pub misfit: f64,
    /// Seconds of the calibration ring, which is run again later to see whether the machine's speed
    /// has changed.
    #[serde(default)]
    pub yardstick_s: Option<f64>,
    /// Threads of this machine as ranks.
    pub machine: Machine,
    /// Its GPU, if it has one, as the device of a rank; hops stay on the GPU or go through the
    /// host.
    pub gpu: Option<Machine>,
}

/// Where the description of a machine comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MachineSource {
    /// A profile of this machine.
    Measured(PathBuf),
    /// A description given by the user, or composed of named devices and links.
    Described(String),
    /// Built-in figures: there is no profile of this machine and version.
    BuiltIn,
}

impl std::fmt::Display for MachineSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            MachineSource::Measured(path) => write!(f, "measured here, {}", path.display()),
            MachineSource::Described(name) => write!(f, "as described, {name}"),
            MachineSource::BuiltIn => {
                write!(
                    f,
                    "built-in figures, this machine was not measured (run encke tune)"
                )
            }
        }
    }
}

/// Why there is no profile.
#[derive(Debug, thiserror::Error)]
pub enum TuneError {
    /// Neither XDG_CONFIG_HOME nor HOME is set.
    #[error("there is no directory for a profile: set XDG_CONFIG_HOME or HOME")]
    NoConfigDir,
    /// The file cannot be read.
    #[error("cannot read {}: {error}; remove it, and run encke tune again", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// The file is not a profile.
    #[error("{} is not a machine profile ({reason}); run encke tune again", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A kernel is unavailable or failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The measurements do not make a valid description.
    #[error(transparent)]
    Clock(#[from] CostError),
}

impl MachineProfile {
    /// The file of a machine's profile.
    pub fn path(here: &MachineId) -> Result<PathBuf, TuneError> {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let folder = set("XDG_CONFIG_HOME").map(PathBuf::from);
        let folder = folder.or_else(|| set("HOME").map(|home| PathBuf::from(home).join(".config")));
        let folder = folder.ok_or(TuneError::NoConfigDir)?;
        let key = checksum(here.to_text().as_bytes());
        Ok(folder
            .join("encke")
            .join(format!("machine-{key:016x}.json")))
    }

    /// Reads the profile of a machine; `None` if it was not measured with this version. It must
    /// belong to this user or root: it decides what is run.
    pub fn load(here: &MachineId) -> Result<Option<MachineProfile>, TuneError> {
        let path = MachineProfile::path(here)?;
        let text = match encke_files::read_own(&path, LIMIT) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(TuneError::Unreadable { path, error }),
        };
        MachineProfile::parse(&text, here)
            .map(Some)
            .map_err(|reason| TuneError::Malformed { path, reason })
    }

    /// The profile of a machine in a file's text, or what is wrong with it.
    fn parse(text: &[u8], here: &MachineId) -> Result<MachineProfile, String> {
        let profile: MachineProfile = json::from_slice(text).map_err(|error| error.to_string())?;
        if profile.format != FORMAT {
            return Err(format!("format {}, expected {FORMAT}", profile.format));
        }
        if profile.here != *here {
            return Err("it belongs to another machine".to_string());
        }
        for machine in [Some(&profile.machine), profile.gpu.as_ref()]
            .into_iter()
            .flatten()
        {
            machine.check(1).map_err(|error| error.to_string())?;
        }
        let times = [
            profile.measured_s,
            profile.misfit,
            profile.yardstick_s.unwrap_or(1.0),
        ];
        match times.iter().all(|time| (0.0..=1e9).contains(time)) {
            true => Ok(profile),
            false => Err(format!("its times are {times:?}, not 0 to 1e9")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tune::builtin_machine;
    use encke_core::conformance::{Random, mutate};
    use encke_core::plan::{Plan, Request};
    use encke_core::sharding::Sharding;
    use encke_core::{DType, Pattern, Shape};

    fn profile() -> MachineProfile {
        let here = MachineId::current();
        let machine = builtin_machine(&here);
        MachineProfile {
            format: FORMAT,
            measured_s: 2.0,
            misfit: 0.1,
            yardstick_s: Some(0.5),
            gpu: Some(machine.clone()),
            machine,
            here,
        }
    }

    #[test]
    fn a_damaged_profile_is_refused_or_predicts_a_time() {
        let right = profile();
        let text = serde_json::to_vec(&right).unwrap();
        assert_eq!(MachineProfile::parse(&text, &right.here).unwrap(), right);
        let shape = Shape::new(1, 64, 2, 2, 16).unwrap();
        let sharding = Sharding::contiguous(4).unwrap();
        let request = Request::new(shape, Pattern::dense(), sharding, DType::F32);
        let plan = Plan::new(request).unwrap();
        // The number of damages; hours of them by ENCKE_MUTATIONS.
        let count = std::env::var("ENCKE_MUTATIONS").ok();
        let count = count.map_or(3000, |count| count.parse().unwrap());
        let mut accepted = 0;
        for seed in 0..count {
            let damaged = mutate(&mut Random::new(seed), &text);
            let Ok(profile) = MachineProfile::parse(&damaged, &right.here) else {
                continue;
            };
            accepted += 1;
            for machine in [Some(profile.machine), profile.gpu].into_iter().flatten() {
                // A profile may lack a type.
                if let Ok(run) = encke_cost::simulate(&plan, &machine, 0..0) {
                    assert!(run.seconds.is_finite() && run.seconds >= 0.0, "seed {seed}");
                }
            }
        }
        assert!(accepted < count, "{accepted} of {count}");
    }

    #[test]
    fn sizes_that_no_machine_has_are_refused() {
        let refused = |change: fn(&mut MachineProfile), words: &str| {
            let mut wrong = profile();
            change(&mut wrong);
            let text = serde_json::to_vec(&wrong).unwrap();
            let error = MachineProfile::parse(&text, &wrong.here).unwrap_err();
            assert!(error.contains(words), "{error}");
        };
        refused(
            |wrong| wrong.machine.device.shared_cores = Some(usize::MAX),
            "shared_cores is 18446744073709552000",
        );
        refused(
            |wrong| wrong.machine.device.rates[0].forward.tile = [usize::MAX, 1],
            "tile is",
        );
        refused(
            |wrong| wrong.gpu.as_mut().unwrap().nics = 0,
            "nics is 0 in the description",
        );
        refused(|wrong| wrong.measured_s = -1.0, "its times are");
    }
}
