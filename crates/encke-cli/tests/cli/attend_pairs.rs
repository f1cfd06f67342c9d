//! Every pair of options of `encke attend`: what is written equals the reference, or one sentence
//! names both options and nothing is written.
//!
//! The decision here: an option says once what it changes in the call that the reference makes;
//! options of a ring change nothing there.

use std::sync::Mutex;

use encke_core::{
    Documents, GroupScale, KeyLengths, MixingGradient, Mode, OffsetRule, Padding, Pattern, Scores,
    Shape, Tensor, Window, reference,
};
use safetensors::Dtype;

use crate::command::{CommandFolder, text};
use crate::files::{self, StoredTensor, StoredTensors};

const TOKENS: usize = 64;
const HEADS: usize = 4;
const LENGTHS: [usize; 2] = [TOKENS, 27];
const SLOPES: [f64; HEADS] = [0.5, 0.1, 0.0, -0.1];
const SINKS: [f64; HEADS] = [0.5, -1.0, 2.0, 0.0];

/// What the reference computes.
struct ReferenceCall {
    shape: Shape,
    pattern: Pattern,
    scores: Scores,
    padded: bool,
    dlse: bool,
    tolerance: f64,
}

/// Arguments, words by which a refusal may name them, and what they change for the reference.
type AttendOption = (
    &'static str,
    &'static [&'static str],
    fn(&mut ReferenceCall),
);

/// Options whose file differs begin with its name instead of dashes.
const OPTIONS: &[AttendOption] = &[
    ("--causal", &["causal"], |of| {
        of.mask(|mask| mask.causal(true))
    }),
    ("--window 9,2", &["window"], |of| {
        of.mask(|mask| mask.window(WINDOW))
    }),
    ("--window 9,2 --prefix 3", &["window", "prefix"], |of| {
        of.mask(|mask| mask.window(WINDOW).prefix(3));
    }),
    ("--documents 40,1,23", &["documents"], packed),
    ("--documents", &["documents"], packed),
    ("fewer-queries", &["fewer queries"], |of| {
        of.shape = of.shape.with_queries(20).unwrap();
    }),
    (
        "fewer-queries --query-offset 7",
        &["fewer queries", "query-offset"],
        |of| {
            of.shape = of.shape.with_queries(20).unwrap();
            of.mask(|mask| mask.query_offset(Some(7)));
        },
    ),
    (
        "batch --key-lengths 64,27",
        &["key-lengths", "key lengths"],
        padded,
    ),
    (
        "batch --key-lengths",
        &["key-lengths", "key lengths"],
        padded,
    ),
    ("values", &["value"], |of| {
        of.shape = of.shape.with_value_dim(6).unwrap()
    }),
    ("dlse", &["lse"], |of| of.dlse = true),
    ("--scale 0.3", &["scale"], |of| of.scores.scale = 0.3),
    ("--softcap 2", &["softcap"], |of| {
        of.scores.softcap = Some(2.0)
    }),
    ("--alibi", &["slopes"], |of| {
        of.scores.slopes = Some(SLOPES.into())
    }),
    ("--sinks", &["sinks"], |of| {
        of.scores.sinks = Some(SINKS.into())
    }),
    ("--compute f32", &["compute"], |of| of.tolerance = 1e-4),
    (
        "--mode group --segment-lengths 16,64 --dilation-rates 1,2 --group-scale groups",
        &["group"],
        |of| {
            of.branches(Mode::Group {
                scale: GroupScale::Groups,
            })
        },
    ),
    (
        "--mode mix --segment-lengths 16,64 --dilation-rates 1,2 --offsets head-block",
        &["mix"],
        |of| of.branches(mix(MixingGradient::Exact)),
    ),
    (
        "--mode mix --segment-lengths 16,64 --dilation-rates 1,2 --offsets head-block \
         --mixing-gradient detached",
        &["detached"],
        |of| of.branches(mix(MixingGradient::Detached)),
    ),
    (
        "--mode mix --segment-lengths 16,64 --dilation-rates 1,2 --offsets head-block \
         --padding torchscale",
        &["padding"],
        |of| {
            of.branches(mix(MixingGradient::Exact));
            of.mask(|mask| mask.padding(Padding::Torchscale));
        },
    ),
    (
        "--mode fkodom --segment-lengths 16,64 --dilation-rates 1,2",
        &["fkodom"],
        |of| {
            of.branches(Mode::Fkodom);
            of.tolerance = of.tolerance.max(1e-8);
        },
    ),
    ("--ranks 3", &["ranks"], |_| {}),
    ("--ranks auto --most-ranks 4", &["auto"], |_| {}),
    ("--sharding zigzag", &["contiguous", "sharding"], |_| {}),
    (
        "--sharding striped",
        &["striped", "contiguous", "sharding"],
        |_| {},
    ),
    (
        "--sharding 0,9,9,50",
        &["first tokens", "partition", "cut the sequence"],
        |_| {},
    ),
    ("--sharding balanced", &["balanced"], |_| {}),
    ("--sharding documents", &["balanced"], |_| {}),
    ("--sharding auto", &["auto"], |_| {}),
    ("--queries replicated", &["replicated"], |_| {}),
    ("--schedule 2", &["several distances", "schedule"], |_| {}),
    (
        "--schedule two-level:2",
        &["two levels", "schedule"],
        |_| {},
    ),
    ("--schedule heads:2", &["divides heads", "schedule"], |_| {}),
    ("--rotate queries", &["rotate"], |_| {}),
    ("--bits invariant:32", &["bits"], |_| {}),
    ("--redundancy 1", &["redundancy"], |_| {}),
    (
        "--redundancy 1 --drill 2@1",
        &["redundancy", "drill"],
        |_| {},
    ),
    ("--checkpoint recompute", &["checkpoint"], |_| {}),
    ("--checkpoint offload", &["checkpoint"], |_| {}),
    ("--memory-limit 1GiB", &["memory-limit"], |_| {}),
    ("--deadline 600", &["deadline"], |_| {}),
    ("--trace t.json", &["trace"], |_| {}),
    ("--memory", &["memory"], |_| {}),
    ("--allow-non-finite", &["non-finite"], |_| {}),
];

