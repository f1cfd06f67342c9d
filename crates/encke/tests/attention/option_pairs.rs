//! Every pair of options of the builder and of a call: forward and backward equal the reference, or
//! one sentence that names both is returned. Nothing is ignored.
//!
//! The decision here: an option says once what it changes for Encke and for the reference, so that
//! a new one is compared in all of its pairs by one entry of the table.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use encke::conformance::CallTensors;
use encke::tune::MachineSource;
use encke::{
    Attention, Auto, Balance, Bits, Builder, CheckpointPolicy, Cut, DType, Documents, Dropout,
    Fault, FaultPhase, KeyLengths, MixingGradient, Mode, OffsetRule, Padding, Pattern, Precision,
    Queries, Rotating, Schedule, Scores, Shape, Tensor, Window, alibi_slopes, reference,
};

use crate::choose::cores;
use crate::support::difference;

const TOKENS: usize = 64;

/// A call, for Encke and for the reference.
#[derive(Clone)]
struct Call {
    shape: Shape,
    pattern: Pattern,
    scores: Scores,
    key_lengths: Option<Vec<usize>>,
    dlse: bool,
    tolerance: f64,
    builder: Builder,
}

impl Call {
    fn new() -> Call {
        let shape = Shape::new(1, TOKENS, 4, 4, 4).expect("legal");
        Call {
            shape,
            pattern: Pattern::dense(),
            scores: Scores::from(shape.default_scale()),
            key_lengths: None,
            dlse: false,
            tolerance: 1e-11,
            builder: Attention::builder().ranks(4),
        }
    }

    fn ring(&mut self, change: impl FnOnce(Builder) -> Builder) {
        self.builder = change(self.builder.clone());
    }

    fn masked(&mut self, change: impl FnOnce(Pattern) -> Pattern) {
        self.pattern = change(self.pattern.clone());
    }

    fn branches(&mut self, mode: Mode) {
        let branches = Pattern::dilated(&[16, 64], &[1, 2], mode).expect("legal");
        let own = self.pattern.clone();
        // Options come in any order.
        self.pattern = branches
            .causal(own.is_causal())
            .window(match own.has_bounded_window() {
                true => WINDOW,
                false => Window::ALL,
            })
            .prefix(own.effective_prefix())
            .documents(own.document_list().cloned())
            .query_offset(own.offset_of_queries());
    }
}

const WINDOW: Window = Window {
    left: Some(9),
    right: Some(2),
};

/// One option: what it sets, words by which a refusal may name it, and what it changes.
struct BuilderOption {
    sets: &'static str,
    words: &'static [&'static str],
    /// Whether results do not depend on it.
    is_of_ring: bool,
    change: fn(&mut Call),
}

/// An option that changes results.
const fn of_call(
    sets: &'static str,
    words: &'static [&'static str],
    change: fn(&mut Call),
) -> BuilderOption {
    BuilderOption {
        sets,
        words,
        is_of_ring: false,
        change,
    }
}

/// An option that changes how they are computed.
const fn of_ring(
    sets: &'static str,
    words: &'static [&'static str],
    change: fn(&mut Call),
) -> BuilderOption {
    BuilderOption {
        is_of_ring: true,
        ..of_call(sets, words, change)
    }
}

const fn mix(gradient: MixingGradient) -> Mode {
    Mode::Mix {
        offsets: OffsetRule::HeadBlock,
        gradient,
    }
}

