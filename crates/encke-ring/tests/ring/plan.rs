//! Plans against the pattern: every pair is computed once, every message has a sender and a
//! receiver, every byte is counted.

use encke_core::conformance::extent;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Mutex;

use encke_core::dtype::Slice;
use encke_core::plan::program::{BufferId, Role, Task};
use encke_core::plan::rings::Rotating;
use encke_core::plan::{Pass, Plan, Queries, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::transport::Address;
use encke_core::{
    DType, Data, GroupScale, MixingGradient, Mode, OffsetRule, Pattern, Shape, Tensor,
};
use encke_ring::ThreadRing;

use crate::instrumented::{InstrumentedKernel, KernelCall};
use crate::support::{Configuration, DEADLINE};

fn passes(case: &Configuration) -> [Request; 2] {
    [Pass::Forward, Pass::Backward { dlse: true }].map(|pass| Request {
        pass,
        ..case.request.clone()
    })
}

/// A seed's configuration, plain and with a mask, each with its own schedule, and in two
/// levels or with heads divided.
fn cases(seed: u64) -> impl Iterator<Item = Configuration> {
    let cases = [Configuration::random(seed), Configuration::masked(seed)];
    cases.into_iter().flat_map(move |case| {
        let other = match seed % 2 {
            0 => case.clone().in_nodes(),
            _ => case.clone().with_heads_divided(),
        };
        [other, case]
    })
}

/// Both passes of these.
fn both_passes(seed: u64) -> impl Iterator<Item = Request> {
    cases(seed).flat_map(|case| passes(&case))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(extent(300, 1500)))]

    /// Every message that one rank sends in a round, another receives in the same round, under a
    /// tag that no other message between the two has in that round.
    #[test]
    fn every_message_has_a_sender_and_a_receiver_in_the_same_round(seed in any::<u64>()) {
        for request in both_passes(seed) {
            let plan = Plan::new(request).expect("a random case is legal");
            let (mut sent, mut received) = (BTreeMap::new(), BTreeMap::new());
            for rank in 0..plan.ranks() {
                let program = plan.rank(rank).expect("the rank exists");
                for (number, round) in program.rounds.iter().enumerate() {
                    for message in &round.sends {
                        let Address { peer, tag, .. } = message.address;
                        let bytes = program.message_bytes(message);
                        let twice = sent.insert((number, rank, peer, tag), bytes);
                        prop_assert_eq!(twice, None, "two messages under one tag");
                    }
                    for message in &round.receives {
                        let Address { peer, tag, .. } = message.address;
                        let bytes = program.message_bytes(message);
                        received.insert((number, peer, rank, tag), bytes);
                    }
                }
            }
            prop_assert_eq!(sent, received);
        }
    }

    /// The totals of an explanation are sums over the programs, and the programs of all ranks
    /// together compute all pairs of the pattern.
    #[test]
    fn explained_totals_are_sums_over_the_programs(seed in any::<u64>()) {
        for request in both_passes(seed) {
            let plan = Plan::new(request).expect("a random case is legal");
            let explanation = plan.explain().expect("every rank exists");
            let ranks = &explanation.ranks;
            prop_assert_eq!(explanation.pairs, ranks.iter().map(|r| r.pairs).sum::<u128>());
            prop_assert_eq!(explanation.sent_bytes, ranks.iter().map(|r| r.sent_bytes).sum());
            let received: usize = ranks.iter().map(|rank| rank.received_bytes).sum();
            prop_assert_eq!(explanation.sent_bytes, received);
        }
    }

    /// No task touches a buffer that its round receives, or writes one that its round sends.
    #[test]
    fn no_task_touches_a_buffer_in_flight(seed in any::<u64>()) {
        for request in both_passes(seed) {
            let plan = Plan::new(request).expect("a random case is legal");
            for rank in 0..plan.ranks() {
                for round in plan.rank(rank).expect("the rank exists").rounds {
                    let of = |messages: &[_]| -> Vec<BufferId> {
                        let ids = messages.iter();
                        ids.map(|m: &encke_core::plan::program::Message| m.buffer).collect()
                    };
                    let (sends, receives) = (of(&round.sends), of(&round.receives));
                    prop_assert!(sends.iter().all(|id| !receives.contains(id)));
                    for task in &round.meanwhile {
                        let holds = task.holds();
                        prop_assert!(holds.iter().all(|id| !sends.contains(id)));
                        let mut used = holds;
                        if let Task::Forward { q, k, v, .. }
                            | Task::Conclude { q, k, v, .. }
                            | Task::Attend { q, k, v, .. } | Task::Backward { q, k, v, .. } = task
                        {
                            used.extend([*q, *k, *v]);
                        }
                        prop_assert!(used.iter().all(|id| !receives.contains(id)));
                    }
                }
            }
        }
    }
}

