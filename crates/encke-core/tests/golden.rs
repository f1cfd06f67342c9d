//! The reference against what the peers' own code computed, file by file.
//!
//! The files in `testdata/golden` were made by running other packages on seeded inputs. Not every
//! number in them is right: where a peer has a defect that the specification names, this test
//! shows that we differ, and that the named defect is the whole of the difference.
//!
//! The decision here: which pattern and which verdict a file gets follows from its name and its
//! recorded configuration, so a file that is added is tested without a line being written.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use encke_core::partial::Partial;
use encke_core::reference::{self, ReferenceForward};
use encke_core::{GroupScale, MixingGradient, Mode, OffsetRule, Pattern, Shape};
use safetensors::{Dtype, SafeTensors};

/// Of the largest number of a tensor: what two correct f64 computations may differ by.
const TOLERANCE: f64 = 1e-12;

/// A peer's word for minus infinity is any number at or below this one.
const NEVER: f64 = -1e8;

/// One golden file, its numbers widened to f64.
struct GoldenFile {
    name: String,
    shape: Shape,
    segments: Vec<usize>,
    dilations: Vec<usize>,
    causal: bool,
    tensors: BTreeMap<String, Vec<f64>>,
}

impl GoldenFile {
    fn read(path: &Path) -> GoldenFile {
        let name = path.file_stem().unwrap().to_str().unwrap().to_string();
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let config = &header.metadata().as_ref().unwrap()["config"];
        let config: serde_json::Value = serde_json::from_str(config).unwrap();
        let sizes = |key: &str| -> Vec<usize> {
            let list = config[key].as_array().into_iter().flatten();
            list.map(|x| x.as_u64().unwrap() as usize).collect()
        };
        let [b, n, h, d] = ["b", "n", "h", "d"].map(|key| config[key].as_u64().unwrap() as usize);
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file
            .iter()
            .map(|(key, view)| (key.to_string(), widen(&view)));
        GoldenFile {
            shape: Shape::new(b, n, h, h, d).unwrap(),
            segments: sizes("segment_lengths"),
            dilations: sizes("dilation_rates"),
            causal: config["causal"].as_bool().unwrap(),
            tensors: tensors.collect(),
            name,
        }
    }

    fn is(&self, prefix: &str) -> bool {
        self.name.starts_with(prefix)
    }

    fn pattern(&self) -> Pattern {
        let mix = |gradient| Mode::Mix {
            offsets: OffsetRule::HeadBlock,
            gradient,
        };
        let mode = match self.name.split('_').next().unwrap() {
            "dense" => return Pattern::dense().causal(self.causal),
            "fkodom" => Mode::Fkodom,
            "torchscale" if self.is("torchscale_fullgrad_") => mix(MixingGradient::Exact),
            "torchscale" => mix(MixingGradient::Detached),
            "darcstar" => Mode::Group {
                scale: GroupScale::Groups,
            },
            other => panic!("no mode is known for files of {other}"),
        };
        let pattern = Pattern::dilated(&self.segments, &self.dilations, mode).unwrap();
        pattern.causal(self.causal)
    }

    /// Whether torchscale lets padding take part: only where no mask hides it, and only where a
    /// segment is not full.
    fn padding_is_seen(&self) -> bool {
        let n = self.shape.tokens;
        let ragged = self.segments.iter().any(|&w| !n.is_multiple_of(w.min(n)));
        self.is("torchscale_") && !self.causal && ragged
    }

    fn is_artefact(&self) -> bool {
        self.name.contains("quirk") || self.padding_is_seen()
    }

    fn has(&self, key: &str) -> bool {
        self.tensors.contains_key(key)
    }

    /// A tensor as the peer computes it in f64: f32 files keep that beside their own.
    fn expected(&self, key: &str) -> &[f64] {
        let wide = format!("{key}_f64");
        &self.tensors[if self.has(&wide) { wide.as_str() } else { key }]
    }

    fn inputs(&self) -> [&[f64]; 3] {
        ["q", "k", "v"].map(|key| self.tensors[key].as_slice())
    }

    fn forward(&self, pattern: &Pattern) -> ReferenceForward {
        let [q, k, v] = self.inputs();
        let scale = self.shape.default_scale();
        reference::forward(&self.shape, pattern, scale, q, k, v).unwrap()
    }

    /// What the reference gives for one branch alone.
    fn branch(&self, branch: usize) -> ReferenceForward {
        let one = branch..branch + 1;
        let (segments, dilations) = (&self.segments[one.clone()], &self.dilations[one]);
        let pattern = Pattern::dilated(segments, dilations, self.pattern().mode()).unwrap();
        self.forward(&pattern.causal(self.causal))
    }

