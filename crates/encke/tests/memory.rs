//! Memory, measured by the allocator: what a call really takes against what the plan says.

use encke::conformance::Random;
use encke::{Attention, Cut, DType, Kernel, Pattern, Queries, RankMemory, Report, Tensor};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// What a call took at its peak beyond what was there before, without what it returned beside the
/// buffers of its ranks.
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

/// What a rank's program and its thread may take beside its buffers, whatever their size.
const PROGRAM: usize = 256 * 1024;

/// The measured peak is at most what the plan says, and within 5 % of it.
fn check(what: &str, report: &Report, peak: usize) {
    // What is lent is the caller's own and was there before.
    let own = |rank: &RankMemory| rank.planned_bytes() - rank.lent_bytes;
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

/// One test, so that nothing else allocates meanwhile.
#[test]
fn a_call_takes_what_the_plan_says() {
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
        // One rank gives its own buffers away; several copy theirs together.
        let copied = usize::from(ranks > 1);
        let (forward, peak) = measured(
            || attention.forward(&q, &k, &v).expect("legal"),
            |forward| copied * bytes(&[&forward.out, &forward.lse]),
        );
        check(&format!("forward, {what}"), &forward.report, peak);
        // What is left of the forward pass is no part of the next one.
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
        // Another call takes next to nothing: its buffers are those of the first, and its scratch
        // memory is that of whoever needed most since it was given back.
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
