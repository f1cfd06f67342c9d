//! Heads × sequence: results are those of the reference, heads are divided with their keys, and
//! what is sent and held is known.

use encke_core::conformance::extent;
use proptest::prelude::*;

use encke_core::naive::NaiveKernel;
use encke_core::plan::program::Component;
use encke_core::plan::{Pass, Plan, Queries, Request, Schedule};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{DType, Dropout, Error, Pattern, Shape};
use encke_ring::ThreadRing;

use crate::support::{Configuration, DEADLINE, check};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(extent(60, 300)))]

    #[test]
    fn divided_heads_equal_the_reference(seed in any::<u64>()) {
        let ring = ThreadRing::new(NaiveKernel, DEADLINE);
        for case in [Configuration::random(seed), Configuration::masked(seed)] {
            check(&ring, &case.with_heads_divided()).map_err(TestCaseError::fail)?;
        }
    }
}

/// Ranks of 16 tokens, `kv_heads` key heads with two query heads each, of 4 elements.
fn dense(ranks: usize, group: usize, kv_heads: usize, pass: Pass) -> Request {
    let request = Request::new(
        Shape::new(1, 16 * ranks, 2 * kv_heads, kv_heads, 4).expect("sizes are positive"),
        Pattern::dense(),
        Sharding::new(ranks, Cut::Contiguous).expect("ranks are positive"),
        DType::F32,
    );
    Request {
        pass,
        schedule: Schedule::RING.with_heads(group),
        ..request
    }
}

/// Bytes that a rank sends inside its group and to other groups.
fn sent(plan: &Plan, rank: usize, group: usize) -> [usize; 2] {
    let program = plan.rank(rank).expect("the rank exists");
    let mut sent = [0; 2];
    for (peer, bytes) in program.sent_bytes() {
        sent[usize::from(peer / group != rank / group)] += bytes;
    }
    sent
}

#[test]
fn bytes_inside_and_between_groups() {
    // q and out of 16 tokens, 8 heads of 4 elements, 4 bytes each; k and v of half as many heads.
    let plan = Plan::new(dense(8, 4, 4, Pass::Forward)).expect("legal");
    let q = 16 * 8 * 4 * 4;
    let (kv, lse) = (q, 16 * 8 * 4);
    for rank in 0..8 {
        // Three quarters of everything change ranks; of 2 groups, each rank sends its share of the
        // group's keys to the other one.
        let inside = (q + kv + q + lse) * 3 / 4;
        assert_eq!(sent(&plan, rank, 4), [inside, kv], "rank {rank}");
    }
    let words = plan.explain().expect("every rank exists").to_string();
    assert!(
        words.contains("groups of 4 ranks exchange heads"),
        "{words}"
    );
    assert!(words.contains("ring of ranks 1, 5"), "{words}");
    let memory = plan.rank(0).expect("it exists").memory();
    // What is sent and what arrives of the inputs; results use the same buffers.
    assert_eq!(memory[&Component::Sharing], (q + kv) * 7 / 4);
}

#[test]
fn key_heads_are_divided_unevenly_with_their_readers() {
    let plan = Plan::new(dense(4, 2, 3, Pass::Forward)).expect("legal");
    let heads = |rank: usize| {
        let program = plan.rank(rank).expect("the rank exists");
        program.jobs().map(|job| job.heads).max()
    };
    // One key head with two readers, and two with four.
    assert_eq!(
        [0, 1, 2, 3].map(heads),
        [Some(2), Some(4), Some(2), Some(4)]
    );
}

#[test]
fn what_divided_heads_do_not_do_is_refused() {
    let refused = |change: &dyn Fn(&mut Request)| {
        let mut request = dense(8, 4, 4, Pass::Forward);
        change(&mut request);
        match Plan::new(request).map(|_| ()) {
            Err(Error::HeadsOption { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    };
    let queries = |of: &mut Request| of.queries = Queries::Replicated;
    assert_eq!(refused(&queries), "replicated queries");
    assert_eq!(
        refused(&|of| of.schedule.width = 2),
        "rounds of several distances"
    );
    assert_eq!(refused(&|of| of.schedule.node = 2), "rings of two levels");
    assert_eq!(refused(&|of| of.redundancy = 1), "redundancy");
    let dropout = |of: &mut Request| of.dropout = Dropout::new(0.1, 1).ok();
    assert!(refused(&dropout).starts_with("dropout"));
    let striped = |of: &mut Request| {
        of.sharding = Sharding::new(8, Cut::Striped).expect("ranks are positive");
    };
    assert_eq!(refused(&striped), "striped shards");
    let three = |of: &mut Request| of.schedule.heads = 3;
    assert_eq!(refused(&three), "groups that the ranks do not fill");
    let eight = |of: &mut Request| of.schedule.heads = 8;
    assert_eq!(refused(&eight), "groups of more ranks than key heads");
}
