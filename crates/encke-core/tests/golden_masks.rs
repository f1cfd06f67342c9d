//! The reference against masks, sinks and scores computed by other code (golden files).
//!
//! The mask of a file is its recorded configuration, so a new file is tested without new code.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use encke_core::{Documents, Pattern, Scores, Shape, Window, reference};
use safetensors::{Dtype, SafeTensors};

/// Allowed difference of two correct f64 computations, relative to the largest value of a tensor.
const TOLERANCE: f64 = 1e-12;

/// One golden file.
struct MaskFile {
    name: String,
    config: serde_json::Value,
    tensors: BTreeMap<String, Vec<f64>>,
}

impl MaskFile {
    fn read(path: &Path) -> MaskFile {
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let config = &header.metadata().as_ref().unwrap()["config"];
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let values = |data: &[u8]| -> Vec<f64> {
            let elements = data.chunks_exact(8);
            elements
                .map(|x| f64::from_le_bytes(x.try_into().unwrap()))
                .collect()
        };
        let tensors = file.iter().map(|(key, view)| {
            assert_eq!(view.dtype(), Dtype::F64);
            (key.to_string(), values(view.data()))
        });
        MaskFile {
            name: path.file_stem().unwrap().to_str().unwrap().to_string(),
            config: serde_json::from_str(config).unwrap(),
            tensors: tensors.collect(),
        }
    }

    fn size(&self, key: &str) -> Option<usize> {
        self.config[key].as_u64().map(|x| x as usize)
    }

    fn shape(&self) -> Shape {
        let [b, n, h, kv, d] = ["b", "n", "h", "kv_heads", "d"].map(|key| self.size(key).unwrap());
        let shape = Shape::new(b, n, h, kv, d).unwrap();
        let shape = shape.with_queries(self.size("queries").unwrap_or(n));
        let shape = shape.unwrap().with_value_dim(self.size("dv").unwrap_or(d));
        shape.unwrap()
    }

    fn pattern(&self) -> Pattern {
        let documents = self.config["documents"].as_array().map(|lengths| {
            let lengths = lengths.iter().map(|x| x.as_u64().unwrap() as usize);
            Documents::new(&lengths.collect::<Vec<_>>()).unwrap()
        });
        Pattern::dense()
            .causal(self.config["causal"].as_bool().unwrap())
            .window(Window {
                left: self.size("window_left"),
                right: self.size("window_right"),
            })
            .prefix(self.size("prefix").unwrap_or(0))
            .documents(documents)
            .query_offset(self.size("query_offset"))
    }

    fn scores(&self, shape: &Shape) -> Scores {
        let slopes = self.config["alibi_slopes"].as_array();
        let slopes = slopes.map(|of| of.iter().map(|x| x.as_f64().unwrap()).collect());
        let sinks = self.tensors.get("sinks");
        Scores {
            softcap: self.config["softcap"].as_f64(),
            slopes,
            sinks: sinks.map(|sinks| sinks.as_slice().into()),
            ..Scores::from(shape.default_scale())
        }
    }
}

fn distance(got: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let largest = expected.iter().fold(0.0, |a: f64, x| a.max(x.abs()));
    let pairs = got.iter().zip(expected);
    let worst = pairs.map(|(x, y)| (x - y).abs()).fold(0.0, |a: f64, x| {
        if x.is_nan() { f64::INFINITY } else { a.max(x) }
    });
    worst / largest
}

#[test]
fn the_reference_matches_other_code() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/golden/masks");
    let mut paths: Vec<PathBuf> = std::fs::read_dir(&folder)
        .expect("testdata/golden/masks must exist")
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    assert!(paths.len() >= 8, "only {} golden files", paths.len());
    for file in paths.iter().map(|path| MaskFile::read(path)) {
        let (shape, pattern) = (file.shape(), file.pattern());
        let scores = file.scores(&shape);
        let [q, k, v, dout] = ["q", "k", "v", "do"].map(|key| file.tensors[key].as_slice());
        let forward = reference::forward(&shape, &pattern, scores.clone(), q, k, v).unwrap();
        let back = reference::backward(&shape, &pattern, scores, q, k, v, dout, None).unwrap();
        let results = [
            ("out", &forward.out),
            ("lse", &forward.lse),
            ("dq", &back.dq),
            ("dk", &back.dk),
            ("dv", &back.dv),
            ("dsinks", &back.dsinks),
        ];
        let mut checked = 0;
        for (key, got) in results {
            if let Some(expected) = file.tensors.get(key) {
                let distance = distance(got, expected);
                assert!(
                    distance <= TOLERANCE,
                    "{key} of {}: {distance:.1e}",
                    file.name
                );
                checked += 1;
            }
        }
        assert!(checked >= 4, "{} has only {checked} results", file.name);
    }
}
