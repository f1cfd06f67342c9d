//! One rank with its shard, the others elsewhere: the same bits as all ranks on whole tensors.

use encke_core::conformance::extent;
use std::thread;

use proptest::prelude::*;

use encke_core::dtype::{DType, Data};
use encke_core::naive::NaiveKernel;
use encke_core::plan::program::Role;
use encke_core::plan::resize::Resize;
use encke_core::plan::{Pass, Queries, Request};
use encke_core::sharding::Sharding;
use encke_core::tensor::{Tensor, View};
use encke_core::transport::{Incoming, Moved, Outgoing, Transport, TransportError};
use encke_core::{Error, Pattern, Shape};
use encke_ring::threads::endpoints;
use encke_ring::{
    RankError, RingError, RowPositions, ShardRing, Sharded, ThreadRing, split_sequence,
};

use crate::resize::tensor;
use crate::support::{CallTensors, Configuration, DEADLINE, run};

/// Runs a request on one `ShardRing` for each rank, and gathers the results.
fn run_apart(
    rings: &[ShardRing<NaiveKernel>],
    request: &Request,
    inputs: &[(Role, &Tensor)],
) -> Result<Vec<Tensor>, RingError> {
    let cut = |role, tensor| shard(role, tensor, request).into_shards();
    let shards: Vec<(Role, Vec<Tensor>)> = inputs.iter().map(|(r, t)| (*r, cut(*r, t))).collect();
    let endpoints = endpoints(rings.len(), DEADLINE);
    let outcomes: Result<Vec<_>, RingError> = thread::scope(|scope| {
        let shards = &shards;
        let started = rings.iter().zip(endpoints).map(|(ring, mut endpoint)| {
            scope.spawn(move || {
                let own = shards
                    .iter()
                    .map(|(role, of)| (*role, of[ring.rank()].view()));
                ring.run(request, &own.collect::<Vec<_>>(), &mut endpoint)
            })
        });
        let started: Vec<_> = started.collect();
        started.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let mut outcomes = outcomes?;
    let roles: &[Role] = match request.pass {
        Pass::Forward => &[Role::Out, Role::Lse],
        Pass::Backward { .. } | Pass::BackwardByBranch => &[Role::Dq, Role::Dk, Role::Dv],
    };
    let whole = |role: &Role| {
        let shards = outcomes
            .iter_mut()
            .map(|outcome| outcome.take(*role).unwrap());
        let (shards, positions) = (shards.collect(), positions(*role, request));
        let whole = Sharded::from_shards_at(shards, &request.sharding, positions);
        whole.unwrap().gather().unwrap()
    };
    Ok(roles.iter().map(whole).collect())
}

/// Which tokens the rows of a tensor of a call are.
fn positions(role: Role, request: &Request) -> RowPositions {
    let (tokens, queries) = (request.shape.tokens, request.positions());
    match role {
        Role::K | Role::V | Role::Dk | Role::Dv => RowPositions::all(tokens),
        _ => RowPositions::queries(tokens, queries.start, queries.len()).unwrap(),
    }
}

/// A tensor of a call in its shards.
fn shard(role: Role, tensor: &Tensor, request: &Request) -> Sharded {
    let sharded = match role {
        Role::K | Role::V => Sharded::split(&tensor.view(), &request.sharding),
        _ => {
            let (tokens, first) = (request.shape.tokens, request.positions().start);
            Sharded::split_queries(&tensor.view(), &request.sharding, tokens, first)
        }
    };
    sharded.unwrap()
}

/// A configuration whose ranks hold their own queries. In some there are fewer queries than keys,
/// and ranks without any.
fn sharded(seed: u64) -> Configuration {
    let mut case = Configuration::any(seed);
    case.request.queries = Queries::Sharded;
    case
}

fn rings(request: &Request) -> Vec<ShardRing<NaiveKernel>> {
    let ranks = 0..request.sharding.ranks();
    ranks
        .map(|rank| ShardRing::new(NaiveKernel, rank))
        .collect()
}

fn check(seed: u64) -> Result<(), TestCaseError> {
    let case = sharded(seed);
    let together = run(&ThreadRing::new(NaiveKernel, DEADLINE), &case);
    let together = together.map_err(TestCaseError::fail)?;
    let tensors = CallTensors::random(&case.request.shape, case.seed);
    let CallTensors { q, k, v, .. } = &tensors;
    let forward = vec![(Role::Q, q), (Role::K, k), (Role::V, v)];
    let rings = rings(&case.request);
    let mut backward = forward.clone();
    backward.extend([
        (Role::Out, &together.out),
        (Role::Lse, &together.lse),
        (Role::Dout, &tensors.dout),
        (Role::Dlse, &tensors.dlse),
    ]);
    let request = Request {
        pass: Pass::Backward { dlse: true },
        ..case.request.clone()
    };
    // The second time every ring reuses its buffers.
    for _ in 0..2 {
        let got = run_apart(&rings, &case.request, &forward).unwrap();
        prop_assert_eq!(got, [together.out.clone(), together.lse.clone()]);
        let got = run_apart(&rings, &request, &backward).unwrap();
        let expected = [&together.dq, &together.dk, &together.dv].map(Tensor::clone);
        prop_assert_eq!(got, expected);
    }
    prop_assert!(rings.iter().all(|ring| ring.stats().buffer_hits == 2));
    let ring = ThreadRing::new(NaiveKernel, DEADLINE);
    for (request, inputs, roles) in [
        (&case.request, &forward, &[Role::Out, Role::Lse][..]),
        (&request, &backward, &[Role::Dq, Role::Dk, Role::Dv]),
    ] {
        let shards: Vec<_> = inputs
            .iter()
            .map(|(role, of)| (*role, shard(*role, of, request)))
            .collect();
        let shards: Vec<_> = shards.iter().map(|(role, of)| (*role, of)).collect();
        let mut got = ring.run_shards(request, &shards).unwrap();
        let whole = ring.run(request, &views(inputs)).unwrap();
        for role in roles {
            let got = got.take(*role).unwrap();
            prop_assert_eq!(got.positions(), &positions(*role, request));
            let whole = whole.tensors().iter().find(|(of, _)| of == role);
            prop_assert_eq!(&got.gather().unwrap(), &whole.unwrap().1);
        }
    }
    Ok(())
}

fn views<'a>(tensors: &[(Role, &'a Tensor)]) -> Vec<(Role, View<'a>)> {
    let views = tensors.iter().map(|(role, of)| (*role, of.view()));
    views.collect()
}

