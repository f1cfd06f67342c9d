//! The extension module `encke._encke`: what Python cannot say itself.
//!
//! Python decides nothing about attention and Rust nothing about torch: tensors come in as
//! addresses with shapes and strides, and go out as memory that others may own.

use pyo3::prelude::*;

#[pymodule]
#[pyo3(name = "_encke")]
fn module(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    Ok(())
}
