//! Instruction sets: which there are, which one is used, and how to force another.
//!
//! Every arm runs the same algorithm, compiled for its vectors. `ENCKE_CPU` forces one, so that
//! each can be tested and timed on one machine; an arm that the machine does not have is refused,
//! never replaced in silence.

use std::fmt;
use std::str::FromStr;

use encke_core::kernel::KernelError;

/// The environment variable that forces an arm.
pub const VARIABLE: &str = "ENCKE_CPU";

/// A set of instructions that attention is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arm {
    /// Whatever the target has at least: 128-bit vectors on x86-64.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 (F, BW, CD, DQ, VL).
    Avx512,
    /// AVX-512, and the matrix tiles for bf16, f16 and f32.
    Amx,
}

impl Arm {
    /// All arms, the slowest first.
    pub const ALL: [Arm; 4] = [Arm::Portable, Arm::Avx2, Arm::Avx512, Arm::Amx];

    /// Whether this machine has it.
    pub fn is_available(self) -> bool {
        match self {
            Arm::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Arm::Avx2 => pulp::x86::V3::is_available(),
            #[cfg(target_arch = "x86_64")]
            Arm::Avx512 => pulp::x86::V4::is_available(),
            #[cfg(target_arch = "x86_64")]
            Arm::Amx => Arm::Avx512.is_available() && crate::amx::available(),
            #[cfg(not(target_arch = "x86_64"))]
            Arm::Avx2 | Arm::Avx512 | Arm::Amx => false,
        }
    }

    /// The fastest arm this machine has.
    pub fn best() -> Arm {
        let available = Arm::ALL.into_iter().rev().find(|arm| arm.is_available());
        available.unwrap_or(Arm::Portable)
    }

    /// The arm that [`VARIABLE`] names, or the fastest one.
    pub fn chosen() -> Result<Arm, KernelError> {
        match std::env::var(VARIABLE) {
            Ok(name) => name.parse(),
            Err(std::env::VarError::NotPresent) => Ok(Arm::best()),
            Err(std::env::VarError::NotUnicode(name)) => Err(unknown(&name.to_string_lossy())),
        }
    }

    /// Refuses an arm that this machine does not have.
    pub fn check(self) -> Result<Arm, KernelError> {
        if self.is_available() {
            return Ok(self);
        }
        Err(KernelError::Unsupported {
            kernel: "cpu",
            what: format!(
                "{self} on this machine, which has {}; change {VARIABLE}",
                Arm::best()
            ),
        })
    }
}

impl fmt::Display for Arm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Arm::Portable => "portable",
            Arm::Avx2 => "avx2",
            Arm::Avx512 => "avx512",
            Arm::Amx => "amx",
        })
    }
}

impl FromStr for Arm {
    type Err = KernelError;

    fn from_str(name: &str) -> Result<Arm, KernelError> {
        let named = Arm::ALL.into_iter().find(|arm| arm.to_string() == name);
        named.ok_or_else(|| unknown(name)).and_then(Arm::check)
    }
}

fn unknown(name: &str) -> KernelError {
    KernelError::Unsupported {
        kernel: "cpu",
        what: format!("the instruction set {name:?}; known: portable, avx2, avx512, amx"),
    }
}
