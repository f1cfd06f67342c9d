//! Measured memory: its exponent against the size of the ring, and that it equals the plan.

use encke_core::plan::program::Component;
use encke_core::plan::{Pass, Queries, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{DType, Mode, Pattern, Shape};
use encke_cpu::CpuKernel;
use encke_sim::profile::{
    MemorySource, ProfileInputs, RingProfile, component_exponent, total_exponent,
};

const RINGS: [usize; 6] = [1, 2, 4, 8, 16, 32];

/// Forward and backward profiles of all ring sizes.
fn profiles(
    shape: Shape,
    pattern: &Pattern,
    cut: &Cut,
    queries: Queries,
    dtype: DType,
) -> [Vec<RingProfile>; 2] {
    let mut both = [Vec::new(), Vec::new()];
    let request = |ranks: usize| {
        let sharding = Sharding::new(ranks, cut.clone()).expect("ranks are positive");
        let mut request = Request::new(shape, pattern.clone(), sharding, dtype);
        request.queries = queries;
        request
    };
    let inputs = ProfileInputs::random(&request(1), 7);
    for ranks in RINGS {
        // A kernel of its own, on one thread: with several, the scheduler decides how many take
        // part in a job, and with it how much scratch memory there is.
        let kernel = CpuKernel::new().expect("a kernel");
        let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build();
        let one_thread = one_thread.expect("a thread");
        let measured = one_thread.install(|| inputs.measure(&kernel, &request(ranks), true));
        let measured = measured.expect("a run");
        for (all, profile) in both.iter_mut().zip(measured) {
            all.push(profile);
        }
    }
    both
}

fn exponent(rings: &[RingProfile], component: Component) -> f64 {
    component_exponent(rings, component, MemorySource::Measured).expect("several sizes")
}

fn near(what: &str, exponent: f64, expected: f64) {
    assert!((exponent - expected).abs() <= 0.02, "{what}: {exponent}");
}

/// Every rank holds at most its planned bytes and at least 95 % of them, and the peak of its rounds
/// is the peak of the call.
fn check_planned(rings: &[RingProfile]) {
    for ring in rings {
        let (least, most) = ring.shares().expect("a run");
        let what = format!("{:?} on {} ranks", ring.pass, ring.ranks);
        assert!(most <= 1.0, "{what}: {most} of the planned bytes");
        assert!(least >= 0.95, "{what}: {least} of the planned bytes");
        for rank in &ring.of {
            let measured = rank.measured.as_ref().expect("a run");
            assert_eq!(measured.total.held_bytes(), 0, "{what}");
            let peaks = measured.rounds.iter().map(|round| round.peak_bytes);
            assert_eq!(peaks.max(), Some(measured.total.peak_bytes), "{what}");
            for (component, planned) in &rank.planned {
                let held = measured.total.peak.get(component).copied().unwrap_or(0);
                assert!(held <= *planned, "{what}: {component:?}");
            }
        }
    }
}

#[test]
fn all_components_scale_as_one_over_p() {
    let shape = Shape::new(1, 1024, 4, 2, 32).expect("sizes are positive");
    // In a ring of two under a causal mask, some keys are needed by no other rank, unless the cut
    // is striped: such rings are below the power law of larger ones.
    for (pattern, cut, from) in [
        (Pattern::dense(), Cut::Contiguous, 1),
        (Pattern::dense().causal(true), Cut::Striped, 1),
        (Pattern::dense().causal(true), Cut::Contiguous, 2),
        (Pattern::dense().causal(true), Cut::Zigzag, 2),
    ] {
        let [forward, backward] = profiles(shape, &pattern, &cut, Queries::Sharded, DType::F32);
        for component in [
            Component::Queries,
            Component::OwnKv,
            Component::Carry,
            Component::Output,
        ] {
            let what = format!("{cut:?}, {}", component.name());
            near(&what, exponent(&forward, component), -1.0);
        }
        for component in [
            Component::OwnKv,
            Component::Output,
            Component::Upstream,
            Component::Gradients,
        ] {
            let what = format!("backward, {cut:?}, {}", component.name());
            near(&what, exponent(&backward, component), -1.0);
        }
        for rings in [&forward, &backward] {
            let travelling = exponent(&rings[from..], Component::TravellingKv);
            near(&format!("{cut:?}, travelling K/V"), travelling, -1.0);
        }
        // In a ring of two no gradient is forwarded by a third rank, so it has fewer buffers.
        let travelling = exponent(&backward[2..], Component::TravellingGradients);
        near("travelling gradients", travelling, -1.0);
    }
}

#[test]
fn replicated_queries_are_constant_and_keys_scale_as_one_over_p() {
    let shape = Shape::new(1, 1024, 2, 1, 32).expect("sizes are positive");
    let dense = Pattern::dense().causal(true);
    let [forward, backward] = profiles(
        shape,
        &dense,
        &Cut::Contiguous,
        Queries::Replicated,
        DType::F32,
    );
    for rings in [&forward, &backward] {
        near("queries", exponent(rings, Component::Queries), 0.0);
        near("output", exponent(rings, Component::Output), 0.0);
        near("own K/V", exponent(rings, Component::OwnKv), -1.0);
        assert_eq!(
            rings[5].largest(Component::TravellingKv, MemorySource::Measured),
            Some(0)
        );
    }
}

#[test]
fn every_rank_holds_its_planned_bytes_and_no_more() {
    let group = Mode::Group {
        scale: encke_core::GroupScale::One,
    };
    let pattern = Pattern::dilated(&[128, 8192], &[1, 64], group).expect("sizes are positive");
    let shape = Shape::new(1, 8192, 8, 8, 64).expect("sizes are positive");
    for (queries, cut) in [
        (Queries::Sharded, Cut::Contiguous),
        (Queries::Replicated, Cut::Zigzag),
    ] {
        let pattern = pattern.clone().causal(true);
        let [forward, backward] = profiles(shape, &pattern, &cut, queries, DType::F32);
        check_planned(&forward);
        check_planned(&backward);
    }
}

/// Ranks of a short zigzag ring have blocks of different lengths, and a kernel's scratch memory
/// grows with the blocks.
#[test]
fn ranks_with_different_jobs_share_a_workspace() {
    let shape = Shape::new(1, 2048, 4, 4, 64).expect("sizes are positive");
    let pattern = Pattern::dense().causal(true);
    for dtype in [DType::F32, DType::Bf16] {
        let cut = Cut::Zigzag;
        let [forward, backward] = profiles(shape, &pattern, &cut, Queries::Sharded, dtype);
        check_planned(&forward);
        check_planned(&backward);
    }
}

#[test]
fn plans_of_rings_too_large_to_run_have_the_same_exponents() {
    let kernel = CpuKernel::new().expect("a kernel");
    let shape = Shape::new(1, 1 << 20, 4, 2, 64).expect("sizes are positive");
    let mut rings = Vec::new();
    for ranks in [4, 16, 64, 256] {
        let sharding = Sharding::contiguous(ranks).expect("ranks are positive");
        let mut request = Request::new(shape, Pattern::dense(), sharding, DType::Bf16);
        request.pass = Pass::Backward { dlse: false };
        rings.push(RingProfile::planned(&kernel, &request).expect("a plan"));
    }
    for component in [Component::OwnKv, Component::TravellingGradients] {
        let exponent = component_exponent(&rings, component, MemorySource::Planned);
        near(component.name(), exponent.expect("several sizes"), -1.0);
    }
    assert_eq!(total_exponent(&rings, MemorySource::Measured), None);
}
