//! Safetensors files for tests: made, read back, compared.

use std::collections::BTreeMap;
use std::path::Path;

use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

/// A tensor of a file, its numbers widened to f64.
#[derive(Debug, Clone, PartialEq)]
pub struct Stored {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub numbers: Vec<f64>,
}

impl Stored {
    /// Numbers that look random and are always the same.
    pub fn wave(dtype: Dtype, shape: &[usize], phase: f64) -> Stored {
        let count: usize = shape.iter().product();
        let number = |i: usize| ((i * i % 1013) as f64 * 0.7 + phase).sin();
        Stored {
            dtype,
            shape: shape.to_vec(),
            numbers: (0..count).map(number).collect(),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let numbers = self.numbers.iter();
        match self.dtype {
            Dtype::F64 => numbers.flat_map(|x| x.to_le_bytes()).collect(),
            Dtype::F32 => numbers.flat_map(|x| (*x as f32).to_le_bytes()).collect(),
            Dtype::BF16 => numbers
                .flat_map(|x| bf16::from_f64(*x).to_le_bytes())
                .collect(),
            Dtype::F16 => numbers
                .flat_map(|x| f16::from_f64(*x).to_le_bytes())
                .collect(),
            Dtype::I32 => numbers.flat_map(|x| (*x as i32).to_le_bytes()).collect(),
            other => panic!("no test writes {other:?}"),
        }
    }

    /// The largest absolute value.
    pub fn largest(&self) -> f64 {
        self.numbers.iter().fold(0.0, |most, x| most.max(x.abs()))
    }

    /// The largest difference to another tensor; equal infinities differ by nothing.
    pub fn difference(&self, other: &Stored) -> f64 {
        assert_eq!(self.shape, other.shape);
        let pairs = self.numbers.iter().zip(&other.numbers);
        pairs.fold(0.0, |most: f64, (a, b)| {
            let difference = if a == b { 0.0 } else { (a - b).abs() };
            assert!(!difference.is_nan(), "{a} against {b}");
            most.max(difference)
        })
    }
}

/// The tensors of a file by name.
pub type Tensors = BTreeMap<String, Stored>;

/// q, k, v and do of a small call in f32: batch 1, 12 tokens, 4 heads over 2 key heads, 8 numbers.
pub fn small() -> Tensors {
    call(Dtype::F32, [1, 12, 4, 8], 2)
}

/// q, k, v and do of a call.
pub fn call(dtype: Dtype, [b, n, h, d]: [usize; 4], kv_heads: usize) -> Tensors {
    let tensors = [
        ("q", h, 0.1),
        ("k", kv_heads, 0.2),
        ("v", kv_heads, 0.3),
        ("do", h, 0.4),
    ];
    let named = tensors.map(|(name, heads, phase)| {
        let tensor = Stored::wave(dtype, &[b, n, heads, d], phase);
        (name.to_string(), tensor)
    });
    named.into_iter().collect()
}

/// Writes a file.
pub fn write(path: &Path, tensors: &Tensors) {
    let bytes: Vec<(&String, &Stored, Vec<u8>)> = tensors
        .iter()
        .map(|(name, tensor)| (name, tensor, tensor.bytes()))
        .collect();
    let views = bytes.iter().map(|(name, tensor, bytes)| {
        let view = TensorView::new(tensor.dtype, tensor.shape.clone(), bytes).unwrap();
        (name.as_str(), view)
    });
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Reads a file.
pub fn read(path: &Path) -> Tensors {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let stored = |view: TensorView<'_>| Stored {
        dtype: view.dtype(),
        shape: view.shape().to_vec(),
        numbers: widened(&view),
    };
    let named = file.tensors().into_iter();
    named.map(|(name, view)| (name, stored(view))).collect()
}

fn widened(view: &TensorView<'_>) -> Vec<f64> {
    let data = view.data();
    match view.dtype() {
        Dtype::F64 => each(data, f64::from_le_bytes),
        Dtype::F32 => each(data, |x| f32::from_le_bytes(x) as f64),
        Dtype::BF16 => each(data, |x| bf16::from_le_bytes(x).to_f64()),
        Dtype::F16 => each(data, |x| f16::from_le_bytes(x).to_f64()),
        other => panic!("no test reads {other:?}"),
    }
}

fn each<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> f64) -> Vec<f64> {
    let (numbers, rest) = bytes.as_chunks::<N>();
    assert!(rest.is_empty());
    numbers.iter().map(|x| number(*x)).collect()
}
