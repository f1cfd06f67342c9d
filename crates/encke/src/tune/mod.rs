//! This machine in numbers: measured once, kept in the user's configuration, never required.
//!
//! The description is the simulator's [`Machine`]; there is no second one. What is added here is whose
//! it is ([`Here`]), where it is kept, and what is assumed where nothing was measured.
//!
//! The decision here: a profile is kept under a name made of everything it depends on, the
//! processor, its cores, the GPU and this version, so that another machine, or another version,
//! does not find it, and a home directory may be shared.

mod check;
#[cfg(feature = "cuda")]
mod gpu;
mod here;
mod measure;
mod usual;

use std::fs;
use std::io;
use std::path::PathBuf;

use encke_core::host::checksum;
use encke_core::kernel::KernelError;
use encke_cost::{ClockError, Machine};
use serde::{Deserialize, Serialize};

pub use check::{Checked, GOOD, Tried, check, median_error, raw_median_error};
pub use here::Here;
pub use measure::{LIMIT, measure};
pub use usual::usual;

/// Built without the feature `cuda`, a machine has no GPU that could be measured.
#[cfg(not(feature = "cuda"))]
mod gpu {
    pub fn measure() -> Result<Option<super::Machine>, super::TuneError> {
        Ok(None)
    }

    pub fn name() -> Option<String> {
        None
    }
}

/// The form of the file.
pub const FORMAT: u32 = 1;

/// What was measured, and where.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MachineProfile {
    /// The form of the file: [`FORMAT`].
    pub format: u32,
    /// Where it was measured.
    pub here: Here,
    /// How long that took.
    pub measured_s: f64,
    /// How far the description is from the readings it was made of: the median over all jobs.
    pub misfit: f64,
    /// Seconds of the yardstick, the ring by which it is told later whether the machine is still as
    /// fast as it was.
    #[serde(default)]
    pub yardstick_s: Option<f64>,
    /// Threads of this machine as ranks.
    pub machine: Machine,
    /// Its GPU, if it has one, as the device of a rank; hops stay on it, or go through the host.
    pub gpu: Option<Machine>,
}

/// Where a description comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// A profile of this machine.
    Measured(PathBuf),
    /// A description that was given, or put together from names.
    Described(String),
    /// What is built in, because nothing was measured here with this version.
    BuiltIn,
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Source::Measured(path) => write!(f, "measured here, {}", path.display()),
            Source::Described(name) => write!(f, "as described, {name}"),
            Source::BuiltIn => {
                write!(
                    f,
                    "built-in figures, nothing was measured here (encke tune does)"
                )
            }
        }
    }
}

/// Why there is no profile.
#[derive(Debug, thiserror::Error)]
pub enum TuneError {
    /// Nobody says where configurations are.
    #[error("there is no place for a profile: set XDG_CONFIG_HOME or HOME")]
    NoPlace,
    /// The file cannot be read.
    #[error("cannot read {}: {error}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// The file is no profile.
    #[error("{} is no machine profile ({reason}); measure again with encke tune", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A kernel is not to be had, or failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// What was measured makes no description.
    #[error(transparent)]
    Clock(#[from] ClockError),
}

impl MachineProfile {
    /// Where the profile of a machine is kept.
    pub fn path(here: &Here) -> Result<PathBuf, TuneError> {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let folder = set("XDG_CONFIG_HOME").map(PathBuf::from);
        let folder = folder.or_else(|| set("HOME").map(|home| PathBuf::from(home).join(".config")));
        let folder = folder.ok_or(TuneError::NoPlace)?;
        let key = checksum(here.words().as_bytes());
        Ok(folder
            .join("encke")
            .join(format!("machine-{key:016x}.json")))
    }

    /// The profile of a machine, if it was measured with this version.
    pub fn load(here: &Here) -> Result<Option<MachineProfile>, TuneError> {
        let path = MachineProfile::path(here)?;
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(TuneError::Unreadable { path, error }),
        };
        let malformed = |reason: String| TuneError::Malformed {
            path: path.clone(),
            reason,
        };
        let profile: MachineProfile =
            serde_json::from_str(&text).map_err(|error| malformed(error.to_string()))?;
        if profile.format != FORMAT {
            return Err(malformed(format!(
                "format {}, known is {FORMAT}",
                profile.format
            )));
        }
        if profile.here != *here {
            return Err(malformed("it is another machine's".to_string()));
        }
        profile.machine.check(1)?;
        Ok(Some(profile))
    }
}

/// Threads of this machine as ranks: as measured, or as built in where nothing was.
pub fn threads_here() -> Result<(Machine, Source), TuneError> {
    let here = Here::now();
    let built_in = || (usual(&here), Source::BuiltIn);
    let path = match MachineProfile::path(&here) {
        Ok(path) => path,
        Err(TuneError::NoPlace) => return Ok(built_in()),
        Err(error) => return Err(error),
    };
    Ok(match MachineProfile::load(&here)? {
        Some(profile) => (profile.machine, Source::Measured(path)),
        None => built_in(),
    })
}
