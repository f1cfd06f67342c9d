//! Golden files: outputs and gradients against those of other implementations.

use std::path::{Path, PathBuf};

use candle_core::{Tensor, Var};
use encke::{GroupScale, MixingGradient, Mode, OffsetRule, Padding, Pattern};
use encke_candle::{Attention, attention};
use safetensors::{Dtype, SafeTensors};

use crate::plain::distance;

struct CandleGoldenFile {
    name: String,
    pattern: Pattern,
    dims: [usize; 4],
    bytes: Vec<u8>,
}

impl CandleGoldenFile {
    /// The file; `None` if the other implementation has written rows to places that are not theirs.
    fn read(path: &Path) -> Option<CandleGoldenFile> {
        let name = path.file_stem().unwrap().to_str().unwrap().to_string();
        if name.contains("quirk") || name.contains("misplaced") {
            return None;
        }
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let config = &header.metadata().as_ref().unwrap()["config"];
        let config: serde_json::Value = serde_json::from_str(config).unwrap();
        let sizes = |key: &str| -> Vec<usize> {
            let list = config[key].as_array().into_iter().flatten();
            list.map(|x| x.as_u64().unwrap() as usize).collect()
        };
        let mix = |gradient| Mode::Mix {
            offsets: OffsetRule::HeadBlock,
            gradient,
        };
        let mode = match name.split('_').next().unwrap() {
            "fkodom" => Some(Mode::Fkodom),
            "torchscale" if name.contains("fullgrad") => Some(mix(MixingGradient::Exact)),
            "torchscale" | "gigapath" => Some(mix(MixingGradient::Detached)),
            "darcstar" => Some(Mode::Group {
                scale: GroupScale::Groups,
            }),
            _ => None,
        };
        let pattern = match mode {
            None => Pattern::dense(),
            Some(mode) => {
                Pattern::dilated(&sizes("segment_lengths"), &sizes("dilation_rates"), mode).unwrap()
            }
        };
        let padding = match mode {
            Some(Mode::Mix {
                gradient: MixingGradient::Detached,
                ..
            }) => Padding::Torchscale,
            _ => Padding::None,
        };
        Some(CandleGoldenFile {
            pattern: pattern
                .padding(padding)
                .causal(config["causal"].as_bool().unwrap()),
            dims: ["b", "n", "h", "d"].map(|key| config[key].as_u64().unwrap() as usize),
            name,
            bytes,
        })
    }

    fn tensor(&self, key: &str) -> Tensor {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        // Files in f32 also contain the other implementation's f64 results.
        let wide = file.tensor(&format!("{key}_f64"));
        let view = wide.or_else(|_| file.tensor(key)).unwrap();
        let values: Vec<f64> = match view.dtype() {
            Dtype::F64 => {
                let values = view.data().chunks_exact(8);
                values
                    .map(|x| f64::from_le_bytes(x.try_into().unwrap()))
                    .collect()
            }
            _ => {
                let values = view.data().chunks_exact(4);
                values
                    .map(|x| f64::from(f32::from_le_bytes(x.try_into().unwrap())))
                    .collect()
            }
        };
        Tensor::from_vec(values, &self.dims, &candle_core::Device::Cpu).unwrap()
    }
}

#[test]
fn results_equal_those_of_other_implementations() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/golden");
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.retain(|path| path.is_file());
    paths.sort();
    let files: Vec<CandleGoldenFile> = paths
        .iter()
        .filter_map(|path| CandleGoldenFile::read(path))
        .collect();
    assert!(files.len() >= 20, "only {} golden files", files.len());
    for file in files {
        for ranks in [1, 3] {
            let settings = encke::Attention::builder().pattern(file.pattern.clone());
            let attend = Attention::new(settings.ranks(ranks)).unwrap();
            let [q, k, v] = ["q", "k", "v"].map(|key| Var::from_tensor(&file.tensor(key)).unwrap());
            let out = attention(&q, &k, &v, &attend).unwrap();
            let loss = (&out * file.tensor("do")).unwrap().sum_all().unwrap();
            let gradients = loss.backward().unwrap();
            let of = |x: &Var| gradients.get(x).unwrap().clone();
            let results = [("out", out), ("dq", of(&q)), ("dk", of(&k)), ("dv", of(&v))];
            for (key, got) in results {
                let apart = distance(&got, &file.tensor(key));
                assert!(
                    apart < 1e-11,
                    "{key} of {} on {ranks}: {apart:e}",
                    file.name
                );
            }
        }
    }
}