/// A job reads and writes one type: where branches keep separate slots, their results are not
/// rounded before they are combined, so they are finished in a task of their own.
#[test]
fn jobs_read_and_write_one_type() {
    let mix = Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Detached,
    };
    let pattern = Pattern::dilated(&[8, 24], &[1, 3], mix).expect("two branches");
    let shape = Shape::new(1, 48, 4, 2, 8).expect("sizes are positive");
    let mut jobs = 0;
    for (ranks, dtype) in [1, 2, 3]
        .into_iter()
        .flat_map(|p| DType::ALL.map(|d| (p, d)))
    {
        for queries in [Queries::Sharded, Queries::Replicated] {
            let sharding = Sharding::new(ranks, Cut::Contiguous).expect("ranks are positive");
            let request = Request::new(shape, pattern.clone(), sharding, dtype);
            for pass in [Pass::Forward, Pass::Backward { dlse: true }] {
                let request = Request {
                    pass,
                    queries,
                    ..request.clone()
                };
                let plan = Plan::new(request).expect("a legal request");
                for rank in 0..ranks {
                    let program = plan.rank(rank).expect("the rank exists");
                    let rounds = program.rounds.iter();
                    for task in rounds.flat_map(|of| of.before.iter().chain(&of.meanwhile)) {
                        let of_job = match task {
                            Task::Attend { out, .. } | Task::Conclude { out, .. } => *out,
                            Task::Backward { dout, .. } => *dout,
                            _ => continue,
                        };
                        assert_eq!(program.buffers[of_job.0].dtype, dtype, "{task:?}");
                        jobs += 1;
                    }
                }
            }
        }
    }
    assert!(jobs > 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(extent(40, 150)))]

    /// Every (query, key) pair of the pattern is computed once for each branch that contains it.
    /// Rows are labelled by token and head, so that a job that reads a wrong row computes a wrong
    /// pair.
    #[test]
    fn every_pair_is_computed_once_for_each_branch(seed in any::<u64>()) {
        for case in cases(seed) {
            let shape = Shape { dim: 1, value_dim: 1, ..case.request.shape };
            let case = Configuration { request: Request { shape, ..case.request }, seed };
            for request in passes(&case) {
                prop_assert_eq!(computed_pairs(&request), pattern_pairs(&request), "{:?}", request);
            }
        }
    }
}

type PairCounts = BTreeMap<(usize, usize, usize, usize), usize>;

/// (batch, head, query position, key token) of every pair of the pattern.
fn pattern_pairs(request: &Request) -> PairCounts {
    let shape = &request.shape;
    let mut pairs = PairCounts::new();
    for (b, h) in (0..shape.batch).flat_map(|b| (0..shape.heads).map(move |h| (b, h))) {
        for (q, k) in (request.positions()).flat_map(|q| (0..shape.tokens).map(move |k| (q, k))) {
            let count = request.pattern.multiplicity(shape, h, q, k);
            if count > 0 {
                pairs.insert((b, h, q, k), count);
            }
        }
    }
    pairs
}