const OPTIONS: &[BuilderOption] = &[
    of_call("branches", &["group"], |call| {
        let scale = encke::GroupScale::Groups;
        call.branches(Mode::Group { scale });
    }),
    of_call("branches", &["mix"], |call| {
        call.branches(mix(MixingGradient::Exact))
    }),
    of_call("branches", &["detached", "combined after"], |call| {
        call.branches(mix(MixingGradient::Detached));
    }),
    of_call("branches", &["fkodom"], |call| {
        call.branches(Mode::Fkodom);
        call.tolerance = call.tolerance.max(1e-8);
    }),
    of_call("branches", &["padding"], |call| {
        call.branches(mix(MixingGradient::Exact));
        call.masked(|of| of.padding(Padding::Torchscale));
    }),
    of_call("causal", &["causal"], |call| {
        call.masked(|of| of.causal(true))
    }),
    of_call("window", &["window"], |call| {
        call.masked(|of| of.window(WINDOW))
    }),
    of_call("window", &["window"], |call| {
        call.masked(|of| of.window(WINDOW).prefix(3));
    }),
    of_call("documents", &["documents"], |call| {
        let documents = Documents::new(&[40, 1, 23]).expect("lengths");
        call.masked(|of| of.documents(Some(documents)));
    }),
    of_call("queries of q", &["fewer queries"], |call| {
        call.shape = call.shape.with_queries(20).expect("fewer");
    }),
    of_call("queries of q", &["fewer queries"], |call| {
        call.shape = call.shape.with_queries(20).expect("fewer");
        call.masked(|of| of.query_offset(Some(7)));
    }),
    of_call("batch", &["key lengths"], |call| {
        call.shape.batch = 2;
        call.key_lengths = Some(vec![TOKENS, 27]);
    }),
    of_call("batch", &["batch"], |call| call.shape.batch = 2),
    of_call("values", &["value"], |call| {
        call.shape = call.shape.with_value_dim(6).expect("legal");
    }),
    of_call("key heads", &["key heads"], |call| call.shape.kv_heads = 2),
    of_call("scale", &["scale"], |call| {
        call.scores.scale = -0.3;
        call.ring(|of| of.scale(-0.3));
    }),
    of_call("softcap", &["softcap"], |call| {
        call.scores.softcap = Some(2.0);
        call.ring(|of| of.softcap(Some(2.0)));
    }),
    of_call("slopes", &["slopes"], |call| {
        call.scores.slopes = Some([0.5, 0.1, 0.0, -0.1].into());
        call.ring(|of| of.slopes(Some([0.5, 0.1, 0.0, -0.1].into())));
    }),
    of_call("slopes", &["slopes"], |call| {
        call.scores.slopes = Some(alibi_slopes(4));
        call.ring(|of| of.alibi(true));
    }),
    of_call("sinks", &["sinks"], |call| {
        call.scores.sinks = Some([0.5, -1.0, 2.0, f64::NEG_INFINITY].into());
    }),
    of_call("dropout", &["dropout"], |call| {
        let dropout = Dropout::new(0.3, 1 << 40 | 7).expect("a probability");
        call.scores.dropout = Some(dropout);
        call.ring(|of| of.dropout(Some(dropout)));
    }),
    of_call("dlse", &["lse"], |call| call.dlse = true),
    of_call("precision", &["computing in f32"], |call| {
        call.tolerance = 1e-4;
        call.ring(|of| of.precision(Precision::Compute(DType::F32)));
    }),
    of_ring("ranks", &["1 rank", "ranks"], |call| {
        call.ring(|of| of.ranks(1))
    }),
    of_ring("cut", &["contiguous"], |call| {
        call.ring(|of| of.sharding(Cut::Zigzag))
    }),
    of_ring("cut", &["striped", "contiguous"], |call| {
        call.ring(|of| of.sharding(Cut::Striped));
    }),
    of_ring(
        "cut",
        &["first tokens", "the partition", "cut the sequence"],
        |call| {
            call.ring(|of| of.sharding(Cut::Firsts(vec![0, 9, 9, 50])));
        },
    ),
    of_ring("cut", &["balanced"], |call| {
        call.ring(|of| of.balanced(Some(Balance::Contiguous)));
    }),
    of_ring("cut", &["balanced"], |call| {
        call.ring(|of| of.balanced(Some(Balance::Documents)));
    }),
    of_ring("queries", &["replicated queries"], |call| {
        call.ring(|of| of.queries(Queries::Replicated));
    }),
    of_ring("schedule", &["several distances"], |call| {
        call.ring(|of| of.schedule(Schedule::RING.with_width(2)));
    }),
    of_ring("schedule", &["two levels"], |call| {
        call.ring(|of| of.schedule(Schedule::RING.with_node(2)));
    }),
    of_ring("schedule", &["divides heads"], |call| {
        call.ring(|of| of.schedule(Schedule::RING.with_heads(2)));
    }),
    of_ring("schedule", &["rotate"], |call| {
        call.ring(|of| of.schedule(Schedule::RING.with_backward(Rotating::Queries)));
    }),
    of_ring("cut schedule", &["auto"], |call| {
        let machine = Auto::on(cores(), MachineSource::BuiltIn);
        let auto = Auto {
            ranks: false,
            ..machine
        };
        call.ring(|of| of.auto(auto));
    }),
    of_ring("bits", &["bits"], |call| {
        call.ring(|of| of.bits("invariant:32".parse::<Bits>().expect("a name")));
    }),
    of_ring("redundancy", &["redundancy"], |call| {
        call.ring(|of| of.redundancy(1))
    }),
    of_ring("redundancy", &["redundancy"], |call| {
        let death = Fault {
            rank: 2,
            epoch: 0,
            round: 1,
            phase: FaultPhase::Begin,
        };
        call.ring(|of| of.redundancy(1).drill(vec![death]));
    }),
    of_ring("checkpoint", &["checkpoint"], |call| {
        call.ring(|of| of.checkpoint(CheckpointPolicy::Recompute));
    }),
    of_ring("checkpoint", &["checkpoint"], |call| {
        call.ring(|of| of.checkpoint(CheckpointPolicy::Offload));
    }),
];

