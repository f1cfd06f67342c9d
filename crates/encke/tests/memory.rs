//! Peak memory of a call, measured by the allocator, against the planned bytes.

use encke::conformance::Random;
use encke::{Attention, Cut, DType, Kernel, Pattern, Queries, RankMemory, Report, Tensor};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Peak bytes that a call allocated, without the returned tensors that are not rank buffers.
fn measured<R>(call: impl FnOnce() -> R, returned: impl Fn(&R) -> usize) -> (R, usize) {
    ALLOCATOR.reset_peak_usage();
    let before = ALLOCATOR.current_usage();
    let result = call();
    let peak = ALLOCATOR.peak_usage() - before;
    let returned = returned(&result);
    (result, peak - returned)
}

fn bytes(tensors: &[&Tensor]) -> usize {
    tensors
        .iter()
        .map(|tensor| tensor.data().capacity_bytes())
        .sum()
}

/// Bytes allowed for a rank's program and thread beside its buffers.
const PROGRAM: usize = 256 * 1024;

/// Asserts that the measured peak is at most the planned bytes, and within 5 % of them.
fn check(what: &str, report: &Report, peak: usize) {
    // Borrowed inputs are the caller's and were allocated before.
    let own = |rank: &RankMemory| rank.planned_bytes() - rank.borrowed_bytes;
    let planned: usize = report.memory.iter().map(own).sum();
    assert!(
        peak <= planned + PROGRAM * report.memory.len(),
        "{what}: {peak} bytes, planned {planned}"
    );
    assert!(
        peak as f64 >= 0.95 * planned as f64,
        "{what}: {peak} bytes, planned {planned}"
    );
    for rank in &report.memory {
        assert!(rank.allocated_bytes <= own(rank));
    }
}

/// A single test, so that nothing else allocates at the same time.
#[test]
fn peak_memory_equals_the_planned_bytes() {
    let dims = [1, 8192, 8, 64];
    let mut random = Random::new(1);
    let mut tensor = || {
        let values: Vec<f64> = (0..dims.iter().product()).map(|_| random.unit()).collect();
        Tensor::from_f64(DType::F32, dims, &values).expect("sizes agree")
    };
    let (q, k, v, dout) = (tensor(), tensor(), tensor(), tensor());
    let (q, k, v, dout) = (q.view(), k.view(), v.view(), dout.view());
    let mode = encke::Mode::Group {
        scale: encke::GroupScale::One,
    };
    let cases = [
        (1, Cut::Contiguous, Queries::Sharded, vec![256], vec![1]),
        (4, Cut::Contiguous, Queries::Sharded, vec![8192], vec![16]),
        (
            4,
            Cut::Zigzag,
            Queries::Sharded,
            vec![512, 8192],
            vec![1, 32],
        ),
        (
            3,
            Cut::Striped,
            Queries::Replicated,
            vec![384, 8192],
            vec![1, 32],
        ),
        (
            8,
            Cut::Contiguous,
            Queries::Sharded,
            vec![700, 3000],
            vec![3, 11],
        ),
    ];
    for (ranks, cut, queries, segments, dilations) in cases {
        let pattern = Pattern::dilated(&segments, &dilations, mode).expect("sizes are positive");
        let what = format!("{ranks} ranks, {cut:?}, {queries:?}");
        let builder = Attention::builder()
            .pattern(pattern.causal(true))
            .ranks(ranks);
        let attention = builder
            .sharding(cut)
            .queries(queries)
            .build()
            .expect("legal");
        // One rank returns its own buffers; several ranks copy theirs into one tensor.
        let copied = usize::from(ranks > 1);
        let (forward, peak) = measured(
            || attention.forward(&q, &k, &v).expect("legal"),
            |forward| copied * bytes(&[&forward.out, &forward.lse]),
        );
        check(&format!("forward, {what}"), &forward.report, peak);
        // The workspace of the forward pass must not count for the backward pass.
        attention.kernel().release_scratch();
        let (backward, peak) = measured(
            || {
                let checkpoint = &forward.checkpoint;
                attention
                    .backward(&q, &k, &v, checkpoint, &dout, None)
                    .expect("legal")
            },
            |backward| copied * bytes(&[&backward.dq, &backward.dk, &backward.dv]),
        );
        check(&format!("backward, {what}"), &backward.report, peak);
        // Another call allocates almost nothing: it reuses the buffers of the first and the
        // workspace.
        let _kept = attention.forward(&q, &k, &v).expect("legal");
        let (again, peak) = measured(
            || attention.forward(&q, &k, &v).expect("legal"),
            |forward| bytes(&[&forward.out, &forward.lse]),
        );
        assert_eq!(again.out, forward.out);
        assert!(
            peak < PROGRAM * ranks,
            "{what}: another call took {peak} bytes"
        );
    }
}