#[test]
fn ranks_without_queries_are_among_the_configurations() {
    let idle = |seed: &u64| {
        let Request {
            sharding, shape, ..
        } = &sharded(*seed).request;
        let request = &sharded(*seed).request;
        (0..sharding.ranks()).any(|rank| {
            let rows = sharding.rows(shape.tokens, rank);
            rows > 0 && request.query_runs(rank).is_empty()
        })
    };
    assert!((0..40).filter(idle).count() > 2);
}

#[test]
fn queries_sharded_for_another_offset_are_refused() {
    let shape = Shape::new(1, 20, 2, 1, 3).unwrap().with_queries(5).unwrap();
    let sharding = Sharding::contiguous(3).unwrap();
    let pattern = Pattern::dense().query_offset(Some(4));
    let request = Request::new(shape, pattern, sharding.clone(), DType::F64);
    let CallTensors { q, k, v, .. } = CallTensors::random(&shape, 3);
    let [k, v] = [k, v].map(|tensor| Sharded::split(&tensor.view(), &sharding).unwrap());
    let ring = ThreadRing::new(NaiveKernel, DEADLINE);
    let run = |first: usize| {
        let q = Sharded::split_queries(&q.view(), &sharding, 20, first).unwrap();
        let inputs = [(Role::Q, &q), (Role::K, &k), (Role::V, &v)];
        ring.run_shards(&request, &inputs).map(drop)
    };
    assert!(run(4).is_ok());
    assert!(matches!(
        run(5),
        Err(RingError::Positions { tensor: "q", .. })
    ));
    let beyond = Sharded::split_queries(&q.view(), &sharding, 20, 16);
    assert!(matches!(beyond, Err(Error::QueryOffset { .. })));
    let resized = Resize::new(&sharding, &Sharding::contiguous(2).unwrap(), 20).unwrap();
    let queries = Sharded::split_queries(&q.view(), &sharding, 20, 4).unwrap();
    let refused = ring.resize(&resized, &[&queries]).map(drop).unwrap_err();
    assert!(
        refused.to_string().starts_with("5 queries for 20 keys"),
        "{refused}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(extent(40, 150)))]

    #[test]
    fn separate_shards_have_the_bits_of_a_thread_ring(seed in any::<u64>()) {
        check(seed)?;
    }
}

/// A transport that always fails.
struct FailingTransport;

impl Transport<Data> for FailingTransport {
    fn exchange(
        &mut self,
        round: usize,
        _: &[Outgoing<'_, Data>],
        _: &mut [Incoming<'_, Data>],
        _: &mut dyn FnMut(),
    ) -> Result<Moved, TransportError> {
        let reason = "cut".to_string();
        Err(TransportError::Local {
            rank: 0,
            round,
            reason,
        })
    }
}

#[test]
fn a_failed_transport_is_an_error_of_the_rank_and_its_buffers_are_not_reused() {
    let case = sharded(3);
    let CallTensors { q, k, v, .. } = CallTensors::random(&case.request.shape, 3);
    let own = |role, tensor| shard(role, tensor, &case.request).shard(0).clone();
    let [q, k, v] = [own(Role::Q, &q), own(Role::K, &k), own(Role::V, &v)];
    let inputs = [
        (Role::Q, q.view()),
        (Role::K, k.view()),
        (Role::V, v.view()),
    ];
    let ring = ShardRing::new(NaiveKernel, 0);
    for _ in 0..2 {
        let error = ring
            .run(&case.request, &inputs, &mut FailingTransport)
            .unwrap_err();
        let RingError::Rank {
            rank: 0, source, ..
        } = error
        else {
            panic!("{error}");
        };
        assert!(matches!(
            source,
            RankError::Transport(TransportError::Local { .. })
        ));
    }
    assert_eq!(ring.stats().buffer_hits, 0);
}

#[test]
fn requests_that_need_other_ranks_rows_are_refused() {
    let case = sharded(3);
    let ring = ShardRing::new(NaiveKernel, 0);
    for request in [
        Request {
            queries: Queries::Replicated,
            ..case.request.clone()
        },
        Request {
            redundancy: 1,
            ..case.request.clone()
        },
    ] {
        let refused = ring.run(&request, &[], &mut FailingTransport);
        assert!(matches!(refused, Err(RingError::Elsewhere { .. })));
    }
    // A tensor of the whole sequence is not a shard.
    let CallTensors { q, k, v, .. } = CallTensors::random(&case.request.shape, 3);
    let whole = [
        (Role::Q, q.view()),
        (Role::K, k.view()),
        (Role::V, v.view()),
    ];
    let refused = ring.run(&case.request, &whole, &mut FailingTransport);
    let ranks = case.request.sharding.ranks();
    assert!(
        ranks > 1 && matches!(refused, Err(RingError::Request(_))),
        "{ranks} ranks"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(extent(15, 50)))]

    #[test]
    fn separate_places_resize_to_the_shards_of_the_new_ring(
        (old, new, tokens) in (1usize..5, 1usize..5, 1usize..40),
        seed in any::<u64>(),
    ) {
        let (from, to) = (Sharding::contiguous(old).unwrap(), Sharding::contiguous(new).unwrap());
        let resize = Resize::new(&from, &to, tokens).unwrap();
        let dims = [2, tokens, 3, 2];
        let whole = tensor(seed, dims, DType::F32);
        let before = split_sequence(&whole.view(), &from).unwrap();
        let after = split_sequence(&whole.view(), &to).unwrap();
        let places = endpoints(resize.place_count(), DEADLINE).into_iter().enumerate();
        thread::scope(|scope| {
            for (place, mut endpoint) in places {
                let (resize, before, after) = (&resize, &before, &after);
                scope.spawn(move || {
                    let ring = ShardRing::new(NaiveKernel, place);
                    let shards: Vec<_> = before.get(place).map(Tensor::view).into_iter().collect();
                    let tensors = [(dims, DType::F32)];
                    let got = ring.resize(resize, &tensors, &shards, &mut endpoint).unwrap();
                    let expected = resize.new_rank(place).map(|rank| after[rank].clone());
                    assert_eq!(got, expected.into_iter().collect::<Vec<_>>());
                });
            }
        });
    }
}
