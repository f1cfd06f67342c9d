//! The extension module `encke._encke`: what Python cannot say itself.
//!
//! Python decides nothing about attention and Rust nothing about torch: tensors come in as
//! addresses with shapes and strides, and go out as memory that others own from then on.

mod attention;
mod distributed;
mod error;
mod exchange;
mod gpu;
mod on_gpu;
mod owned;
mod settings;
mod shard_gpu;
mod tensor;

use std::ffi::OsString;

use pyo3::prelude::*;

/// Does what the words of a command line say, after the command's name, and returns its exit code.
#[pyfunction]
fn command(py: Python<'_>, words: Vec<OsString>) -> u8 {
    let named = std::iter::once(OsString::from("encke")).chain(words);
    py.detach(|| encke_cli::command(named))
}

#[pymodule]
#[pyo3(name = "_encke")]
fn extension(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("RingError", module.py().get_type::<error::RingError>())?;
    module.add_class::<attention::Attention>()?;
    module.add_class::<owned::Memory>()?;
    module.add_function(wrap_pyfunction!(on_gpu::forward_gpu, module)?)?;
    module.add_function(wrap_pyfunction!(on_gpu::backward_gpu, module)?)?;
    module.add_class::<distributed::Shard>()?;
    module.add_function(wrap_pyfunction!(shard_gpu::forward_shard_gpu, module)?)?;
    module.add_function(wrap_pyfunction!(shard_gpu::backward_shard_gpu, module)?)?;
    module.add_function(wrap_pyfunction!(distributed::runs, module)?)?;
    module.add_function(wrap_pyfunction!(distributed::use_threads, module)?)?;
    module.add_function(wrap_pyfunction!(command, module)?)?;
    Ok(())
}