const WINDOW: Window = Window {
    left: Some(9),
    right: Some(2),
};

const fn mix(gradient: MixingGradient) -> Mode {
    Mode::Mix {
        offsets: OffsetRule::HeadBlock,
        gradient,
    }
}

fn packed(of: &mut ReferenceCall) {
    of.mask(|mask| mask.documents(Some(Documents::new(&[40, 1, 23]).unwrap())));
}

fn padded(of: &mut ReferenceCall) {
    (of.shape.batch, of.padded) = (2, true);
}

impl ReferenceCall {
    fn new() -> ReferenceCall {
        let shape = Shape::new(1, TOKENS, HEADS, 2, 4).unwrap();
        ReferenceCall {
            shape,
            pattern: Pattern::dense(),
            scores: Scores::from(shape.default_scale()),
            padded: false,
            dlse: false,
            tolerance: 1e-12,
        }
    }

    fn mask(&mut self, change: impl FnOnce(Pattern) -> Pattern) {
        self.pattern = change(self.pattern.clone());
    }

    /// Options come in the order of the table, in which masks are first.
    fn branches(&mut self, mode: Mode) {
        let mask = &self.pattern;
        let window = match mask.has_bounded_window() {
            true => WINDOW,
            false => Window::ALL,
        };
        let branches = Pattern::dilated(&[16, 64], &[1, 2], mode).unwrap();
        let branches = branches.causal(mask.is_causal()).window(window);
        let branches = branches.prefix(mask.effective_prefix());
        let branches = branches.documents(mask.document_list().cloned());
        self.pattern = branches.query_offset(mask.offset_of_queries());
    }

