//! The ledger against the allocator: the bytes it has recorded are the bytes that were allocated.

use std::sync::Arc;

use encke_core::plan::program::Component;
use encke_core::plan::{Pass, Plan, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{DType, Pattern, Shape, Tensor};
use encke_cpu::CpuKernel;
use encke_ring::{Outcome, call};
use encke_sim::lockstep;
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// What a rank's program and its trace may take beside its buffers, at any size.
const PROGRAM: usize = 128 * 1024;

/// The only test of this binary, so that nothing else allocates meanwhile.
#[test]
fn the_ledger_has_the_bytes_that_were_allocated() {
    let shape = Shape::new(1, 2048, 8, 4, 64).expect("sizes are positive");
    let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build();
    let one_thread = one_thread.expect("a thread");
    // Rings of more than one rank copy their outputs out, so the returned tensors are not in the
    // ledger.
    for ranks in [2, 4] {
        for pass in [Pass::Forward, Pass::Backward { dlse: false }] {
            let sharding = Sharding::new(ranks, Cut::Contiguous).expect("ranks are positive");
            let mut request = Request::new(shape, Pattern::dense(), sharding, DType::Bf16);
            request.pass = pass;
            let plan = Arc::new(Plan::new(request).expect("a plan"));
            let tensors = call::inputs(&plan).into_iter();
            let tensors: Vec<_> = tensors
                .map(|(role, _, dims)| (role, Tensor::zeros(DType::Bf16, dims)))
                .collect();
            let inputs: Vec<_> = tensors.iter().map(|(r, t)| (*r, t.view())).collect();
            let kernel = CpuKernel::new().expect("a kernel");

            ALLOCATOR.reset_peak_usage();
            let before = ALLOCATOR.current_usage();
            let outcome = one_thread.install(|| lockstep::run(&kernel, &plan, &inputs));
            let outcome = outcome.expect("a run");
            let peak = ALLOCATOR.peak_usage() - before - returned(&outcome);

            let what = format!("{ranks} ranks, {pass:?}");
            let recorded = recorded(&outcome);
            assert!(
                peak >= recorded,
                "{what}: {peak} bytes, {recorded} recorded"
            );
            assert!(
                peak <= recorded + recorded / 20 + PROGRAM * ranks,
                "{what}: {peak} bytes, {recorded} recorded"
            );
        }
    }
}

/// The bytes of all ranks' buffers, and of the one workspace that they shared here.
fn recorded(outcome: &Outcome) -> usize {
    let peaks = outcome.memory.iter().map(|memory| memory.ledger.total());
    let (mut buffers, mut workspace) = (0, 0);
    for total in peaks {
        let scratch = total.peak.get(&Component::Workspace).copied().unwrap_or(0);
        buffers += total.peak_bytes - scratch;
        workspace = scratch.max(workspace);
    }
    buffers + workspace
}

fn returned(outcome: &Outcome) -> usize {
    let tensors = outcome.tensors().iter();
    tensors
        .map(|(_, tensor)| tensor.data().capacity_bytes())
        .sum()
}
