//! The golden files through `encke attend --grad`, on rings of many sizes and cuts.
//!
//! The decision here: the options of a file follow from its name and its recorded configuration, so
//! a new file is tested without new code.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use safetensors::{Dtype, SafeTensors};

use crate::command::CommandFolder;
use crate::files::{self, StoredTensor};

/// Commands that run at the same time.
const AT_ONCE: usize = 4;

/// One golden file with the options that reproduce it.
struct GoldenCall {
    path: PathBuf,
    name: String,
    options: String,
    tokens: usize,
}

impl GoldenCall {
    /// The file, unless its package has written rows to places that are not theirs.
    fn new(path: &Path) -> Option<GoldenCall> {
        let name = path.file_stem().unwrap().to_str().unwrap().to_string();
        if name.contains("quirk") || name.contains("misplaced") {
            return None;
        }
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let config = &header.metadata().as_ref().unwrap()["config"];
        let config: serde_json::Value = serde_json::from_str(config).unwrap();
        let mode = match name.split('_').next().unwrap() {
            "dense" => "",
            "fkodom" => "--mode fkodom",
            "darcstar" => "--mode group --group-scale groups",
            "torchscale" if name.starts_with("torchscale_fullgrad_") => {
                "--mode mix --offsets head-block"
            }
            "torchscale" | "gigapath" => {
                "--mode mix --offsets head-block --mixing-gradient detached --padding torchscale"
            }
            "mask" => "",
            other => panic!("no options are known for files of {other}"),
        };
        let list = |key: &str| {
            let values = config[key].as_array().into_iter().flatten();
            values.map(|x| x.to_string()).collect::<Vec<_>>().join(",")
        };
        let mut options = mode.to_string();
        if !list("segment_lengths").is_empty() {
            options += &format!(" --segment-lengths {}", list("segment_lengths"));
            options += &format!(" --dilation-rates {}", list("dilation_rates"));
        }
        if config["causal"].as_bool().unwrap() {
            options += " --causal";
        }
        options += &mask_options(&config);
        if header.tensors().contains_key("sinks") {
            options += " --sinks";
        }
        Some(GoldenCall {
            path: path.to_path_buf(),
            tokens: config["n"].as_u64().unwrap() as usize,
            options,
            name,
        })
    }

    /// All files, in order.
    fn all() -> Vec<GoldenCall> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/golden");
        let masks = format!("{folder}/masks");
        let entries = [folder, &masks].map(|folder| std::fs::read_dir(folder).unwrap());
        let paths = entries.into_iter().flatten();
        let mut paths: Vec<PathBuf> = paths.map(|entry| entry.unwrap().path()).collect();
        paths.retain(|path| path.is_file());
        paths.sort();
        paths
            .iter()
            .filter_map(|path| GoldenCall::new(path))
            .collect()
    }

    /// The rings; one has an empty shard and a shard of one token.
    fn rings(&self) -> Vec<String> {
        let even = [1, 2, 3, 4, 7, 16, 32].map(|ranks| format!("--ranks {ranks}"));
        let (third, last) = (self.tokens / 3, self.tokens - 1);
        let mut rings = even.to_vec();
        rings.push(format!("--sharding 0,1,1,{third},{last}"));
        rings.push("--ranks 5 --sharding zigzag --queries replicated".to_string());
        rings.push("--ranks 3 --sharding striped --checkpoint recompute".to_string());
        let combined = ["fkodom", "detached"];
        if !combined.iter().any(|mode| self.options.contains(mode)) {
            rings.push("--memory-limit 1GiB".to_string());
            rings.push("--ranks 4 --sharding balanced".to_string());
        }
        rings
    }

    fn check(&self, folder: &CommandFolder, ring: &str, number: usize) {
        let out = format!("{number}.safetensors");
        let input = self.path.display();
        let options = &self.options;
        folder.succeeds(&format!("attend {input} -o {out} --grad {options} {ring}"));
        let got = files::read(&folder.join(&out));
        let golden = files::read(&self.path);
        let dsinks = golden.contains_key("dsinks").then_some("dsinks");
        for tensor in ["out", "dq", "dk", "dv"].into_iter().chain(dsinks) {
            let (expected, tolerance) = match golden.get(&format!("{tensor}_f64")) {
                Some(wide) => (wide, 1e-5),
                None => (&golden[tensor], 1e-12),
            };
            assert_eq!(got[tensor].dtype, golden[tensor].dtype);
            let error = got[tensor].difference(expected) / expected.largest();
            let name = &self.name;
            assert!(
                error <= tolerance,
                "{name} {ring}: {tensor} is off by {error:.2e}"
            );
        }
        if let Some(lse) = golden.get("lse") {
            check_lse(&self.name, &got["lse"], lse);
        }
        std::fs::remove_file(folder.join(&out)).unwrap();
    }
}

/// The options of a mask, of sinks and of scores.
fn mask_options(config: &serde_json::Value) -> String {
    let mut options = String::new();
    let side = |key: &str| config[key].as_u64().map_or("all".into(), |x| x.to_string());
    if config["window_left"].is_u64() || config["window_right"].is_u64() {
        options += &format!(" --window {},{}", side("window_left"), side("window_right"));
    }
    if let Some(lengths) = config["documents"].as_array() {
        let lengths: Vec<String> = lengths.iter().map(|x| x.to_string()).collect();
        options += &format!(" --documents {}", lengths.join(","));
    }
    for (key, option) in [
        ("prefix", "--prefix"),
        ("softcap", "--softcap"),
        ("query_offset", "--query-offset"),
    ] {
        if !config[key].is_null() {
            options += &format!(" {option} {}", config[key]);
        }
    }
    if config["alibi_slopes"].is_array() {
        options += " --alibi";
    }
    options
}

fn check_lse(name: &str, got: &StoredTensor, expected: &StoredTensor) {
    assert_eq!((got.dtype, &got.shape), (Dtype::F64, &expected.shape));
    let error = got.difference(expected) / expected.largest();
    assert!(error <= 1e-12, "{name}: lse is off by {error:.2e}");
}

#[test]
fn every_golden_file_is_reproduced_on_every_ring() {
    let golden = GoldenCall::all();
    assert!(golden.len() >= 20, "only {} golden files", golden.len());
    let folder = CommandFolder::new();
    let rings = golden
        .iter()
        .flat_map(|file| file.rings().into_iter().map(move |r| (file, r)));
    let work = Mutex::new(rings.enumerate());
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let Some((number, (file, ring))) = work.lock().unwrap().next() else {
                        return;
                    };
                    file.check(&folder, &ring, number);
                }
            });
        }
    });
    assert_eq!(folder.names(), Vec::<String>::new());
}