    /// The tensors of the input. Values are positive, because fkodom divides by their sums.
    fn tensors(&self) -> StoredTensors {
        let Shape {
            batch,
            tokens,
            queries,
            heads,
            kv_heads,
            dim,
            value_dim,
        } = self.shape;
        let wave = |n: usize, h: usize, d: usize, phase: f64| {
            StoredTensor::wave(Dtype::F64, &[batch, n, h, d], phase)
        };
        let vector = |values: &[f64]| StoredTensor {
            dtype: Dtype::F64,
            shape: vec![values.len()],
            elements: values.to_vec(),
        };
        let whole = |values: &[usize]| StoredTensor {
            dtype: Dtype::I32,
            ..vector(&values.iter().map(|&x| x as f64).collect::<Vec<_>>())
        };
        let mut v = wave(tokens, kv_heads, value_dim, 0.3);
        v.elements.iter_mut().for_each(|x| *x = 1.0 + *x / 2.0);
        let mut tensors = vec![
            ("q", wave(queries, heads, dim, 0.1)),
            ("k", wave(tokens, kv_heads, dim, 0.2)),
            ("v", v),
            ("do", wave(queries, heads, value_dim, 0.4)),
            ("sinks", vector(&SINKS)),
            ("alibi_slopes", vector(&SLOPES)),
            ("cu_seqlens", whole(&[0, 40, 41, 64])),
            ("key_lengths", whole(&LENGTHS)),
        ];
        if self.dlse {
            let rows = wave(queries, heads, 1, 0.5);
            let shape = rows.shape[..3].to_vec();
            tensors.push(("dlse", StoredTensor { shape, ..rows }));
        }
        let named = tensors.into_iter();
        named
            .map(|(name, tensor)| (name.to_string(), tensor))
            .collect()
    }

    /// The tensors of the output.
    fn expected(&self) -> Vec<(&'static str, Vec<f64>)> {
        let stored = self.tensors();
        let lengths = self
            .padded
            .then(|| KeyLengths::new(TOKENS, &LENGTHS).unwrap());
        let (shape, pattern) = match &lengths {
            None => (self.shape, self.pattern.clone()),
            Some(lengths) => (
                lengths.shape(&self.shape).unwrap(),
                lengths.pattern(&self.pattern).unwrap(),
            ),
        };
        let given = |name: &str| -> Vec<f64> {
            let tensor = &stored[name];
            let mut dims = [1; 4];
            dims[..tensor.shape.len()].copy_from_slice(&tensor.shape);
            let of = Tensor::from_f64(encke_core::DType::F64, dims, &tensor.elements).unwrap();
            match &lengths {
                None => of.to_f64(),
                Some(lengths) => lengths.pack(&of.view()).unwrap().to_f64(),
            }
        };
        let [q, k, v, dout] = ["q", "k", "v", "do"].map(given);
        let dlse = self.dlse.then(|| given("dlse"));
        let scores = || self.scores.clone();
        let forward = reference::forward(&shape, &pattern, scores(), &q, &k, &v).unwrap();
        let dlse = dlse.as_deref();
        let backward = reference::backward(&shape, &pattern, scores(), &q, &k, &v, &dout, dlse);
        let backward = backward.unwrap();
        let whole = |rows: Vec<f64>, dims: [usize; 2], missing: f64| match &lengths {
            None => rows,
            Some(lengths) => {
                let dims = [1, shape.tokens, dims[0], dims[1]];
                let rows = Tensor::from_f64(encke_core::DType::F64, dims, &rows).unwrap();
                lengths.unpack(&rows, missing).unwrap().to_f64()
            }
        };
        let (heads, kv_heads) = (shape.heads, shape.kv_heads);
        let mut results = vec![
            ("out", whole(forward.out, [heads, shape.value_dim], 0.0)),
            ("lse", whole(forward.lse, [heads, 1], f64::NEG_INFINITY)),
            ("dq", whole(backward.dq, [heads, shape.dim], 0.0)),
            ("dk", whole(backward.dk, [kv_heads, shape.dim], 0.0)),
            ("dv", whole(backward.dv, [kv_heads, shape.value_dim], 0.0)),
        ];
        if self.scores.sinks.is_some() {
            results.push(("dsinks", backward.dsinks));
        }
        results
    }
}