/// (batch, head, query position, key token) of every pair that the ranks compute.
fn computed_pairs(request: &Request) -> PairCounts {
    let shape = request.shape;
    let labels = |rows: usize, heads: usize| {
        let dims = [shape.batch, rows, heads, 1];
        let values = (0..dims.iter().product::<usize>()).map(|i| i as f64);
        Tensor::from_data(Data::F64(values.collect()), dims).expect("sizes agree")
    };
    let pairs = Mutex::new(PairCounts::new());
    let kernel = InstrumentedKernel(|call: KernelCall<'_>| {
        let KernelCall::Attend { job, q, k } = call else {
            return Ok(());
        };
        let label = |data: Slice<'_>, at: usize| data.get(at) as usize;
        let mut pairs = pairs.lock().expect("no panic");
        for (b, s) in (0..job.batch).flat_map(|b| (0..job.segments).map(move |s| (b, s))) {
            for (h, i) in (0..job.heads).flat_map(|h| (0..job.queries).map(move |i| (h, i))) {
                for j in job.visible(i) {
                    let q = label(q, job.q.at(b, s, i, h));
                    let k = label(k, job.k.at(b, s, j, h));
                    let (head, kv_head) = (q % shape.heads, k % shape.kv_heads);
                    assert_eq!(shape.kv_head(head), kv_head, "a head read another's keys");
                    let (q, k) = (q / shape.heads, k / shape.kv_heads);
                    let batch = q / shape.queries;
                    assert_eq!(batch, k / shape.tokens, "batch entries were mixed");
                    let position = request.positions().start + q % shape.queries;
                    let pair = (batch, head, position, k % shape.tokens);
                    *pairs.entry(pair).or_default() += 1;
                }
            }
        }
        Ok(())
    });
    let ring = ThreadRing::new(kernel, DEADLINE);
    let q = labels(shape.queries, shape.heads);
    let kv = labels(shape.tokens, shape.kv_heads);
    let inputs = [
        (Role::Q, q.view()),
        (Role::K, kv.view()),
        (Role::V, kv.view()),
        (Role::Out, q.view()),
        (Role::Lse, q.view()),
        (Role::Dout, q.view()),
        (Role::Dlse, q.view()),
    ];
    ring.run(request, &inputs).expect("nothing fails");
    drop(ring);
    pairs.into_inner().expect("no panic")
}

fn group(segments: &[usize], dilations: &[usize]) -> Pattern {
    let mode = Mode::Group {
        scale: GroupScale::One,
    };
    Pattern::dilated(segments, dilations, mode).expect("sizes are positive")
}

fn request(tokens: usize, heads: usize, pattern: Pattern, ranks: usize, cut: Cut) -> Request {
    Request::new(
        Shape::new(1, tokens, heads, heads, 64).expect("sizes are positive"),
        pattern,
        Sharding::new(ranks, cut).expect("ranks are positive"),
        DType::F32,
    )
}

/// The tokens whose keys each rank sends to others, in rank order.
fn sent_tokens(request: Request) -> Vec<Vec<usize>> {
    let plan = Plan::new(request).expect("legal");
    let ring = &plan.rings()[0];
    let tokens = |(member, parcel): (&usize, &Option<_>)| {
        let parcel: &encke_core::plan::rings::Parcel = parcel.as_ref().expect("a parcel each");
        let rows = parcel.sections[0].rows;
        let first = plan.shards().runs(*member)[0].0.first;
        (0..rows.count)
            .map(|i| first + rows.row + i * rows.row_step)
            .collect()
    };
    ring.members.iter().zip(&ring.parcels).map(tokens).collect()
}

#[test]
fn the_worked_example_sends_the_expected_rows() {
    // Two heads in two groups; the second group has offset 1 in (8, 2).
    let pattern = || group(&[1, 8], &[1, 2]);
    let rows = |ranks, cut| sent_tokens(request(8, 2, pattern(), ranks, cut));
    assert_eq!(rows(2, Cut::Contiguous), [vec![1, 3], vec![5, 7]]);
    assert_eq!(rows(4, Cut::Contiguous), [[1], [3], [5], [7]]);
    assert_eq!(
        rows(3, Cut::Firsts(vec![0, 3, 6])),
        [vec![1], vec![3, 5], vec![7]]
    );
}

#[test]
fn segments_inside_a_chunk_send_nothing() {
    let pattern = group(&[2048, 4096, 8192], &[1, 2, 4]);
    let plan = Plan::new(request(64 * 1024, 8, pattern, 8, Cut::Contiguous)).expect("legal");
    let explanation = plan.explain().expect("every rank exists");
    assert_eq!(explanation.sent_bytes, 0);
    assert!(plan.rings().is_empty());
    // A dense ring would have sent 7 hops of all keys and values.
    assert_eq!(explanation.dense_ring_bytes, 7 * 2 * 64 * 1024 * 8 * 64 * 4);
}