const RESULTS: [&str; 6] = ["out", "lse", "dq", "dk", "dv", "dsinks"];
type Results = [Vec<f64>; 6];

/// Values are positive: fkodom divides by their sums.
fn tensors(shape: &Shape) -> CallTensors {
    let drawn = CallTensors::random(shape, 11);
    let positive: Vec<f64> = drawn.v.to_f64().iter().map(|x| 1.0 + x / 4.0).collect();
    let v = Tensor::from_f64(DType::F64, drawn.v.dims(), &positive).expect("as many");
    CallTensors { v, ..drawn }
}

/// What Encke computes, or its refusal.
fn computed(call: &Call) -> Result<[Tensor; 6], String> {
    let said = |error: &dyn std::error::Error| error.to_string();
    let lengths = call.key_lengths.as_ref();
    let lengths = lengths.map(|of| KeyLengths::new(TOKENS, of).expect("legal"));
    // Key lengths do not depend on when the pattern is given.
    let mut builder = call.builder.clone();
    if let Some(lengths) = &lengths {
        lengths.shape(&call.shape).map_err(|error| said(&error))?;
        builder = builder.key_lengths(lengths).map_err(|error| said(&error))?;
    }
    let built = builder.pattern(call.pattern.clone()).build();
    let attention = built.map_err(|error| said(&error))?;
    let given = tensors(&call.shape);
    let packed = |of: &Tensor| match &lengths {
        None => of.clone(),
        Some(lengths) => lengths.pack(&of.view()).expect("a padded batch"),
    };
    let [q, k, v, dout, dlse] =
        [&given.q, &given.k, &given.v, &given.dout, &given.dlse].map(packed);
    let (q, k, v) = (q.view(), k.view(), v.view());
    let forward = match &call.scores.sinks {
        None => attention.forward(&q, &k, &v),
        Some(sinks) => attention.forward_with_sinks(&q, &k, &v, sinks),
    };
    let forward = forward.map_err(|error| said(&error))?;
    let dlse = call.dlse.then(|| dlse.view());
    let kept = &forward.checkpoint;
    let backward = attention.backward(&q, &k, &v, kept, &dout.view(), dlse.as_ref());
    let backward = backward.map_err(|error| said(&error))?;
    let dsinks = backward.dsinks.unwrap_or_default();
    let dsinks = Tensor::from_f64(DType::F64, [1, 1, dsinks.len(), 1], &dsinks);
    let results = [
        (Tensor::clone(&forward.out), 0.0),
        (Tensor::clone(&forward.lse), f64::NEG_INFINITY),
        (backward.dq, 0.0),
        (backward.dk, 0.0),
        (backward.dv, 0.0),
    ];
    let whole = results.map(|(of, missing)| match &lengths {
        None => of,
        Some(lengths) => lengths.unpack(&of, missing).expect("packed rows"),
    });
    let [out, lse, dq, dk, dv] = whole;
    Ok([out, lse, dq, dk, dv, dsinks.expect("as many")])
}

