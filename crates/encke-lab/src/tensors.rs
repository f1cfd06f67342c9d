//! Random input tensors for measurements whose results do not depend on the values.

use anyhow::Result;
use encke::conformance::Random;
use encke::{DType, Shape, Tensor, View};

use crate::process::check_memory;

/// q, k, v and dout of one shape.
#[derive(Debug)]
pub struct RandomTensors {
    /// Queries.
    pub q: Tensor,
    /// Keys.
    pub k: Tensor,
    /// Values.
    pub v: Tensor,
    /// The gradient of the output.
    pub dout: Tensor,
}

/// Bytes of q, k, v and dout with `rows` tokens.
pub(crate) fn input_bytes(shape: &Shape, dtype: DType, rows: usize) -> usize {
    // A shape leaves room for 64 tensors of 8 bytes.
    let widths = shape.dim + shape.value_dim;
    shape.batch * rows * (shape.heads + shape.kv_heads) * widths * dtype.bytes()
}

/// Refuses sizes at which a kernel and small rings are measured, if this machine has no memory for
/// them: their tensors, made in f64, and as much for what the rings hold.
pub fn check_measured(shape: &Shape) -> Result<()> {
    let tensors = input_bytes(shape, DType::F64, shape.tokens);
    check_memory("the tensors of the measurement", 2 * tensors)
}

impl RandomTensors {
    /// Elements uniform in −1 … 1; the same for the same seed, on any machine.
    pub fn new(shape: &Shape, dtype: DType, seed: u64) -> Result<RandomTensors> {
        check_memory("the input tensors", input_bytes(shape, dtype, shape.tokens))?;
        let mut random = Random::new(seed);
        let (d, value_dim) = (shape.dim, shape.value_dim);
        let mut tensor = |tokens: usize, heads: usize, dim: usize| {
            let dims = [shape.batch, tokens, heads, dim];
            let mut tensor = Tensor::try_zeros(dtype, dims)?;
            let elements = tensor.data_mut();
            (0..elements.as_slice().len()).for_each(|at| elements.set(at, random.unit()));
            Ok::<_, encke_core::Error>(tensor)
        };
        Ok(RandomTensors {
            q: tensor(shape.queries, shape.heads, d)?,
            k: tensor(shape.tokens, shape.kv_heads, d)?,
            v: tensor(shape.tokens, shape.kv_heads, value_dim)?,
            dout: tensor(shape.queries, shape.heads, value_dim)?,
        })
    }

    /// q, k and v.
    pub fn views(&self) -> (View<'_>, View<'_>, View<'_>) {
        (self.q.view(), self.k.view(), self.v.view())
    }
}
