//! Wires between the GPUs of several processes, by name.

use std::fmt;
use std::str::FromStr;

/// How parcels go from one process's GPU to another's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WireChoice {
    /// The fastest that connects two ranks.
    #[default]
    Auto,
    /// GPU memory that both processes read (CUDA IPC).
    Ipc,
    /// NCCL.
    Nccl,
    /// Pinned host memory and MPI.
    Host,
}

impl FromStr for WireChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<WireChoice, String> {
        match text {
            "auto" => Ok(WireChoice::Auto),
            "ipc" => Ok(WireChoice::Ipc),
            "nccl" => Ok(WireChoice::Nccl),
            "host" => Ok(WireChoice::Host),
            _ => Err("write auto, ipc, nccl or host".to_string()),
        }
    }
}

impl fmt::Display for WireChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WireChoice::Auto => "auto",
            WireChoice::Ipc => "ipc",
            WireChoice::Nccl => "nccl",
            WireChoice::Host => "host",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wires_parse_back_and_other_text_is_refused() {
        for name in ["auto", "ipc", "nccl", "host"] {
            let wire: WireChoice = name.parse().expect(name);
            assert_eq!(wire.to_string(), name);
        }
        assert!("mpi".parse::<WireChoice>().is_err());
        assert_eq!(WireChoice::default(), WireChoice::Auto);
    }
}
