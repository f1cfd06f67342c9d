//! Attention from candle's matrix products, softmax and a mask: the oracle of these tests.

use candle_core::{D, DType, Device, Result, Tensor};
use encke::{Pattern, Shape};

/// Attention with a pattern, for tensors `[b, n, h, d]`: the logarithm of a pair's multiplicity is
/// added to its score, which is the multiset softmax; a row without keys is 0.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, pattern: &Pattern) -> Result<Tensor> {
    let (batch, tokens, heads, dim) = q.dims4()?;
    let kv_heads = k.dim(2)?;
    let shape = Shape::new(batch, tokens, heads, kv_heads, dim).unwrap();
    let each = |x: &Tensor| -> Result<Tensor> {
        let repeated = x.unsqueeze(3)?.repeat((1, 1, 1, heads / kv_heads, 1))?;
        repeated
            .reshape((batch, tokens, heads, dim))?
            .transpose(1, 2)?
            .contiguous()
    };
    let (k, v) = (each(k)?, each(v)?);
    let q = q.transpose(1, 2)?.contiguous()?;
    let mut counts = Vec::with_capacity(heads * tokens * tokens);
    let mut seeing = Vec::with_capacity(heads * tokens);
    for head in 0..heads {
        for row in 0..tokens {
            let from = counts.len();
            counts
                .extend((0..tokens).map(|key| pattern.multiplicity(&shape, head, row, key) as f64));
            let sees = counts[from..].iter().any(|count| *count > 0.0);
            seeing.push(f64::from(u8::from(sees)));
            if !sees {
                counts[from..].fill(1.0);
            }
        }
    }
    let dtype = q.dtype();
    let counts: Vec<f64> = counts.into_iter().map(f64::ln).collect();
    let device = q.device();
    let mask = Tensor::from_vec(counts, (1, heads, tokens, tokens), device)?.to_dtype(dtype)?;
    let seeing = Tensor::from_vec(seeing, (1, heads, tokens, 1), device)?.to_dtype(dtype)?;
    let scores = (q.matmul(&k.t()?)? / (dim as f64).sqrt())?.broadcast_add(&mask)?;
    let weights = candle_nn::ops::softmax(&scores, D::Minus1)?.broadcast_mul(&seeing)?;
    weights.matmul(&v)?.transpose(1, 2)?.contiguous()
}

/// A random tensor.
pub fn random(seed: usize, dims: [usize; 4]) -> Tensor {
    let mut random = encke::conformance::Random::new(seed as u64);
    let values: Vec<f64> = (0..dims.iter().product())
        .map(|_| 3.0 * random.unit())
        .collect();
    Tensor::from_vec(values, &dims, &Device::Cpu).unwrap()
}

/// The largest difference, relative to the largest expected element.
pub fn distance(got: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(got.dims(), expected.dims());
    let values = |x: &Tensor| -> Vec<f64> {
        let x = x.to_dtype(DType::F64).unwrap();
        x.flatten_all().unwrap().to_vec1().unwrap()
    };
    let (got, expected) = (values(got), values(expected));
    let largest = expected.iter().fold(0.0, |a: f64, x| a.max(x.abs()));
    let pairs = got.iter().zip(&expected);
    let furthest = pairs
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |a: f64, x| match x.is_nan() {
            true => f64::INFINITY,
            false => a.max(x),
        });
    furthest / largest.max(1e-30)
}