#[test]
fn remote_branches_cost_the_same_for_any_length() {
    // One branch whose segment is the whole sequence, with constant w/r: each rank has 16 of its
    // rows.
    let sent = |tokens: usize| {
        let pattern = group(&[tokens / 8, tokens], &[1, tokens / 128]);
        let plan = Plan::new(request(tokens, 2, pattern, 8, Cut::Contiguous)).expect("legal");
        plan.explain().expect("every rank exists").sent_bytes
    };
    assert_eq!(sent(1 << 14), 7 * 2 * 128 * 64 * 4);
    assert_eq!(sent(1 << 14), sent(1 << 30));
}

#[test]
fn the_size_of_a_plan_does_not_grow_with_the_sequence() {
    for queries in [Queries::Sharded, Queries::Replicated] {
        for cut in [Cut::Contiguous, Cut::Zigzag, Cut::Striped] {
            let tasks = |tokens: usize| -> Vec<usize> {
                let pattern = group(&[1024, 4096], &[1, 4]).causal(true);
                let mut request = request(tokens, 4, pattern, 8, cut.clone());
                request.queries = queries;
                let plan = Plan::new(request).expect("legal");
                let rounds = |rank| plan.rank(rank).expect("the rank exists").rounds;
                let tasks = |rank| rounds(rank).iter().map(|r| r.meanwhile.len()).sum();
                (0..8).map(tasks).collect()
            };
            assert_eq!(tasks(1 << 16), tasks(1 << 30), "{cut:?}");
        }
    }
}

#[test]
fn messages_go_round_the_shorter_way() {
    // Under a causal mask no parcel goes past the last rank that needs it.
    let dense = Pattern::dense().causal(true);
    let plan = Plan::new(request(800, 1, dense, 8, Cut::Contiguous)).expect("legal");
    for (place, parcel) in plan.rings()[0].parcels.iter().enumerate() {
        let last = parcel.as_ref().map_or(0, |parcel| parcel.last);
        assert_eq!(last, 7 - place);
    }
    // The second halves of a zigzag are needed by lower ranks only, so they are sent to lower
    // ranks.
    let dense = Pattern::dense().causal(true);
    let plan = Plan::new(request(800, 1, dense, 8, Cut::Zigzag)).expect("legal");
    assert_eq!(
        plan.rings()
            .iter()
            .map(|ring| ring.rising)
            .collect::<Vec<_>>(),
        [true, false]
    );
}

/// Every message overlaps with a job, including the gradients that return to their owners last.
#[test]
fn every_message_of_a_dense_ring_overlaps_with_jobs() {
    let shape = Shape::new(1, 960, 2, 2, 8).unwrap();
    for (ranks, causal, cut) in [
        (2, false, Cut::Contiguous),
        (2, true, Cut::Zigzag),
        (3, true, Cut::Zigzag),
        (5, false, Cut::Contiguous),
    ] {
        let sharding = Sharding::new(ranks, cut).unwrap();
        let pattern = Pattern::dense().causal(causal);
        for (pass, backward) in [
            (Pass::Forward, Rotating::Keys),
            (Pass::Backward { dlse: false }, Rotating::Keys),
            (Pass::Backward { dlse: false }, Rotating::Queries),
        ] {
            let mut request = Request::new(shape, pattern.clone(), sharding.clone(), DType::F32);
            request.pass = pass;
            request.schedule.backward = backward;
            let plan = Plan::new(request).unwrap();
            for rank in 0..ranks {
                let program = plan.rank(rank).unwrap();
                for (number, round) in program.rounds.iter().enumerate() {
                    let travels = !round.sends.is_empty() || !round.receives.is_empty();
                    let computes = round.meanwhile.iter().any(|task| task.job().is_some());
                    assert!(
                        computes || !travels,
                        "{ranks} ranks, {pass:?}, {backward:?}: rank {rank}, round {number}"
                    );
                }
            }
        }
    }
}
