//! The instruction sets that kernels are compiled for: detection, choice, and override.
//!
//! Every instruction set runs the same algorithm, compiled for its vectors. `ENCKE_CPU` forces one,
//! so that each can be tested and timed on one machine. An instruction set that the machine does
//! not have is an error; the kernel never replaces it silently.

use std::fmt;
use std::str::FromStr;

use encke_core::kernel::KernelError;

/// The environment variable that forces an instruction set.
pub const ENV_VARIABLE: &str = "ENCKE_CPU";

/// An instruction set that attention is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InstructionSet {
    /// The baseline of the compilation target: 128-bit vectors on x86-64.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 (F, BW, CD, DQ, VL).
    Avx512,
    /// AVX-512, and the matrix tiles for bf16, f16 and f32.
    Amx,
}

impl InstructionSet {
    /// All instruction sets, the slowest first.
    pub const ALL: [Self; 4] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Amx];

    /// Whether this machine has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => pulp::x86::V3::is_available(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => pulp::x86::V4::is_available(),
            #[cfg(target_arch = "x86_64")]
            Self::Amx => Self::Avx512.is_available() && crate::amx::available(),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 | Self::Amx => false,
        }
    }

    /// The fastest instruction set of this machine.
    pub fn best() -> Self {
        let available = Self::ALL.into_iter().rev().find(|set| set.is_available());
        available.unwrap_or(Self::Portable)
    }

    /// The instruction set that [`ENV_VARIABLE`] names, or the fastest one if it is not set.
    pub fn from_env() -> Result<Self, KernelError> {
        match std::env::var(ENV_VARIABLE) {
            Ok(name) => name.parse(),
            Err(std::env::VarError::NotPresent) => Ok(Self::best()),
            Err(std::env::VarError::NotUnicode(name)) => Err(unknown(&name.to_string_lossy())),
        }
    }

    /// Returns `self`, or an error if this machine does not have it.
    pub fn check(self) -> Result<Self, KernelError> {
        if self.is_available() {
            return Ok(self);
        }
        Err(KernelError::Unsupported {
            kernel: "cpu",
            what: format!(
                "{self} on this machine, which has {}; change {ENV_VARIABLE}",
                Self::best()
            ),
        })
    }
}

impl fmt::Display for InstructionSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
        })
    }
}

impl FromStr for InstructionSet {
    type Err = KernelError;

    fn from_str(name: &str) -> Result<Self, KernelError> {
        let named = Self::ALL.into_iter().find(|set| set.to_string() == name);
        named.ok_or_else(|| unknown(name)).and_then(Self::check)
    }
}

fn unknown(name: &str) -> KernelError {
    KernelError::Unsupported {
        kernel: "cpu",
        what: format!("the instruction set {name:?}; known: portable, avx2, avx512, amx"),
    }
}
