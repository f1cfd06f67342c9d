//! The extension module `encke._encke`: the bindings of the Python package.
//!
//! Python decides nothing about attention and Rust nothing about torch: tensors come in as
//! addresses with shapes and strides, and go out as memory that torch or NumPy owns from then on.

mod attention;
mod error;
mod exchange;
mod gpu;
mod gpu_branches;
mod host_passes;
mod owned;
mod settings;
mod shard;
mod tensor;
mod wire;

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the command `encke` with these arguments, and returns its exit code.
#[pyfunction]
fn command(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    let line = std::iter::once(OsString::from("encke")).chain(arguments);
    py.detach(|| encke_cli::command(line))
}

#[pymodule]
#[pyo3(name = "_encke")]
fn extension(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("RingError", module.py().get_type::<error::RingError>())?;
    module.add(
        "UnreadableTensor",
        module.py().get_type::<error::UnreadableTensor>(),
    )?;
    module.add_class::<attention::Attention>()?;
    module.add_class::<owned::ArrayMemory>()?;
    module.add_class::<shard::PyShard>()?;
    module.add_function(wrap_pyfunction!(gpu::enqueue, module)?)?;
    module.add_function(wrap_pyfunction!(gpu::enqueue_shard, module)?)?;
    module.add_function(wrap_pyfunction!(gpu_branches::add_terms, module)?)?;
    module.add_function(wrap_pyfunction!(gpu_branches::start_deltas, module)?)?;
    module.add_function(wrap_pyfunction!(gpu_branches::add_delta, module)?)?;
    module.add_function(wrap_pyfunction!(shard::runs, module)?)?;
    module.add_function(wrap_pyfunction!(shard::query_runs, module)?)?;
    module.add_function(wrap_pyfunction!(shard::balanced, module)?)?;
    module.add_function(wrap_pyfunction!(shard::by_document, module)?)?;
    module.add_function(wrap_pyfunction!(shard::use_threads, module)?)?;
    module.add_function(wrap_pyfunction!(command, module)?)?;
    Ok(())
}
