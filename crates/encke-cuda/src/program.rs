//! Programs: CUDA C++ texts and the macros they are compiled with.
//!
//! A program is specialised by macros rather than by branches at run time: head dimension, type and
//! mode are compile-time constants, and only variants that are used are compiled.

use std::fmt::Write;

use encke_core::DType;

use crate::cache::Cache;
use crate::error::Result;
use crate::nvrtc::{CompiledProgram, Nvrtc};

/// The text that begins every program.
pub(crate) const COMMON: &str = include_str!("kernels/common.cuh");

/// Texts and the macros they are compiled with.
#[derive(Debug, Clone)]
pub struct Program {
    /// Its name in the cache and in messages.
    pub name: &'static str,
    /// Its texts after the common one. Functions, because some are generated.
    pub(crate) texts: &'static [fn() -> String],
    /// The macros, as `-DNAME=value`, each on a line: one text, because every launch makes it.
    pub(crate) defines: String,
    /// Whether it uses architecture-specific instructions (`sm_90a`, not `sm_90`).
    pub(crate) specific: bool,
}

impl Program {
    /// A program without macros.
    pub(crate) fn new(name: &'static str, texts: &'static [fn() -> String]) -> Program {
        Program {
            name,
            texts,
            defines: String::with_capacity(192),
            specific: false,
        }
    }

    /// Adds the macros that are present, with the value 1.
    pub(crate) fn define_present(self, macros: &[(&str, bool)]) -> Program {
        let present = macros.iter().filter(|(_, present)| *present);
        present.fold(self, |program, (name, _)| program.define(name, 1))
    }

    /// Adds a macro.
    pub(crate) fn define(mut self, name: &str, value: impl std::fmt::Display) -> Program {
        // Writing to a text does not fail.
        let _ = writeln!(self.defines, "-D{name}={value}");
        self
    }

    /// Adds the macro of a storage type.
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

    /// The compiler options beside the architecture.
    pub fn options(&self) -> Vec<String> {
        let fixed = ["--std=c++17", "--ptxas-options=-v", "-default-device"];
        let mut options: Vec<String> = fixed.map(String::from).to_vec();
        options.extend(self.defines.lines().map(String::from));
        options
    }

    /// The architecture for a GPU of this compute capability.
    pub fn architecture(&self, (major, minor): (i32, i32)) -> String {
        let suffix = if self.specific { "a" } else { "" };
        format!("sm_{major}{minor}{suffix}")
    }

    /// Machine code for a compute capability, from the cache if possible.
    pub fn build(
        &self,
        nvrtc: &Nvrtc,
        cache: &Cache,
        capability: (i32, i32),
    ) -> Result<CompiledProgram> {
        let (text, options) = (self.text(), self.options());
        let arch = self.architecture(capability);
        let (joined, version) = (options.join(" "), nvrtc.version());
        let key = [&text, &joined, &arch, &version].map(String::as_str);
        cache.get(self.name, &key, || {
            nvrtc.compile(self.name, &text, &arch, &options)
        })
    }
}
