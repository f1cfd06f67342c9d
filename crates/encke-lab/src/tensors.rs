//! Random input tensors for measurements whose results do not depend on the values.

use anyhow::Result;
use encke::conformance::Random;
use encke::{DType, Data, Shape, Tensor, View};

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
    2 * shape.batch * rows * (shape.heads + shape.kv_heads) * shape.dim * dtype.bytes()
}

impl RandomTensors {
    /// Elements uniform in −1 … 1; the same for the same seed, on any machine.
    pub fn new(shape: &Shape, dtype: DType, seed: u64) -> Result<RandomTensors> {
        check_memory("the input tensors", input_bytes(shape, dtype, shape.tokens))?;
        let mut random = Random::new(seed);
        let mut tensor = |heads: usize| {
            let dims = [shape.batch, shape.tokens, heads, shape.dim];
            let count = dims.iter().product();
            let values: Vec<f64> = (0..count).map(|_| random.unit()).collect();
            Tensor::from_data(Data::from_f64(dtype, &values), dims)
        };
        Ok(RandomTensors {
            q: tensor(shape.heads)?,
            k: tensor(shape.kv_heads)?,
            v: tensor(shape.kv_heads)?,
            dout: tensor(shape.heads)?,
        })
    }

    /// q, k and v.
    pub fn views(&self) -> (View<'_>, View<'_>, View<'_>) {
        (self.q.view(), self.k.view(), self.v.view())
    }
}
