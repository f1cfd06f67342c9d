//! Calls of a thread ring: the same bits every time, no allocation in the second call, no hang
//! after a failure.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use encke_core::kernel::{Kernel, KernelError};
use encke_core::naive::NaiveKernel;
use encke_core::plan::program::Role;
use encke_core::plan::{Pass, Queries, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::transport::TransportError;
use encke_core::{DType, Pattern, Shape, Tensor, View};
use encke_ring::threads::endpoints;
use encke_ring::trace::Recorder;
use encke_ring::{Rank, RankError, RingError, ThreadRing, gather_sequence, split_sequence};

use crate::instrumented::{InstrumentedKernel, KernelCall, caller};
use crate::support::{CallTensors, Configuration, DEADLINE, run};

fn dense(ranks: usize, cut: Cut) -> Configuration {
    let request = Request::new(
        Shape::new(2, 45, 4, 2, 3).expect("sizes are positive"),
        Pattern::dense().causal(true),
        Sharding::new(ranks, cut).expect("ranks are positive"),
        DType::F32,
    );
    Configuration { request, seed: 11 }
}

fn forward<K: Kernel>(ring: &ThreadRing<K>, case: &Configuration) -> Result<Tensor, RingError> {
    let tensors = CallTensors::random(&case.request.shape, case.seed);
    let inputs = [
        (Role::Q, tensors.q.view()),
        (Role::K, tensors.k.view()),
        (Role::V, tensors.v.view()),
    ];
    let mut outcome = ring.run(&case.request, &inputs)?;
    Ok(outcome.take(Role::Out).expect("a forward pass returns out"))
}

/// A kernel that sleeps before each call, each time for a different duration.
pub fn randomly_slow() -> impl Kernel<Buffer = encke_core::Data> {
    let calls = AtomicUsize::new(0);
    InstrumentedKernel(move |_: KernelCall<'_>| {
        let call = calls.fetch_add(1, Ordering::Relaxed);
        if call.is_multiple_of(3) {
            std::thread::sleep(Duration::from_micros(call as u64 * 7919 % 900));
        }
        Ok(())
    })
}

#[test]
fn timing_never_changes_a_bit() {
    for (ranks, cut) in [(5, Cut::Contiguous), (4, Cut::Zigzag), (3, Cut::Striped)] {
        for queries in [Queries::Sharded, Queries::Replicated] {
            let mut case = dense(ranks, cut.clone());
            case.request.queries = queries;
            let ring = ThreadRing::new(NaiveKernel, DEADLINE);
            let expected = run(&ring, &case).expect("nothing fails");
            let slow = ThreadRing::new(randomly_slow(), DEADLINE);
            for _ in 0..5 {
                let again = run(&slow, &case).expect("nothing fails");
                assert_eq!(again.out, expected.out);
                assert_eq!(again.lse, expected.lse);
                assert_eq!(again.dq, expected.dq);
                assert_eq!(again.dk, expected.dk);
                assert_eq!(again.dv, expected.dv);
            }
        }
    }
}

#[test]
fn the_second_call_allocates_nothing() {
    let allocations = AtomicUsize::new(0);
    let kernel = InstrumentedKernel(|call: KernelCall<'_>| {
        if matches!(call, KernelCall::Allocate) {
            allocations.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    });
    let ring = ThreadRing::new(kernel, DEADLINE);
    for queries in [Queries::Sharded, Queries::Replicated] {
        let mut case = dense(4, Cut::Zigzag);
        case.request.queries = queries;
        run(&ring, &case).expect("nothing fails");
        let first = allocations.load(Ordering::Relaxed);
        assert!(first > 0);
        for _ in 0..3 {
            run(&ring, &case).expect("nothing fails");
            assert_eq!(allocations.load(Ordering::Relaxed), first);
        }
    }
    let stats = ring.stats();
    // Two configurations, each with a forward and a backward plan, four times.
    assert_eq!((stats.plan_misses, stats.plan_hits), (4, 12));
    assert_eq!((stats.buffer_misses, stats.buffer_hits), (4, 12));
}

