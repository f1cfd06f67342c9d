//! Whole calls with one mistake in their mask or their scores: the configurations that rings are
//! tested with tell each of them from the reference.
//!
//! The decision here: a call is written out pair by pair, straight from sections 9 to 11 of the
//! specification, so that a mistake is one line and not a change of a plan.

use std::sync::Arc;

use encke_core::conformance::{CallTensors, Configuration, Random};
use encke_core::plan::Request;
use encke_core::sharding::Run;
use encke_core::{Documents, Pattern, Scores, Tensor, Window, reference};

/// The mistake of a call.
#[derive(Debug, Clone, Copy, PartialEq)]
enum MaskFault {
    /// None: the call itself must pass.
    None,
    /// The window reaches one position further back.
    WindowOffByOne,
    /// The first document ends one token late.
    BorderLate,
    /// The prefix of the sequence is visible from every document.
    PrefixOverridesDocuments,
    /// The prefix is visible before its position.
    PrefixOverridesCausal,
    /// Each rank adds the sink to the denominator.
    SinkOncePerRank,
    /// Distances are between rows of shards instead of positions.
    SlopeByIndex,
}

const FAULTS: [MaskFault; 6] = [
    MaskFault::WindowOffByOne,
    MaskFault::BorderLate,
    MaskFault::PrefixOverridesDocuments,
    MaskFault::PrefixOverridesCausal,
    MaskFault::SinkOncePerRank,
    MaskFault::SlopeByIndex,
];

/// The pattern as a fault misreads it.
fn misread(pattern: &Pattern, fault: MaskFault) -> Pattern {
    let pattern = pattern.clone();
    match (fault, pattern.document_list()) {
        (MaskFault::WindowOffByOne, _) => {
            let Window { left, right } = pattern.effective_window();
            pattern.window(Window {
                left: left.map(|left| left + 1),
                right,
            })
        }
        (MaskFault::BorderLate, Some(documents)) => {
            let mut lengths: Vec<usize> = documents.lengths().collect();
            if lengths.len() > 1 {
                lengths[0] += 1;
                lengths[1] -= 1;
            }
            let late = Documents::new(&lengths).expect("as many tokens as before");
            pattern.documents(Some(late))
        }
        _ => pattern,
    }
}

/// How often a pair counts.
fn multiplicity(request: &Request, fault: MaskFault, head: usize, [x, j]: [usize; 2]) -> usize {
    let (shape, pattern) = (&request.shape, &request.pattern);
    let count = pattern.multiplicity(shape, head, x, j);
    let prefix = j < pattern.effective_prefix();
    match fault {
        MaskFault::PrefixOverridesDocuments if prefix && count == 0 => {
            let one = pattern.clone().documents(None);
            one.multiplicity(shape, head, x, j)
        }
        MaskFault::PrefixOverridesCausal if prefix && count == 0 && j > x => {
            let seen = pattern.clone().causal(false);
            seen.multiplicity(shape, head, x, j)
        }
        _ => count,
    }
}

/// The index of each token among the rows of its rank.
fn rows_of_shards(request: &Request) -> Vec<usize> {
    let tokens = request.shape.tokens;
    let mut rows = vec![0; tokens];
    for rank in 0..request.sharding.ranks() {
        let runs = request.sharding.runs(tokens, rank);
        let own = runs.into_iter().flat_map(Run::tokens);
        own.enumerate().for_each(|(row, token)| rows[token] = row);
    }
    rows
}

/// out and lse of a call, pair by pair.
fn attend(request: &Request, scores: &Scores, fault: MaskFault, seed: u64) -> [Vec<f64>; 2] {
    let tensors = CallTensors::random(&request.shape, seed);
    let request = Request {
        pattern: misread(&request.pattern, fault),
        ..request.clone()
    };
    let (shape, rows) = (&request.shape, rows_of_shards(&request));
    let read = |tensor: &Tensor, batch: usize, token: usize, head: usize| -> Vec<f64> {
        let [_, n, h, d] = tensor.dims();
        let at = ((batch * n + token) * h + head) * d;
        (at..at + d)
            .map(|i| tensor.data().as_slice().get(i))
            .collect()
    };
    let (mut out, mut all_lse) = (Vec::new(), Vec::new());
    let cells = (0..shape.batch).flat_map(|b| (0..shape.queries).map(move |i| (b, i)));
    for ((b, i), head) in cells.flat_map(|cell| (0..shape.heads).map(move |head| (cell, head))) {
        let x = i + request.pattern.first_query(shape);
        let (q, of) = (
            read(&tensors.q, b, i, head),
            head * shape.kv_heads / shape.heads,
        );
        let mut terms = Vec::new();
        for j in 0..shape.tokens {
            let count = multiplicity(&request, fault, head, [x, j]);
            let product = q.iter().zip(read(&tensors.k, b, j, of)).map(|(q, k)| q * k);
            let distance = match fault {
                MaskFault::SlopeByIndex => rows[x].abs_diff(rows[j]),
                _ => x.abs_diff(j),
            };
            let (score, _) = scores.of(product.sum(), head, distance);
            terms.push((count as f64, score, read(&tensors.v, b, j, of)));
        }
        let sinks = match fault {
            MaskFault::SinkOncePerRank => request.sharding.ranks(),
            _ => 1,
        };
        let sink = scores.sinks.as_ref().expect("every call has sinks")[head];
        terms.push((sinks as f64, sink, vec![0.0; shape.value_dim]));
        let sum: f64 = terms
            .iter()
            .map(|(count, score, _)| count * score.exp())
            .sum();
        for c in 0..shape.value_dim {
            let weighted = terms
                .iter()
                .map(|(count, score, v)| count * score.exp() * v[c]);
            out.push(request.pattern.gain() * weighted.sum::<f64>() / sum);
        }
        all_lse.push(sum.ln());
    }
    [out, all_lse]
}

/// Whether a call with this fault differs from the reference.
fn differs(seed: u64, fault: MaskFault) -> bool {
    let Configuration { mut request, .. } = Configuration::masked(seed);
    request.dropout = None;
    let mut random = Random::new(seed ^ 0x51);
    let sinks: Arc<[f64]> = (0..request.shape.heads).map(|_| random.unit()).collect();
    let scores = Scores {
        sinks: Some(sinks),
        ..request.scores()
    };
    let tensors = CallTensors::random(&request.shape, seed);
    let [q, k, v] = [&tensors.q, &tensors.k, &tensors.v].map(Tensor::to_f64);
    let expected = reference::forward(&request.shape, &request.pattern, scores.clone(), &q, &k, &v)
        .expect("the configuration is valid");
    let [out, lse] = attend(&request, &scores, fault, seed);
    let far =
        |(got, expected): (&f64, &f64)| (got - expected).abs() > 1e-11 * (1.0 + expected.abs());
    out.iter().zip(&expected.out).any(far) || lse.iter().zip(&expected.lse).any(far)
}

#[test]
fn calls_written_out_pair_by_pair_agree_with_the_reference() {
    for seed in 0..150 {
        assert!(!differs(seed, MaskFault::None), "seed {seed}");
    }
}

#[test]
fn every_mistake_in_a_mask_is_seen() {
    for fault in FAULTS {
        let seen = (0..150).filter(|&seed| differs(seed, fault)).count();
        println!("{fault:?} was seen in {seen} of 150 configurations");
        assert!(
            seen >= 3,
            "{fault:?} was seen in {seen} of 150 configurations"
        );
    }
}