/// What the reference computes. Of a padded batch entry after entry: its rows are a document, and
/// the other rows of the batch have no gradient.
fn expected(call: &Call) -> Results {
    let given = tensors(&call.shape);
    let Some(lengths) = &call.key_lengths else {
        return reference_of(call, &call.pattern, &given);
    };
    let rows = |entry: usize, row: usize| {
        let first = entry * TOKENS * row;
        first..first + lengths[entry] * row
    };
    let mut sums: Option<Results> = None;
    for (entry, &length) in lengths.iter().enumerate() {
        let mut ends: Vec<usize> = match call.pattern.document_list() {
            Some(documents) => documents.ranges().map(|of| of.end).collect(),
            None => vec![TOKENS],
        };
        ends.push(length);
        ends.sort_unstable();
        ends.dedup();
        let starts = std::iter::once(0).chain(ends.iter().copied());
        let own: Vec<usize> = ends
            .iter()
            .zip(starts)
            .map(|(end, start)| end - start)
            .collect();
        let documents = Documents::new(&own).expect("lengths");
        let pattern = call.pattern.clone().documents(Some(documents));
        let alone = |of: &Tensor| {
            let [_, _, heads, dim] = of.dims();
            let kept = rows(entry, heads * dim);
            let all = of.to_f64().into_iter().enumerate();
            let values: Vec<f64> = all
                .map(|(at, x)| if kept.contains(&at) { x } else { 0.0 })
                .collect();
            Tensor::from_f64(DType::F64, of.dims(), &values).expect("as many")
        };
        let own = CallTensors {
            q: given.q.clone(),
            k: given.k.clone(),
            v: given.v.clone(),
            dout: alone(&given.dout),
            dlse: alone(&given.dlse),
        };
        let found = reference_of(call, &pattern, &own);
        let sums = sums.get_or_insert_with(|| {
            let empty = |at: usize| if at == 1 { f64::NEG_INFINITY } else { 0.0 };
            std::array::from_fn(|at| vec![empty(at); found[at].len()])
        });
        for (at, (sum, part)) in sums.iter_mut().zip(&found).enumerate() {
            match at {
                0 | 1 => {
                    let row = part.len() / lengths.len() / TOKENS;
                    sum[rows(entry, row)].copy_from_slice(&part[rows(entry, row)]);
                }
                _ => sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x),
            }
        }
    }
    sums.expect("a batch has entries")
}

fn reference_of(call: &Call, pattern: &Pattern, of: &CallTensors) -> Results {
    let [q, k, v, dout, dlse] = [&of.q, &of.k, &of.v, &of.dout, &of.dlse].map(Tensor::to_f64);
    let (shape, scores) = (&call.shape, || call.scores.clone());
    let forward = reference::forward(shape, pattern, scores(), &q, &k, &v).expect("legal");
    let dlse = call.dlse.then_some(&dlse[..]);
    let backward = reference::backward(shape, pattern, scores(), &q, &k, &v, &dout, dlse);
    let backward = backward.expect("legal");
    [
        forward.out,
        forward.lse,
        backward.dq,
        backward.dk,
        backward.dv,
        backward.dsinks,
    ]
}

/// Two options, by index.
type Pair = (usize, usize);

fn pairs() -> Vec<Pair> {
    let sets = |at: usize| OPTIONS[at].sets.split(' ');
    let overlap = |one: usize, other: usize| sets(one).any(|of| sets(other).any(|it| it == of));
    let every = 0..OPTIONS.len();
    let every = every.flat_map(|one| (one..OPTIONS.len()).map(move |other| (one, other)));
    // An option with itself is that option alone.
    every
        .filter(|&(one, other)| one == other || !overlap(one, other))
        .collect()
}

