//! Programs: which texts make one, and with which macros it is compiled.
//!
//! A program is specialised by macros rather than by branches at run time: the compiler sees head
//! dimension, type and mode as constants, and only what is asked for is ever compiled.

use encke_core::DType;

use crate::cache::Cache;
use crate::error::Result;
use crate::nvrtc::{Built, Nvrtc};

/// Text that stands before every program.
pub(crate) const COMMON: &str = include_str!("kernels/common.cuh");

/// A text, and the macros it is compiled with.
#[derive(Debug, Clone)]
pub struct Program {
    /// What it is called, in the cache and in messages.
    pub name: &'static str,
    /// The texts it is made of, after the common one. Functions, because some are generated.
    pub(crate) texts: &'static [fn() -> String],
    /// Macros, as `NAME=value`.
    pub(crate) defines: Vec<String>,
    /// Whether it needs the architecture-specific instructions of its GPU (`sm_90a`, not `sm_90`).
    pub(crate) specific: bool,
}

impl Program {
    /// A program of fixed texts.
    pub(crate) fn new(name: &'static str, texts: &'static [fn() -> String]) -> Program {
        Program {
            name,
            texts,
            defines: Vec::new(),
            specific: false,
        }
    }

    /// The same with one more macro.
    pub(crate) fn define(mut self, name: &str, value: impl std::fmt::Display) -> Program {
        self.defines.push(format!("{name}={value}"));
        self
    }

    /// The same with the macro of a storage type.
    pub(crate) fn stored(self, dtype: DType) -> Program {
        let name = match dtype {
            DType::F64 => "T_F64",
            DType::F32 => "T_F32",
            DType::Bf16 => "T_BF16",
            DType::F16 => "T_F16",
        };
        self.define(name, 1)
    }

    /// The whole text.
    pub fn text(&self) -> String {
        let mut text = COMMON.to_string();
        for part in self.texts {
            text.push('\n');
            text.push_str(&part());
        }
        text
    }

    /// What the compiler is told beside the architecture.
    pub fn options(&self) -> Vec<String> {
        let fixed = ["--std=c++17", "--ptxas-options=-v", "-default-device"];
        let mut options: Vec<String> = fixed.map(String::from).to_vec();
        options.extend(self.defines.iter().map(|define| format!("-D{define}")));
        options
    }

    /// The architecture it is compiled for on a GPU of this compute capability.
    pub fn architecture(&self, (major, minor): (i32, i32)) -> String {
        let suffix = if self.specific { "a" } else { "" };
        format!("sm_{major}{minor}{suffix}")
    }

    /// Machine code for a compute capability, from the cache if it is there.
    pub fn build(&self, nvrtc: &Nvrtc, cache: &Cache, capability: (i32, i32)) -> Result<Built> {
        let (text, options) = (self.text(), self.options());
        let arch = self.architecture(capability);
        let (joined, version) = (options.join(" "), nvrtc.version());
        let key = [&text, &joined, &arch, &version].map(String::as_str);
        cache.get(self.name, &key, || {
            nvrtc.compile(self.name, &text, &arch, &options)
        })
    }
}
