//! Safetensors files for tests: written, read and compared.

use std::collections::BTreeMap;
use std::path::Path;

use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

/// A tensor of a file, with its elements converted to f64.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredTensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub elements: Vec<f64>,
}

impl StoredTensor {
    /// Pseudo-random elements, the same on every call.
    pub fn wave(dtype: Dtype, shape: &[usize], phase: f64) -> StoredTensor {
        let count: usize = shape.iter().product();
        let element = |i: usize| ((i * i % 1013) as f64 * 0.7 + phase).sin();
        StoredTensor {
            dtype,
            shape: shape.to_vec(),
            elements: (0..count).map(element).collect(),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let elements = self.elements.iter();
        match self.dtype {
            Dtype::F64 => elements.flat_map(|x| x.to_le_bytes()).collect(),
            Dtype::F32 => elements.flat_map(|x| (*x as f32).to_le_bytes()).collect(),
            Dtype::BF16 => elements
                .flat_map(|x| bf16::from_f64(*x).to_le_bytes())
                .collect(),
            Dtype::F16 => elements
                .flat_map(|x| f16::from_f64(*x).to_le_bytes())
                .collect(),
            Dtype::I32 => elements.flat_map(|x| (*x as i32).to_le_bytes()).collect(),
            other => panic!("no test writes {other:?}"),
        }
    }

    /// The largest absolute value.
    pub fn largest(&self) -> f64 {
        self.elements.iter().fold(0.0, |most, x| most.max(x.abs()))
    }

    /// The largest difference to another tensor; equal infinities differ by nothing.
    pub fn difference(&self, other: &StoredTensor) -> f64 {
        assert_eq!(self.shape, other.shape);
        let pairs = self.elements.iter().zip(&other.elements);
        pairs.fold(0.0, |most: f64, (a, b)| {
            let difference = if a == b { 0.0 } else { (a - b).abs() };
            assert!(!difference.is_nan(), "{a} against {b}");
            most.max(difference)
        })
    }
}

/// The tensors of a file by name.
pub type StoredTensors = BTreeMap<String, StoredTensor>;

/// q, k, v and do of a small call in f32: batch 1, 12 tokens, 4 heads over 2 key heads,
/// head dimension 8.
pub fn small() -> StoredTensors {
    call(Dtype::F32, [1, 12, 4, 8], 2)
}

/// q, k, v and do of a call.
pub fn call(dtype: Dtype, [b, n, h, d]: [usize; 4], kv_heads: usize) -> StoredTensors {
    let tensors = [
        ("q", h, 0.1),
        ("k", kv_heads, 0.2),
        ("v", kv_heads, 0.3),
        ("do", h, 0.4),
    ];
    let named = tensors.map(|(name, heads, phase)| {
        let tensor = StoredTensor::wave(dtype, &[b, n, heads, d], phase);
        (name.to_string(), tensor)
    });
    named.into_iter().collect()
}

/// Writes a file.
pub fn write(path: &Path, tensors: &StoredTensors) {
    let bytes: Vec<(&String, &StoredTensor, Vec<u8>)> = tensors
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
pub fn read(path: &Path) -> StoredTensors {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let stored = |view: TensorView<'_>| StoredTensor {
        dtype: view.dtype(),
        shape: view.shape().to_vec(),
        elements: converted(&view),
    };
    let named = file.tensors().into_iter();
    named.map(|(name, view)| (name, stored(view))).collect()
}

fn converted(view: &TensorView<'_>) -> Vec<f64> {
    let data = view.data();
    match view.dtype() {
        Dtype::F64 => each(data, f64::from_le_bytes),
        Dtype::F32 => each(data, |x| f32::from_le_bytes(x) as f64),
        Dtype::BF16 => each(data, |x| bf16::from_le_bytes(x).to_f64()),
        Dtype::F16 => each(data, |x| f16::from_le_bytes(x).to_f64()),
        other => panic!("no test reads {other:?}"),
    }
}

fn each<const N: usize>(bytes: &[u8], convert: impl Fn([u8; N]) -> f64) -> Vec<f64> {
    let (chunks, rest) = bytes.as_chunks::<N>();
    assert!(rest.is_empty());
    chunks.iter().map(|x| convert(*x)).collect()
}
