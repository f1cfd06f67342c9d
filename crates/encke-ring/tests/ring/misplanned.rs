//! Plans with one mistake in their jobs, on whole rings: the configurations that rings are tested
//! with tell each of them from the reference.
//!
//! The decision here: a ring runs the jobs of its plan, and each is changed on its way to the
//! kernel as a plan with the mistake would have made it. Rows, parcels and carries stay those of
//! the plan.

use std::sync::Arc;

use encke_core::conformance::extent;
use encke_core::denominator::Denominator;
use encke_core::job::{Band, Job, Mask, Piece};
use encke_core::plan::Request;
use encke_core::sharding::Run;
use encke_core::{Scores, Tensor, Window, reference};
use encke_ring::ThreadRing;

use crate::instrumented::{InstrumentedKernel, KernelCall};
use crate::support::{CallTensors, Configuration, DEADLINE, check, difference, run};

/// The mistake of a plan.
#[derive(Debug, Clone, Copy, PartialEq)]
enum PlanFault {
    /// None: the ring itself must pass.
    None,
    /// Windows reach one position further back.
    WindowLonger,
    /// Windows end one position early.
    WindowShorter,
    /// A document has the first query of the one after it.
    BorderLate,
    /// Keys of a prefix are visible to all documents of a job.
    PrefixOverridesDocuments,
    /// Positions are indices of rows, as if each parcel began where the queries do.
    SlopeByIndex,
}

const FAULTS: [PlanFault; 5] = [
    PlanFault::WindowLonger,
    PlanFault::WindowShorter,
    PlanFault::BorderLate,
    PlanFault::PrefixOverridesDocuments,
    PlanFault::SlopeByIndex,
];

/// Changes the windows of all bands of a job.
fn change_windows(job: &mut Job, left: impl Fn(usize) -> Option<usize>) {
    let changed = |band: Band| Band {
        window: Window {
            left: band.window.left.and_then(&left),
            ..band.window
        },
        ..band
    };
    job.mask = job.mask.take().map(|mask| match mask {
        Mask::Band(band) => Mask::Band(changed(band)),
        Mask::Documents(pieces) => {
            let changed = |piece: &Piece| Piece {
                band: piece.band.map(changed),
                ..piece.clone()
            };
            Mask::Documents(pieces.iter().map(changed).collect())
        }
    });
}

/// The job as a plan with this fault would have made it. `prefix` is the length of prefixes.
fn misplanned(job: &mut Job, fault: PlanFault, prefix: usize) {
    match (fault, &mut job.mask) {
        (PlanFault::WindowLonger, _) => change_windows(job, |left| Some(left + 1)),
        (PlanFault::WindowShorter, _) => change_windows(job, |left| Some(left.saturating_sub(1))),
        (PlanFault::BorderLate, Some(Mask::Documents(pieces))) => {
            let mut late = pieces.to_vec();
            for i in 1..late.len() {
                if late[i - 1].queries.end == late[i].queries.start {
                    late[i - 1].queries.end += 1;
                    late[i].queries.start += 1;
                    if let Some(band) = &mut late[i].band {
                        band.query += band.query_step;
                    }
                }
            }
            *pieces = late.into();
        }
        (PlanFault::PrefixOverridesDocuments, Some(Mask::Documents(pieces))) => {
            let first = pieces[0].keys.clone();
            let alike = |piece: &Piece| piece.keys.len() <= prefix;
            if first.len() <= prefix {
                let all: Arc<[Piece]> = pieces
                    .iter()
                    .map(|piece| match alike(piece) {
                        true => Piece {
                            keys: first.start..piece.keys.end,
                            band: None,
                            ..piece.clone()
                        },
                        false => piece.clone(),
                    })
                    .collect();
                *pieces = all;
            }
        }
        (PlanFault::SlopeByIndex, Some(Mask::Band(band))) if band.window == Window::ALL => {
            (band.query, band.key) = (0, 0);
        }
        _ => {}
    }
}

/// Whether a ring whose plans have this fault differs from the reference.
fn differs(seed: u64, fault: PlanFault) -> bool {
    let mut case = Configuration::masked(seed);
    // A coin is drawn by positions: it would tell a wrong position where no slope does.
    case.request.dropout = None;
    let prefix = case.request.pattern.effective_prefix();
    let ring = ThreadRing::new(
        InstrumentedKernel(move |call: KernelCall<'_>| {
            if let KernelCall::Attend { job, .. } = call {
                misplanned(job, fault, prefix);
            }
            Ok(())
        }),
        DEADLINE,
    );
    check(&ring, &case).is_err()
}

fn seeds() -> std::ops::Range<u64> {
    0..extent(200, 600)
}

#[test]
fn rings_without_a_fault_agree_with_the_reference() {
    for seed in seeds().take(60) {
        assert!(!differs(seed, PlanFault::None), "seed {seed}");
    }
}

#[test]
fn every_mistake_in_a_plan_is_seen() {
    for fault in FAULTS {
        let seen = seeds().filter(|&seed| differs(seed, fault)).count();
        println!(
            "{fault:?} was seen in {seen} of {} configurations",
            seeds().end
        );
        assert!(seen >= 3, "{fault:?} was seen in {seen} configurations");
    }
}

/// Adds the sinks of a call to the results of a ring, `times` of them for each row.
fn with_sinks(request: &Request, sinks: &[f64], times: usize, [out, lse]: [&mut Tensor; 2]) {
    let terms = Denominator::new(&request.pattern, &request.shape, Some(sinks));
    let terms = terms.expect("a sink for each head");
    for _ in 0..times {
        terms.apply(&[Run::leading(request.shape.queries)], out, lse);
    }
}

#[test]
fn a_sink_that_each_rank_adds_is_seen() {
    let mut seen = 0;
    for seed in 0..40 {
        let mut case = Configuration::masked(seed);
        case.request.dropout = None;
        let request = &case.request;
        let ranks = request.sharding.ranks();
        let sinks: Vec<f64> = (0..request.shape.heads).map(|h| 0.3 * h as f64).collect();
        let ring = ThreadRing::new(encke_core::naive::NaiveKernel, DEADLINE);
        let mut got = run(&ring, &case).expect("the ring runs");
        let mut once = (got.out.clone(), got.lse.clone());
        with_sinks(request, &sinks, 1, [&mut once.0, &mut once.1]);
        with_sinks(request, &sinks, ranks, [&mut got.out, &mut got.lse]);
        let tensors = CallTensors::random(&request.shape, case.seed);
        let [q, k, v] = [&tensors.q, &tensors.k, &tensors.v].map(Tensor::to_f64);
        let scores = Scores {
            sinks: Some(sinks.into()),
            ..request.scores()
        };
        let expected = reference::forward(&request.shape, &request.pattern, scores, &q, &k, &v);
        let expected = expected.expect("the configuration is valid");
        assert!(difference(&once.1, &expected.lse) < 1e-12, "seed {seed}");
        let off = difference(&got.lse, &expected.lse);
        assert_eq!(
            off > 1e-12,
            ranks > 1,
            "seed {seed}: {off:e} on {ranks} ranks"
        );
        seen += usize::from(off > 1e-12);
    }
    assert!(seen >= 3, "it was seen in {seen} configurations");
}
