//! Lockstep against a ring of threads: the same bits, the same bytes sent, and the planned memory.

use std::time::Duration;

use proptest::prelude::*;

use encke_core::DType;
use encke_core::conformance::{Configuration, extent};
use encke_core::kernel::Kernel;
use encke_core::naive::NaiveKernel;
use encke_core::plan::program::Role;
use encke_cpu::CpuKernel;
use encke_ring::{RingError, ThreadRing};
use encke_sim::lockstep;
use encke_sim::random_call::RandomCall;

use crate::support::{bits, with_slots};

const DEADLINE: Duration = Duration::from_secs(60);

fn check_same<K: Kernel>(
    ring: &ThreadRing<K>,
    configuration: &Configuration,
) -> Result<(), String> {
    for backward in [false, true] {
        let call = RandomCall::new(configuration, backward).expect("legal");
        let threads = ring.run(call.plan.request(), &call.inputs());
        let threads = threads.map_err(|error| error.to_string())?;
        let stepped = lockstep::run(ring.kernel(), &call.plan, &call.inputs());
        let stepped = stepped.map_err(|error| error.to_string())?;
        if bits(threads.tensors()) != bits(stepped.tensors()) {
            return Err(format!(
                "bits differ, backward {backward}: {configuration:?}"
            ));
        }
        let planned = call.plan.explain().map_err(|error| error.to_string())?;
        if stepped.trace.sent_bytes() != planned.sent_bytes {
            return Err(format!("bytes differ: {configuration:?}"));
        }
        for memory in &stepped.memory {
            let total = memory.ledger.total();
            if total.peak_bytes != memory.planned_bytes() || total.held_bytes() != 0 {
                return Err(format!(
                    "ledger and plan differ: {total:?}, {configuration:?}"
                ));
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(extent(50, 250)))]

    #[test]
    fn lockstep_has_the_bits_of_threads(seed in any::<u64>()) {
        let ring = ThreadRing::new(NaiveKernel, DEADLINE);
        let configuration = Configuration::any(seed);
        check_same(&ring, &configuration).map_err(TestCaseError::fail)?;
        check_same(&ring, &with_slots(&configuration)).map_err(TestCaseError::fail)?;
        let divided = configuration.clone().with_heads_divided();
        check_same(&ring, &divided).map_err(TestCaseError::fail)?;
        check_same(&ring, &configuration.in_nodes()).map_err(TestCaseError::fail)?;
    }
}

#[test]
fn lockstep_has_the_bits_of_threads_on_the_cpu_kernel_in_every_dtype() {
    for (seed, dtype) in (0..).zip([DType::F64, DType::F32, DType::Bf16, DType::F16].repeat(8)) {
        let ring = ThreadRing::new(CpuKernel::new().expect("a kernel"), DEADLINE);
        let mut configuration = Configuration::any(seed);
        configuration.request.dtype = dtype;
        let outcome = check_bits(&ring, &configuration);
        assert_eq!(outcome, Ok(()), "{configuration:?}");
    }
}

/// As [`check_same`], without the ledger: threads share the kernel's workspace, ranks in lockstep
/// do not.
fn check_bits(ring: &ThreadRing<CpuKernel>, configuration: &Configuration) -> Result<(), String> {
    for backward in [false, true] {
        let call = RandomCall::new(configuration, backward).expect("legal");
        let threads = ring.run(call.plan.request(), &call.inputs());
        let threads = threads.map_err(|error| error.to_string())?;
        let stepped = lockstep::run(ring.kernel(), &call.plan, &call.inputs());
        let stepped = stepped.map_err(|error| error.to_string())?;
        if bits(threads.tensors()) != bits(stepped.tensors()) {
            return Err("bits differ".to_string());
        }
    }
    Ok(())
}

#[test]
fn missing_and_misshapen_inputs_are_refused() {
    let call = RandomCall::new(&Configuration::random(3), false).expect("legal");
    let mut inputs = call.inputs();
    inputs.retain(|(role, _)| *role != Role::K);
    let refused = lockstep::run(&NaiveKernel, &call.plan, &inputs);
    assert!(matches!(
        refused,
        Err(RingError::MissingInput { role: Role::K })
    ));
    let other = RandomCall::new(&Configuration::random(4), false).expect("legal");
    let refused = lockstep::run(&NaiveKernel, &call.plan, &other.inputs());
    assert!(matches!(refused, Err(RingError::Request(_))));
}