/// The names of what an option sets.
fn names(arguments: &str) -> impl Iterator<Item = &str> {
    let words = arguments.split(' ').enumerate();
    words.filter_map(|(at, word)| (at == 0 || word.starts_with("--")).then_some(word))
}

/// What is wrong with a pair; None if it is right. Counts refusals.
fn check(one: &AttendOption, other: &AttendOption, refused: &Mutex<usize>) -> Option<String> {
    let folder = CommandFolder::new();
    let mut call = ReferenceCall::new();
    let alone = one.0 == other.0;
    (one.2)(&mut call);
    let mut arguments = one.0.to_string();
    if !alone {
        (other.2)(&mut call);
        arguments += &format!(" {}", other.0);
    }
    files::write(&folder.join("in"), &call.tensors());
    let given = arguments.split(' ');
    // A file's name is not an argument.
    let ranks = ["--ranks", "--memory-limit"];
    let mut command: Vec<&str> = given
        .clone()
        .filter(|word| !["fewer-queries", "batch", "values", "dlse"].contains(word))
        .collect();
    if !given.clone().any(|word| ranks.contains(&word)) {
        command.push("--ranks 4");
    }
    let mut attend = folder.command(&format!("attend in -o out --grad {}", command.join(" ")));
    // Such small calls need no more threads, which take longer to start than they compute.
    let output = attend.env("RAYON_NUM_THREADS", "1").output().unwrap();
    let said = text(&output.stderr);
    if !output.status.success() {
        let names = [one, other].map(|of| of.1.iter().any(|word| said.contains(word)));
        let one_sentence = output.status.code() == Some(2) && said.lines().count() == 1;
        let clean = folder.names() == ["in"];
        *refused.lock().unwrap() += 1;
        let right = one_sentence && clean && !alone && names == [true; 2];
        return (!right).then(|| format!("{arguments}: {said}"));
    }
    let got = files::read(&folder.join("out"));
    let expected = call.expected();
    if got.len() != expected.len() {
        return Some(format!("{arguments}: {:?} were written", got.keys()));
    }
    for (name, wanted) in expected {
        let finite = wanted.iter().filter(|x| x.is_finite());
        let most = finite.fold(1e-30, |most: f64, x| most.max(x.abs()));
        let wanted = StoredTensor {
            elements: wanted,
            ..got[name].clone()
        };
        let off = got[name].difference(&wanted) / most;
        if off > call.tolerance {
            return Some(format!("{arguments}: {name} is off by {off:.1e}"));
        }
    }
    None
}

#[test]
fn two_options_of_attend_equal_the_reference_or_a_sentence_names_both() {
    let mut pairs = Vec::new();
    for (at, one) in OPTIONS.iter().enumerate() {
        let overlap = |other: &AttendOption| names(one.0).any(|of| names(other.0).any(|x| x == of));
        pairs.push((one, one));
        let others = OPTIONS[at + 1..].iter();
        pairs.extend(
            others
                .filter(|other| !overlap(other))
                .map(|other| (one, other)),
        );
    }
    assert!(pairs.len() > 800, "{} pairs", pairs.len());
    let (queue, refused) = (Mutex::new(pairs.into_iter()), Mutex::new(0));
    let wrong = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let next = || queue.lock().unwrap().next();
                while let Some((one, other)) = next() {
                    let found = check(one, other, &refused);
                    wrong.lock().unwrap().extend(found);
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(
        wrong.is_empty(),
        "{} pairs are wrong:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert!(refused.into_inner().unwrap() > 50);
}