#[test]
fn ranks_allocate_what_the_plan_lists() {
    for seed in 0..200 {
        let case = Configuration::random(seed);
        let tensors = CallTensors::random(&case.request.shape, case.seed);
        let inputs = [
            (Role::Q, tensors.q.view()),
            (Role::K, tensors.k.view()),
            (Role::V, tensors.v.view()),
        ];
        let ring = ThreadRing::new(NaiveKernel, DEADLINE);
        let outcome = ring.run(&case.request, &inputs).expect("nothing fails");
        for memory in &outcome.memory {
            let own = memory.planned_bytes() - memory.borrowed_bytes;
            assert_eq!(memory.allocated_bytes, own, "{case:?}");
        }
        let planned = outcome
            .plan
            .explain()
            .expect("every rank exists")
            .sent_bytes;
        assert_eq!(outcome.trace.sent_bytes(), planned);
    }
}

/// Runs a call that must fail, and checks that it ends soon after the deadline.
fn failing<K: Kernel>(kernel: K, deadline: Duration) -> RingError {
    let ring = ThreadRing::new(kernel, deadline);
    let begin = Instant::now();
    let error = forward(&ring, &dense(4, Cut::Contiguous)).expect_err("the call must fail");
    assert!(
        begin.elapsed() < deadline + Duration::from_secs(20),
        "it hung"
    );
    error
}

/// Fails on rank 2, on its second job.
fn on_rank_two(
    act: impl Fn() -> Result<(), KernelError>,
) -> impl Fn(KernelCall<'_>) -> Result<(), KernelError> {
    let calls = AtomicUsize::new(0);
    move |call: KernelCall<'_>| {
        if matches!(call, KernelCall::Attend { .. })
            && caller() == 2
            && calls.fetch_add(1, Ordering::Relaxed) == 1
        {
            return act();
        }
        Ok(())
    }
}

#[test]
fn a_panic_names_its_rank_and_ends_the_others() {
    let kernel = InstrumentedKernel(on_rank_two(|| panic!("the lights went out")));
    let RingError::Rank {
        rank,
        source,
        others,
    } = failing(kernel, DEADLINE)
    else {
        panic!("a rank must be named");
    };
    assert_eq!(rank, 2);
    let expected = "the lights went out".to_string();
    assert_eq!(source, RankError::Panic { message: expected });
    // Ranks that still needed rank 2 stopped because of it; the others may have finished.
    assert!(others.iter().any(|(rank, _)| *rank == 3));
    for (_, error) in others {
        let named = matches!(
            error,
            RankError::Transport(TransportError::PeerFailed { peer: 2, .. })
        );
        assert!(named, "{error}");
    }
}

#[test]
fn a_kernel_error_names_its_rank() {
    let refusal = || KernelError::Memory {
        kernel: "watched",
        bytes: 7,
    };
    let kernel = InstrumentedKernel(on_rank_two(move || Err(refusal())));
    let RingError::Rank { rank, source, .. } = failing(kernel, DEADLINE) else {
        panic!("a rank must be named");
    };
    assert_eq!(rank, 2);
    let expected = RankError::Kernel {
        round: 1,
        source: refusal(),
    };
    assert_eq!(source, expected);
}

#[test]
fn a_stuck_rank_is_not_waited_for_longer_than_the_deadline() {
    let stuck = || {
        std::thread::sleep(Duration::from_secs(2));
        Ok(())
    };
    let error = failing(
        InstrumentedKernel(on_rank_two(stuck)),
        Duration::from_millis(500),
    );
    let RingError::Rank { rank, source, .. } = error else {
        panic!("a rank must be named");
    };
    assert_ne!(rank, 2, "it is the others who notice");
    let RankError::Transport(TransportError::Deadline { peer, limit, .. }) = source else {
        panic!("a deadline, not {source}");
    };
    assert_eq!((peer, limit), (2, Duration::from_millis(500)));
}

