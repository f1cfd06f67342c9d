//! Plans of masked patterns: what travels is what a window, a prefix or a document shows, and a
//! packed call equals separate calls.

use encke_core::plan::program::Role;
use encke_core::plan::{Pass, Plan, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{DType, Documents, Pattern, Shape, Tensor, Window};
use encke_cpu::CpuKernel;
use encke_ring::ThreadRing;

use crate::support::{CallTensors, DEADLINE};

const HEADS: usize = 2;
const DIM: usize = 16;
/// Bytes of one row of k and v in f32.
const ROW: usize = 2 * HEADS * DIM * 4;

fn sliding(left: usize) -> Pattern {
    Pattern::dense().causal(true).window(Window {
        left: Some(left),
        right: None,
    })
}

fn plan(tokens: usize, pattern: Pattern, ranks: usize, cut: Cut) -> Plan {
    let shape = Shape::new(1, tokens, HEADS, HEADS, DIM).unwrap();
    let sharding = Sharding::new(ranks, cut).unwrap();
    Plan::new(Request::new(shape, pattern, sharding, DType::F32)).unwrap()
}

fn sent(plan: &Plan) -> usize {
    plan.explain().unwrap().sent_bytes
}

#[test]
fn a_window_sends_its_halo_and_nothing_else() {
    let (tokens, ranks) = (1 << 20, 8);
    let shard = tokens / ranks;
    for left in [1, 100, 4095, shard - 1, shard, shard + 5, 3 * shard + 7] {
        let plan = plan(tokens, sliding(left), ranks, Cut::Contiguous);
        // Rank a sends the last rows of its shard to each later rank whose first query sees them.
        let mut rows = 0;
        for (from, to) in (0..ranks).flat_map(|a| (a + 1..ranks).map(move |b| (a, b))) {
            let first_query = to * shard;
            let seen_from = first_query.saturating_sub(left);
            rows += ((from + 1) * shard).saturating_sub(seen_from.max(from * shard));
        }
        assert_eq!(sent(&plan), rows * ROW, "a window of {left} before");
    }
    let dense = plan(
        tokens,
        Pattern::dense().causal(true),
        ranks,
        Cut::Contiguous,
    );
    let halo = plan(tokens, sliding(4095), ranks, Cut::Contiguous);
    assert!(100 * sent(&halo) <= sent(&dense));
}

#[test]
fn a_window_on_both_sides_sends_both_halos() {
    let window = Window {
        left: Some(9),
        right: Some(5),
    };
    let plan = plan(4000, Pattern::dense().window(window), 4, Cut::Contiguous);
    assert_eq!(sent(&plan), 3 * (9 + 5) * ROW);
    assert!(plan.rings().iter().all(|ring| ring.max_distance() == 1));
}

#[test]
fn a_prefix_goes_once_to_every_rank_that_needs_it() {
    let with = plan(4000, sliding(9).prefix(4), 4, Cut::Contiguous);
    let without = plan(4000, sliding(9), 4, Cut::Contiguous);
    assert_eq!(sent(&with) - sent(&without), 3 * 4 * ROW);
}

#[test]
fn documents_inside_shards_send_nothing() {
    let packed = |lengths: &[usize]| {
        let documents = Documents::new(lengths).unwrap();
        Pattern::dense().documents(Some(documents))
    };
    let inside = plan(
        64,
        packed(&[16, 7, 9, 32]),
        4,
        Cut::Firsts(vec![0, 16, 32, 48]),
    );
    // Only the last document is longer than a shard: two ranks exchange their halves.
    assert_eq!(sent(&inside), 2 * 16 * ROW);
    let none = plan(64, packed(&[16, 7, 9, 16, 16]), 4, Cut::Contiguous);
    assert_eq!(sent(&none), 0);
    assert!(none.rings().is_empty());
}

/// Jobs, documents in them, and rings of all ranks.
fn size(plan: &Plan) -> (usize, usize, usize) {
    let (mut jobs, mut pieces) = (0, 0);
    for rank in 0..plan.ranks() {
        for job in plan.rank(rank).unwrap().jobs() {
            jobs += 1;
            if let Some(encke_core::job::Mask::Documents(of)) = &job.mask {
                pieces += of.len();
            }
        }
    }
    (jobs, pieces, plan.rings().len())
}

/// Every rank shares every document of striped shards.
#[test]
fn striped_shards_of_many_documents_are_refused() {
    let plan = |documents: usize, cut: Cut| {
        let shape = Shape::new(1, 100 * documents, HEADS, HEADS, DIM).unwrap();
        let documents = Documents::new(&vec![100; documents]).unwrap();
        let pattern = Pattern::dense().documents(Some(documents));
        let sharding = Sharding::new(64, cut).unwrap();
        Plan::new(Request::new(shape, pattern, sharding, DType::F32))
    };
    assert!(plan(2, Cut::Striped).is_ok());
    let said = plan(1000, Cut::Striped).map(drop).unwrap_err().to_string();
    assert!(
        said.contains("share a document in striped shards"),
        "{said}"
    );
    assert!(plan(1000, Cut::Zigzag).is_ok());
}

#[test]
fn a_plan_grows_with_documents_and_ranks_and_not_with_tokens() {
    let (documents, ranks) = (100_000, 64);
    let of = |scale: usize| {
        let lengths: Vec<usize> = (0..documents)
            .map(|i| (1 + i * 7919 % 401) * scale)
            .collect();
        let tokens = lengths.iter().sum();
        let pattern = Pattern::dense().causal(true);
        let pattern = pattern.documents(Some(Documents::new(&lengths).unwrap()));
        size(&plan(tokens, pattern, ranks, Cut::Contiguous))
    };
    let (jobs, pieces, rings) = of(1);
    // A job for all documents of a rank, and one for each document that crosses a border.
    assert!(
        jobs <= 3 * ranks && rings < ranks,
        "{jobs} jobs, {rings} rings"
    );
    assert!(pieces <= documents + ranks);
    assert_eq!(of(1000), (jobs, pieces, rings));
}

/// Forward and backward of a call on one rank.
fn run(shape: Shape, pattern: Pattern, tensors: &[Tensor; 4]) -> Vec<Tensor> {
    let ring = ThreadRing::new(CpuKernel::new().unwrap(), DEADLINE);
    let sharding = Sharding::contiguous(1).unwrap();
    let request = Request::new(shape, pattern, sharding, DType::F32);
    let [q, k, v, dout] = tensors.each_ref().map(Tensor::view);
    let inputs = [(Role::Q, q), (Role::K, k), (Role::V, v)];
    let mut forward = ring.run(&request, &inputs).unwrap();
    let (out, lse) = (
        forward.take(Role::Out).unwrap(),
        forward.take(Role::Lse).unwrap(),
    );
    let request = Request {
        pass: Pass::Backward { dlse: false },
        ..request
    };
    let more = [
        (Role::Out, out.view()),
        (Role::Lse, lse.view()),
        (Role::Dout, dout),
    ];
    let inputs: Vec<_> = inputs.into_iter().chain(more).collect();
    let mut backward = ring.run(&request, &inputs).unwrap();
    let gradients = [Role::Dq, Role::Dk, Role::Dv].map(|role| backward.take(role).unwrap());
    [out, lse].into_iter().chain(gradients).collect()
}

/// Rows `tokens` of a tensor of one batch entry.
fn rows(tensor: &Tensor, tokens: std::ops::Range<usize>) -> Tensor {
    let [_, _, heads, dim] = tensor.dims();
    let all = tensor.to_f64();
    let part = &all[tokens.start * heads * dim..tokens.end * heads * dim];
    let dims = [1, tokens.len(), heads, dim];
    Tensor::from_f64(tensor.dtype(), dims, part).unwrap()
}

#[test]
fn a_packed_call_has_the_bits_of_separate_calls() {
    let lengths = [1, 300, 77, 3, 130, 48, 49, 512];
    let tokens = lengths.iter().sum();
    let shape = |tokens| Shape::new(1, tokens, 4, 2, 32).unwrap();
    let drawn = CallTensors::random(&shape(tokens), 5);
    let tensors = [&drawn.q, &drawn.k, &drawn.v, &drawn.dout]
        .map(|of| Tensor::from_f64(DType::F32, of.dims(), &of.to_f64()).unwrap());
    let documents = Documents::new(&lengths).unwrap();
    for pattern in [
        Pattern::dense(),
        Pattern::dense().causal(true),
        sliding(40).prefix(3),
    ] {
        let packed = pattern.clone().documents(Some(documents.clone()));
        let packed = run(shape(tokens), packed, &tensors);
        for document in documents.ranges() {
            let alone = tensors.each_ref().map(|of| rows(of, document.clone()));
            let alone = run(shape(document.len()), pattern.clone(), &alone);
            for (name, (packed, alone)) in ["out", "lse", "dq", "dk", "dv"]
                .iter()
                .zip(packed.iter().zip(&alone))
            {
                let same = rows(packed, document.clone()).data().bytes() == alone.data().bytes();
                assert!(same, "{name} of {document:?} under {pattern:?}");
            }
        }
    }
}
