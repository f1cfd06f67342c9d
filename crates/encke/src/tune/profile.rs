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
        let malformed = |reason: String| TuneError::Malformed {
            path: path.clone(),
            reason,
        };
        let profile: MachineProfile =
            json::from_slice(&text).map_err(|error| malformed(error.to_string()))?;
        if profile.format != FORMAT {
            return Err(malformed(format!(
                "format {}, expected {FORMAT}",
                profile.format
            )));
        }
        if profile.here != *here {
            return Err(malformed("it belongs to another machine".to_string()));
        }
        for machine in [Some(&profile.machine), profile.gpu.as_ref()]
            .into_iter()
            .flatten()
        {
            let checked = machine.check(1);
            checked.map_err(|error| malformed(error.to_string()))?;
        }
        let times = [
            profile.measured_s,
            profile.misfit,
            profile.yardstick_s.unwrap_or(1.0),
        ];
        if times.iter().any(|time| !(0.0..=1e9).contains(time)) {
            return Err(malformed(format!("its times are {times:?}, not 0 to 1e9")));
        }
        Ok(Some(profile))
    }
}