fn check(pair: Pair, known: &Mutex<BTreeMap<Vec<usize>, Results>>) -> Option<String> {
    let (one, other) = (&OPTIONS[pair.0], &OPTIONS[pair.1]);
    let mut call = Call::new();
    (one.change)(&mut call);
    if pair.0 != pair.1 {
        (other.change)(&mut call);
    }
    let (name, words) = (format!("{:?} {:?}", one.words, other.words), [one, other]);
    let got = match computed(&call) {
        Ok(got) => got,
        Err(said) => {
            assert!(pair.0 != pair.1, "{name} alone: {said}");
            assert!(!said.contains('\n'), "{name}: {said}");
            for of in words {
                let named = of.words.iter().any(|word| said.contains(word));
                assert!(named, "{name}: {:?} is not named in: {said}", of.words);
            }
            return Some(said);
        }
    };
    // Options of a ring do not change what is expected.
    let of_call = [pair.0, pair.1].into_iter();
    let key: Vec<usize> = of_call.filter(|&at| !OPTIONS[at].is_of_ring).collect();
    let lock = || known.lock().unwrap_or_else(PoisonError::into_inner);
    let found = lock().get(&key).cloned();
    let wanted = found.unwrap_or_else(|| expected(&call));
    for ((result, got), wanted) in RESULTS.iter().zip(&got).zip(&wanted) {
        let off = difference(got.data(), wanted);
        assert!(
            off <= call.tolerance,
            "{name}: {result} is off by {off:.1e}"
        );
    }
    lock().insert(key, wanted);
    None
}

#[test]
fn two_options_equal_the_reference_or_a_sentence_names_both() {
    let pairs = pairs();
    assert!(pairs.len() > 500, "{} pairs", pairs.len());
    let (queue, known) = (Mutex::new(pairs.into_iter()), Mutex::new(BTreeMap::new()));
    let (refused, wrong) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                while let Some(pair) = next() {
                    let checked = std::panic::catch_unwind(|| check(pair, &known));
                    let list = if checked.is_ok() { &refused } else { &wrong };
                    let text = match checked {
                        Ok(said) => said,
                        Err(panic) => panic.downcast_ref::<String>().cloned(),
                    };
                    let mut list = list.lock().expect("no panic");
                    list.extend(text);
                }
            });
        }
    });
    let wrong = wrong.into_inner().expect("no panic");
    assert!(
        wrong.is_empty(),
        "{} pairs:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    let refused = refused.into_inner().expect("no panic");
    assert!(refused.len() > 10, "{refused:?}");
}

#[test]
fn what_would_be_ignored_is_refused() {
    let death = Fault {
        rank: 0,
        epoch: 0,
        round: 0,
        phase: FaultPhase::Begin,
    };
    let ring = || Attention::builder().ranks(2);
    let machine = || Auto::on(cores(), MachineSource::BuiltIn);
    let lengths = KeyLengths::new(8, &[3]).expect("legal");
    let firsts = Cut::Firsts(vec![0, 4]);
    let refused = |builder: Builder, words: [&str; 2]| {
        let said = builder.clone().build().map(drop).unwrap_err().to_string();
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
        let said = builder.build_shard(0).map(drop).unwrap_err().to_string();
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
    };
    refused(ring().drill(vec![death]), ["drill", "redundancy 0"]);
    let zigzag = ring().sharding(Cut::Zigzag);
    refused(
        zigzag.balanced(Some(Balance::Documents)),
        ["balanced", "another sharding"],
    );
    // In either order.
    let given = ring().key_lengths(&lengths).expect("legal");
    refused(
        given.sharding(firsts.clone()),
        ["key lengths", "first tokens"],
    );
    let given = ring().sharding(firsts).key_lengths(&lengths);
    refused(given.expect("legal"), ["key lengths", "first tokens"]);
    for (builder, word) in [
        (ring().balanced(Some(Balance::Contiguous)), "balanced"),
        (ring().auto(machine()), "auto"),
    ] {
        let said = builder.build_shard(0).map(drop).unwrap_err().to_string();
        assert!(said.contains(word) && said.contains("elsewhere"), "{said}");
    }
}