    /// The partials in `{prefix}_out` and `{prefix}_lse`: one list for each branch or chunk.
    fn parts(&self, prefix: &str) -> Vec<Vec<Partial>> {
        let Shape {
            batch,
            tokens,
            heads,
            dim,
            ..
        } = self.shape;
        let out = &self.tensors[&format!("{prefix}_out")];
        let lse = &self.tensors[&format!("{prefix}_lse")];
        let rows: Vec<Partial> = out
            .chunks(dim)
            .zip(lse)
            .map(|(out, &lse)| match lse <= NEVER {
                true => Partial::empty(dim),
                false => Partial {
                    out: out.to_vec(),
                    lse,
                },
            })
            .collect();
        rows.chunks(batch * tokens * heads)
            .map(<[_]>::to_vec)
            .collect()
    }
}

fn widen(view: &safetensors::tensor::TensorView<'_>) -> Vec<f64> {
    let data = view.data();
    match view.dtype() {
        Dtype::F64 => {
            let numbers = data.chunks_exact(8);
            numbers
                .map(|x| f64::from_le_bytes(x.try_into().unwrap()))
                .collect()
        }
        Dtype::F32 => {
            let numbers = data.chunks_exact(4);
            numbers
                .map(|x| f32::from_le_bytes(x.try_into().unwrap()) as f64)
                .collect()
        }
        other => panic!("golden files hold f32 and f64, not {other:?}"),
    }
}

/// All golden files; fails where there are fewer than were made.
fn golden() -> Vec<GoldenFile> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/golden");
    let entries = std::fs::read_dir(&folder).expect("testdata/golden must exist");
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    paths.sort();
    assert!(
        paths.len() >= 22,
        "only {} golden files of at least 22",
        paths.len()
    );
    paths.iter().map(|path| GoldenFile::read(path)).collect()
}

/// The largest difference, over the largest expected number.
fn distance(got: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let finite = expected.iter().filter(|x| x.is_finite());
    let largest = finite.fold(0.0, |a: f64, x| a.max(x.abs()));
    let pairs = got.iter().zip(expected).filter(|(x, y)| x != y);
    let furthest = pairs.map(|(x, y)| (x - y).abs()).fold(0.0, |a: f64, x| {
        if x.is_nan() { f64::INFINITY } else { a.max(x) }
    });
    if furthest == 0.0 {
        0.0
    } else {
        furthest / largest
    }
}

fn assert_close(what: &str, got: &[f64], expected: &[f64]) -> f64 {
    let distance = distance(got, expected);
    assert!(
        distance <= TOLERANCE,
        "{what} is off by {distance:.1e} of its largest number"
    );
    distance
}

/// Merges lists of partials, in their order, and returns all outputs and all lses.
fn merged(parts: &[Vec<Partial>], dim: usize) -> (Vec<f64>, Vec<f64>) {
    let merge = |row: usize| {
        let of_row = parts.iter().map(|part| &part[row]);
        of_row.fold(Partial::empty(dim), |whole, part| whole.merge(part))
    };
    let rows: Vec<Partial> = (0..parts[0].len()).map(merge).collect();
    let out = rows.iter().flat_map(|row| row.out.clone()).collect();
    (out, rows.iter().map(|row| row.lse).collect())
}

#[test]
fn the_reference_is_what_the_peers_compute() {
    let mut worst = (0.0, String::new());
    let mut checked = 0;
    for file in golden().iter().filter(|file| !file.is_artefact()) {
        let pattern = file.pattern();
        let [q, k, v] = file.inputs();
        let (shape, scale) = (&file.shape, file.shape.default_scale());
        let dout = &file.tensors["do"];
        let forward = file.forward(&pattern);
        let back = reference::backward(shape, &pattern, scale, q, k, v, dout, None).unwrap();
        let mut pairs = vec![
            ("out", &forward.out),
            ("dq", &back.dq),
            ("dk", &back.dk),
            ("dv", &back.dv),
        ];
        if file.is("dense_") {
            pairs.push(("lse", &forward.lse));
        }
        for (key, got) in pairs {
            let what = format!("{key} of {}", file.name);
            let distance = assert_close(&what, got, file.expected(key));
            if distance > worst.0 {
                worst = (distance, what);
            }
            checked += 1;
        }
    }
    assert!(checked >= 82, "20 files of four tensors each, and two lses");
    println!("worst: {:.1e} ({})", worst.0, worst.1);
}

#[test]
fn chunks_of_keys_merge_to_dense_attention() {
    let files = golden();
    let dense = || files.iter().filter(|file| file.has("partial_out"));
    assert!(dense().count() >= 2);
    for file in dense() {
        let parts = file.parts("partial");
        assert!(parts.len() > 1);
        let (out, lse) = merged(&parts, file.shape.dim);
        assert_close(&format!("out of {}", file.name), &out, file.expected("out"));
        assert_close(&format!("lse of {}", file.name), &lse, file.expected("lse"));
    }
}

