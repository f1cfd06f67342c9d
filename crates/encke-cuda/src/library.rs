//! Finds and loads NVIDIA's libraries at run time: driver, NVRTC and NCCL.
//!
//! Building this crate needs no CUDA. A library is loaded from the file that an environment
//! variable names, from the loader's path, or from the folders of toolkits and Python wheels; if it
//! is missing, the error lists every file and folder tried.

use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use crate::error::{Error, Result};

/// How to find a library.
pub(crate) struct LibrarySpec {
    /// Its name in messages.
    pub library: &'static str,
    /// The environment variable with its path.
    pub variable: &'static str,
    /// File names, best first.
    pub names: &'static [&'static str],
    /// What to do if it is missing.
    pub advice: &'static str,
}

/// The driver.
pub(crate) const DRIVER: LibrarySpec = LibrarySpec {
    library: "the CUDA driver",
    variable: "ENCKE_LIBCUDA",
    names: &["libcuda.so.1", "libcuda.so"],
    advice: "install NVIDIA's driver, or set ENCKE_LIBCUDA to the file; on a machine without a GPU \
             use the CPU",
};

/// The compiler.
pub(crate) const NVRTC: LibrarySpec = LibrarySpec {
    library: "NVRTC, CUDA's run-time compiler,",
    variable: "ENCKE_NVRTC",
    names: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
    advice: "install the CUDA toolkit or `pip install nvidia-cuda-nvrtc`, or set ENCKE_NVRTC to \
             the file",
};

/// Communication between GPUs.
pub(crate) const NCCL: LibrarySpec = LibrarySpec {
    library: "NCCL",
    variable: "ENCKE_NCCL",
    names: &["libnccl.so.2", "libnccl.so"],
    advice: "install NCCL 2.14 or newer or `pip install nvidia-nccl-cu13`, or set ENCKE_NCCL to \
             the file; without NCCL hops are staged through the host",
};

/// The first library found, and its file.
pub(crate) fn find(spec: &LibrarySpec) -> Result<(Library, PathBuf)> {
    let mut tried = Vec::new();
    if let Some(file) = std::env::var_os(spec.variable) {
        let file = PathBuf::from(file);
        return match open(&file) {
            Ok(library) => Ok((library, file)),
            Err(reason) => Err(missing(spec, format!("{} ({reason})", file.display()))),
        };
    }
    for name in spec.names {
        match open(Path::new(name)) {
            Ok(library) => return Ok((library, mapped(name).unwrap_or_else(|| name.into()))),
            Err(_) => tried.push(format!("{name} on the loader's path")),
        }
    }
    for folder in folders() {
        for name in spec.names {
            let file = folder.join(name);
            if !file.exists() {
                continue;
            }
            match open(&file) {
                Ok(library) => return Ok((library, file)),
                Err(reason) => tried.push(format!("{} ({reason})", file.display())),
            }
        }
        tried.push(folder.display().to_string());
    }
    Err(missing(spec, tried.join(", ")))
}

fn missing(spec: &LibrarySpec, searched: String) -> Error {
    Error::Library {
        library: spec.library,
        searched,
        advice: spec.advice,
    }
}

/// A function of a library.
pub(crate) fn function<T: Copy>(library: &Library, spec: &LibrarySpec, name: &str) -> Result<T> {
    // SAFETY: every caller gives the documented type of the function.
    let symbol = unsafe { library.get::<T>(name.as_bytes()) };
    symbol.map(|symbol| *symbol).map_err(|_| Error::Function {
        library: spec.library,
        function: name.into(),
    })
}

/// Opens a library with global visibility: libraries loaded later find it by name.
pub(crate) fn open(file: &Path) -> std::result::Result<Library, String> {
    // SAFETY: NVIDIA's libraries run no code on loading that depends on ours.
    let library = unsafe { Library::open(Some(file), RTLD_NOW | RTLD_GLOBAL) };
    library.map_err(|error| {
        let source = std::error::Error::source(&error);
        source.map_or_else(|| error.to_string(), |source| source.to_string())
    })
}

/// Folders that may contain NVIDIA's libraries, best first.
fn folders() -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(root) = std::env::var_os(variable) {
            found.push(Path::new(&root).join("lib64"));
        }
    }
    let mut toolkits = vec![PathBuf::from("/usr/local/cuda")];
    toolkits.extend(children(Path::new("/usr/local"), "cuda-"));
    found.extend(toolkits.iter().map(|root| root.join("lib64")));
    let environment = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from);
    for root in environment
        .into_iter()
        .chain(["/usr/local".into(), "/usr".into()])
    {
        for python in children(&root.join("lib"), "python3") {
            for packages in ["site-packages", "dist-packages"] {
                for wheel in ["cu13", "cuda_nvrtc", "nccl"] {
                    found.push(python.join(packages).join("nvidia").join(wheel).join("lib"));
                }
            }
        }
    }
    found.extend(
        [
            "/usr/lib/x86_64-linux-gnu",
            "/usr/lib64",
            "/usr/lib/wsl/lib",
        ]
        .map(PathBuf::from),
    );
    found.retain(|folder| folder.is_dir());
    found
}

/// Entries of a folder whose names begin with `prefix`, in descending order.
fn children(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let named = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix));
    let mut paths: Vec<PathBuf> = named.map(|entry| entry.path()).collect();
    paths.sort();
    paths.reverse();
    paths
}

/// The file of a loaded library, from /proc/self/maps.
fn mapped(name: &str) -> Option<PathBuf> {
    let stem = name.split(".so").next()?;
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let files = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5));
    let ours = |file: &&str| {
        let name = Path::new(file).file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with(&format!("{stem}.so")))
    };
    files.map(str::trim).find(ours).map(PathBuf::from)
}
