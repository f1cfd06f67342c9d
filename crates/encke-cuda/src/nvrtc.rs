//! NVRTC: compiles CUDA C++ to machine code for one architecture.
//!
//! The decision here: machine code (cubin), not PTX. The code that passed the gate on spills and
//! warnings is the code that runs; no driver compiles it again.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

use libloading::os::unix::Library;

use crate::error::{Error, Result};
use crate::library::{self, NVRTC};

/// A loaded NVRTC.
pub struct Nvrtc {
    library: Library,
    version: (c_int, c_int),
    // NVRTC opens its built-in functions by bare name, so they must be loaded first.
    _builtins: Vec<Library>,
}

/// The result of a compilation.
#[derive(Debug, Clone)]
pub struct CompiledProgram {
    /// Machine code.
    pub cubin: Vec<u8>,
    /// The log of compiler and assembler: registers, spills, warnings.
    pub log: String,
}

type ProgramHandle = *mut c_void;
type GetBytesFn = unsafe extern "C" fn(ProgramHandle, *mut c_char) -> c_int;
type GetSizeFn = unsafe extern "C" fn(ProgramHandle, *mut usize) -> c_int;

impl Nvrtc {
    /// Finds and loads it.
    pub fn load() -> Result<Nvrtc> {
        let (library, file) = library::find(&NVRTC)?;
        let builtins = file.parent().map(builtins).unwrap_or_default();
        let mut nvrtc = Nvrtc {
            library,
            version: (0, 0),
            _builtins: builtins,
        };
        type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
        let version: Version = nvrtc.function("nvrtcVersion")?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: pointers to two ints, as documented.
        unsafe { version(&mut major, &mut minor) };
        nvrtc.version = (major, minor);
        Ok(nvrtc)
    }

    /// Its version, for cache keys and messages.
    pub fn version(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// Compiles `text` for `arch` (such as `sm_90a`).
    pub fn compile(
        &self,
        program: &str,
        text: &str,
        arch: &str,
        options: &[String],
    ) -> Result<CompiledProgram> {
        let failed = |log: String| Error::Compile {
            version: self.version(),
            program: program.into(),
            arch: arch.into(),
            log,
        };
        let string = |x: &str| CString::new(x).map_err(|error| failed(error.to_string()));
        let mut all = vec![format!("--gpu-architecture={arch}")];
        all.extend_from_slice(options);
        let all: Vec<CString> = all.iter().map(|x| string(x)).collect::<Result<_>>()?;
        let pointers: Vec<*const c_char> = all.iter().map(|x| x.as_ptr()).collect();
        let (text, name) = (string(text)?, string(&format!("{program}.cu"))?);

        type Create = unsafe extern "C" fn(
            *mut ProgramHandle,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        type Compile = unsafe extern "C" fn(ProgramHandle, c_int, *const *const c_char) -> c_int;
        let create: Create = self.function("nvrtcCreateProgram")?;
        let compile: Compile = self.function("nvrtcCompileProgram")?;
        let mut handle: ProgramHandle = ptr::null_mut();
        // SAFETY: strings and pointers outlive the call; no headers are passed.
        let code = unsafe {
            let (text, name) = (text.as_ptr(), name.as_ptr());
            create(&mut handle, text, name, 0, ptr::null(), ptr::null())
        };
        if code != 0 {
            return Err(failed(self.reason(code)?));
        }
        let owned = NvrtcProgram {
            nvrtc: self,
            handle,
        };
        // SAFETY: the handle was just created and the options outlive the call.
        let code = unsafe { compile(owned.handle, pointers.len() as c_int, pointers.as_ptr()) };
        let log = owned.output("nvrtcGetProgramLogSize", "nvrtcGetProgramLog")?;
        let log = String::from_utf8_lossy(&log)
            .trim_end_matches('\0')
            .to_string();
        if code != 0 {
            return Err(failed(format!("{}\n{log}", self.reason(code)?)));
        }
        let cubin = owned.output("nvrtcGetCUBINSize", "nvrtcGetCUBIN")?;
        Ok(CompiledProgram { cubin, log })
    }

    fn function<T: Copy>(&self, name: &str) -> Result<T> {
        library::function(&self.library, &NVRTC, name)
    }

    fn reason(&self, code: c_int) -> Result<String> {
        type Text = unsafe extern "C" fn(c_int) -> *const c_char;
        let text: Text = self.function("nvrtcGetErrorString")?;
        // SAFETY: NVRTC owns a string for every code.
        let text = unsafe { CStr::from_ptr(text(code)) };
        Ok(text.to_string_lossy().into_owned())
    }
}

/// A program inside NVRTC, destroyed on drop.
struct NvrtcProgram<'a> {
    nvrtc: &'a Nvrtc,
    handle: ProgramHandle,
}

impl NvrtcProgram<'_> {
    /// The output of two functions of NVRTC: its size, and its bytes.
    fn output(&self, size: &str, bytes: &str) -> Result<Vec<u8>> {
        let get_size: GetSizeFn = self.nvrtc.function(size)?;
        let get_bytes: GetBytesFn = self.nvrtc.function(bytes)?;
        let mut length = 0;
        // SAFETY: the handle is alive, and the second call gets a buffer of the size that the first
        // returned.
        let (code, output) = unsafe {
            let first = get_size(self.handle, &mut length);
            let mut output = vec![0u8; length];
            let second = get_bytes(self.handle, output.as_mut_ptr().cast());
            (if first != 0 { first } else { second }, output)
        };
        if code != 0 {
            return Err(Error::Driver {
                what: bytes.into(),
                reason: self.nvrtc.reason(code)?,
            });
        }
        Ok(output)
    }
}

impl Drop for NvrtcProgram<'_> {
    fn drop(&mut self) {
        type Destroy = unsafe extern "C" fn(*mut ProgramHandle) -> c_int;
        if let Ok(destroy) = self.nvrtc.function::<Destroy>("nvrtcDestroyProgram") {
            // SAFETY: the handle is alive and not used again.
            unsafe { destroy(&mut self.handle) };
        }
    }
}

fn builtins(folder: &Path) -> Vec<Library> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let named = entries.filter(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        name.starts_with("libnvrtc-builtins.so.") && !name.contains(".alt.")
    });
    named
        .filter_map(|entry| library::open(&entry.path()).ok())
        .collect()
}

/// The log lines about spills and serialized wgmma; empty for a program that passes the gate.
pub fn compile_warnings(log: &str) -> Vec<String> {
    let bad = |line: &&str| {
        let spills = line.contains("spill stores") && !line.contains(", 0 bytes spill stores");
        spills
            || line.contains("C75")
            || line.to_lowercase().contains("serializ")
            || line.contains("setmaxnreg ignored")
    };
    log.lines()
        .filter(bad)
        .map(|line| line.trim().to_string())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::compile_warnings;

    #[test]
    fn spills_and_serialized_products_are_warnings() {
        let clean = "ptxas info : 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads";
        assert!(compile_warnings(clean).is_empty());
        let spilled =
            "ptxas info : 8 bytes stack frame, 120 bytes spill stores, 8 bytes spill loads";
        let slow = "warning (C7510): wgmma.mma_async instructions are serialized";
        assert_eq!(
            compile_warnings(&format!("{clean}\n{spilled}\n{slow}")).len(),
            2
        );
    }
}