#[test]
fn branches_merge_to_mixed_attention() {
    let files = golden();
    let mixed = || files.iter().filter(|file| file.has("branch_out"));
    assert!(mixed().count() >= 8);
    for file in mixed() {
        // Also where a branch is an artefact: how the peer mixes is right everywhere.
        let parts = file.parts("branch");
        let (out, lse) = merged(&parts, file.shape.dim);
        assert_close(&format!("out of {}", file.name), &out, file.expected("out"));
        if file.is_artefact() {
            continue;
        }
        let forward = file.forward(&file.pattern());
        assert_close(&format!("lse of {}", file.name), &forward.lse, &lse);
        for (branch, part) in parts.iter().enumerate() {
            let ours = file.branch(branch);
            let (out, lse) = merged(std::slice::from_ref(part), file.shape.dim);
            let what = format!("branch {branch} of {}", file.name);
            assert_close(&format!("out of {what}"), &ours.out, &out);
            assert_close(&format!("lse of {what}"), &ours.lse, &lse);
        }
    }
}

#[test]
fn defects_of_peers_are_not_copied() {
    let files = golden();
    let artefacts = || files.iter().filter(|file| file.is_artefact());
    assert!(artefacts().count() >= 2);
    for file in artefacts() {
        let apart = distance(&file.forward(&file.pattern()).out, file.expected("out"));
        assert!(
            apart > 1e-3,
            "{} was to differ; it is {apart:.1e} apart",
            file.name
        );
    }
}

/// torchscale fills the last segment with zeros that are not masked: each is a key of score 0 and
/// value 0. We differ there, nowhere else, and by those keys exactly.
#[test]
fn padding_keys_are_the_whole_difference_to_torchscale() {
    let files = golden();
    let padded = || {
        files
            .iter()
            .filter(|file| file.padding_is_seen() && !file.name.contains("quirk"))
    };
    assert!(padded().count() >= 1);
    for file in padded() {
        let Shape {
            tokens, heads, dim, ..
        } = file.shape;
        let ours = file.forward(&file.pattern());
        let theirs = file.expected("out");
        let (w, r) = (&file.segments, &file.dilations);
        let full = w.iter().map(|&w| tokens / w * w).min().unwrap();
        let token_of = |row: usize| row / heads % tokens;
        let rows = || ours.out.chunks(dim).zip(theirs.chunks(dim)).enumerate();
        for (row, (got, peer)) in rows().filter(|&(row, _)| token_of(row) < full) {
            assert_close(&format!("row {row} of {}", file.name), got, peer);
        }

        let with_padding: Vec<Vec<Partial>> = (0..w.len())
            .map(|branch| {
                let (w, r) = (w[branch].min(tokens), r[branch]);
                let offsets = file.pattern().heads_of(branch, heads);
                let alone = file.branch(branch);
                let rows = alone.out.chunks(dim).zip(&alone.lse).enumerate();
                rows.map(|(row, (out, &lse))| {
                    let start = token_of(row) / w * w;
                    let offset = offsets[row % heads].1;
                    let own = (start + offset..start + w).step_by(r);
                    let zeros = own.filter(|&t| t >= tokens).count();
                    let out = out.to_vec();
                    match lse > f64::NEG_INFINITY && zeros > 0 {
                        false => Partial { out, lse },
                        true => Partial { out, lse }.merge(&Partial {
                            out: vec![0.0; dim],
                            lse: (zeros as f64).ln(),
                        }),
                    }
                })
                .collect()
            })
            .collect();
        let (out, _) = merged(&with_padding, dim);
        assert_close(
            &format!("out of {} with its padding", file.name),
            &out,
            theirs,
        );
    }
}

/// torchscale rounds each segment up to a multiple of the dilation and puts the results back as if
/// segments were that long: all but the first land too far right. We differ by that shift exactly.
#[test]
fn misaligned_segments_are_the_whole_difference_to_torchscale() {
    let files = golden();
    let quirks = || {
        files
            .iter()
            .filter(|file| file.name.contains("quirk") && file.causal)
    };
    assert!(quirks().count() >= 1);
    for file in quirks() {
        let Shape {
            batch,
            tokens,
            heads,
            ..
        } = file.shape;
        for (branch, part) in file.parts("branch").iter().enumerate() {
            let width = heads * file.shape.dim;
            let alone = file.branch(branch);
            let (theirs, _) = merged(std::slice::from_ref(part), file.shape.dim);
            let segment = file.segments[branch].min(tokens);
            let rounded = segment.next_multiple_of(file.dilations[branch]);
            for (b, place) in (0..batch).flat_map(|b| (0..tokens).map(move |t| (b, t))) {
                let within = place % rounded;
                let token = place / rounded * segment + within;
                if within >= segment || token >= tokens {
                    continue; // what landed here was the result of padding
                }
                let row = |token: usize| (b * tokens + token) * width..;
                let what = format!("{} branch {branch} place {place}", file.name);
                let (got, peer) = (
                    &alone.out[row(token)][..width],
                    &theirs[row(place)][..width],
                );
                assert_close(&what, got, peer);
            }
            let apart = distance(&alone.out, &theirs);
            let shifted = rounded > segment && segment < tokens;
            assert_eq!(
                apart > 1e-3,
                shifted,
                "{} branch {branch}: {apart:.1e}",
                file.name
            );
        }
    }
}
