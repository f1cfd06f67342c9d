//! `encke attend --key-lengths`: a padded batch equals a call for each entry without its padding.

use safetensors::Dtype;

use crate::command::CommandFolder;
use crate::files::{self, StoredTensor, StoredTensors};

const LENGTHS: [usize; 3] = [9, 0, 4];

/// A padded batch whose padding is NaN: it is never read.
fn padded() -> StoredTensors {
    let mut tensors = files::call(Dtype::F64, [3, 9, 4, 8], 2);
    for tensor in tensors.values_mut() {
        let row = tensor.shape[2] * tensor.shape[3];
        for (entry, length) in LENGTHS.into_iter().enumerate() {
            let rows = (entry * 9 + length) * row..(entry + 1) * 9 * row;
            tensor.elements[rows].fill(f64::NAN);
        }
    }
    tensors
}

/// One entry without its padding.
fn entry(tensors: &StoredTensors, entry: usize) -> StoredTensors {
    let cut = |tensor: &StoredTensor| {
        let (row, mut shape) = (
            tensor.shape[2..].iter().product::<usize>(),
            tensor.shape.clone(),
        );
        (shape[0], shape[1]) = (1, LENGTHS[entry]);
        let first = entry * tensor.shape[1] * row;
        StoredTensor {
            dtype: tensor.dtype,
            shape,
            elements: tensor.elements[first..first + LENGTHS[entry] * row].to_vec(),
        }
    };
    let named = tensors.iter();
    named.map(|(name, of)| (name.clone(), cut(of))).collect()
}

#[test]
fn a_padded_batch_equals_a_call_for_each_entry() {
    let folder = CommandFolder::new();
    let batch = padded();
    files::write(&folder.join("batch"), &batch);
    for options in [
        "--causal",
        "--window 3,2 --prefix 1 --ranks 3 --alibi",
        "--mode mix --segment-lengths 4,12 --dilation-rates 1,2 --sharding balanced --ranks 2",
    ] {
        folder.succeeds(&format!(
            "attend batch -o out --grad {options} --key-lengths 9,0,4"
        ));
        let out = files::read(&folder.join("out"));
        for at in [0, 2] {
            files::write(&folder.join("alone"), &entry(&batch, at));
            folder.succeeds(&format!("attend alone -o expected --grad {options}"));
            let expected = files::read(&folder.join("expected"));
            for (name, got) in &entry(&out, at) {
                assert_eq!(got.shape, expected[name].shape, "{name}");
                let off = got.difference(&expected[name]);
                assert!(
                    off <= 1e-12,
                    "{options}: {name} of entry {at} is off by {off}"
                );
            }
        }
        for (name, tensor) in &out {
            let row: usize = tensor.shape[2..].iter().product();
            let missing = if name == "lse" {
                f64::NEG_INFINITY
            } else {
                0.0
            };
            let padding = [9 * row..18 * row, (18 + 4) * row..27 * row];
            for element in padding.into_iter().flat_map(|rows| &tensor.elements[rows]) {
                assert_eq!(*element, missing, "{options}: {name}");
            }
        }
    }
}

#[test]
fn lengths_may_be_a_tensor_of_the_file() {
    let folder = CommandFolder::new();
    let mut batch = padded();
    let lengths = StoredTensor {
        dtype: Dtype::I32,
        shape: vec![3],
        elements: LENGTHS.map(|length| length as f64).to_vec(),
    };
    batch.insert("key_lengths".to_string(), lengths);
    files::write(&folder.join("batch"), &batch);
    folder.succeeds("attend batch -o given --key-lengths 9,0,4");
    folder.succeeds("attend batch -o read --key-lengths");
    let bytes = |name: &str| std::fs::read(folder.join(name)).unwrap();
    assert!(bytes("given") == bytes("read"));
}

#[test]
fn lengths_that_do_not_fit_are_refused_in_one_line() {
    let folder = CommandFolder::new();
    files::write(&folder.join("batch"), &padded());
    let attend = |options: &str, words: &[&str]| {
        folder.refuses(&format!("attend batch -o out {options}"), words);
    };
    attend("--key-lengths 9,10,4", &["entry 1", "10", "9 tokens"]);
    attend("--key-lengths 9,0", &["2 key lengths", "batch of 3"]);
    attend("--key-lengths 9,x,4", &["--key-lengths", "x"]);
    attend("--key-lengths", &["no tensor key_lengths"]);
    attend("--key-lengths 9,0,5", &["NaN", "[2, 4, 0, 0]"]);
    attend(
        "--key-lengths 9,0,4 --memory-limit 1GiB",
        &["--key-lengths", "memory"],
    );
    attend(
        "--key-lengths 9,0,4 --sharding 0,5",
        &["key lengths", "first tokens"],
    );
    attend("--key-lengths 9,0,4 --documents 4,4", &["8 tokens", "9"]);
    assert_eq!(folder.names(), ["batch"]);
}