#[test]
fn a_ring_works_again_after_a_failure() {
    let case = dense(4, Cut::Contiguous);
    let ring = ThreadRing::new(InstrumentedKernel(on_rank_two(|| panic!("once"))), DEADLINE);
    forward(&ring, &case).expect_err("the first call fails");
    let out = forward(&ring, &case).expect("the second does not");
    let alone = ThreadRing::new(NaiveKernel, DEADLINE);
    assert_eq!(out, forward(&alone, &case).expect("nothing fails"));
}

#[test]
fn replicated_queries_give_every_rank_the_whole_output() {
    let mut case = dense(3, Cut::Striped);
    case.request.queries = Queries::Replicated;
    let ring = ThreadRing::new(NaiveKernel, DEADLINE);
    let expected = forward(&ring, &case).expect("nothing fails");
    let plan = ring.plan(&case.request).expect("legal");
    let tensors = CallTensors::random(&case.request.shape, case.seed);
    std::thread::scope(|scope| {
        for (rank, mut endpoint) in endpoints(3, DEADLINE).into_iter().enumerate() {
            let (plan, tensors, expected) = (&plan, &tensors, &expected);
            scope.spawn(move || {
                let program = plan.rank(rank).expect("the rank exists");
                let mut rank = Rank::new(&NaiveKernel, program).expect("there is memory");
                for (role, tensor) in [
                    (Role::Q, &tensors.q),
                    (Role::K, &tensors.k),
                    (Role::V, &tensors.v),
                ] {
                    rank.load(&NaiveKernel, role, &tensor.view())
                        .expect("it fits");
                }
                let mut recorder = Recorder::new(0, Instant::now());
                rank.run(&NaiveKernel, &mut endpoint, &mut recorder)
                    .expect("nothing fails");
                let mut out = Tensor::zeros(expected.dtype(), expected.dims());
                rank.store(&NaiveKernel, Role::Out, &mut out)
                    .expect("it fits");
                assert_eq!(out, *expected);
            });
        }
    });
}

#[test]
fn missing_and_misshapen_inputs_are_refused() {
    let case = dense(2, Cut::Contiguous);
    let tensors = CallTensors::random(&case.request.shape, case.seed);
    let ring = ThreadRing::new(NaiveKernel, DEADLINE);
    let (q, k) = ((Role::Q, tensors.q.view()), (Role::K, tensors.k.view()));
    let error = ring.run(&case.request, &[q, k]).expect_err("v is missing");
    assert_eq!(error, RingError::MissingInput { role: Role::V });
    let error = ring.run(&case.request, &[q, k, (Role::V, q.1)]);
    let words = error.expect_err("v has too many heads").to_string();
    assert!(
        words.contains("[2, 45, 4, 3]") && words.contains("[2, 45, 2, 3]"),
        "{words}"
    );
    let backward = Request {
        pass: Pass::Backward { dlse: false },
        ..case.request
    };
    let error = ring.run(&backward, &[q, k, (Role::V, k.1)]);
    assert_eq!(
        error.expect_err("more is needed"),
        RingError::MissingInput { role: Role::Out }
    );
}

#[test]
fn a_sequence_survives_being_split_and_gathered() {
    let values: Vec<f32> = (0..2 * 23 * 3 * 5).map(|i| i as f32).collect();
    let view = View::contiguous(&values, [2, 23, 3, 5]).expect("sizes agree");
    let cuts = [
        (1, Cut::Contiguous),
        (4, Cut::Contiguous),
        (4, Cut::Zigzag),
        (4, Cut::Striped),
        (32, Cut::Striped),
        (4, Cut::Firsts(vec![0, 0, 7, 23])),
    ];
    for (ranks, cut) in cuts {
        let sharding = Sharding::new(ranks, cut).expect("ranks are positive");
        let shards = split_sequence(&view, &sharding).expect("it fits");
        assert_eq!(
            shards.iter().map(|shard| shard.dims()[1]).sum::<usize>(),
            23
        );
        let whole = gather_sequence(&shards, &sharding).expect("it fits");
        assert_eq!(whole.to_f64(), view.to_f64());
        gather_sequence(&shards[..0], &sharding).expect_err("no shards");
    }
}
