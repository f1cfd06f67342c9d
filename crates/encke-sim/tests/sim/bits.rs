//! Bits that do not depend on the ring, in the simulator: those of threads on one rank, with and
//! without deaths.

use std::time::Duration;

use encke_core::DType;
use encke_core::conformance::Configuration;
use encke_cpu::CpuKernel;
use encke_ring::ThreadRing;
use encke_sim::fault_config::{FaultConfig, RankDeath};
use encke_sim::random_call::RandomCall;
use encke_sim::{fault_run, lockstep};

use crate::support::bits;

const DEADLINE: Duration = Duration::from_secs(60);

fn on_ranks(case: &Configuration, ranks: usize) -> Configuration {
    Configuration {
        request: case.request.clone().on_ranks(ranks).expect("legal"),
        seed: case.seed,
    }
}

#[test]
fn lockstep_on_any_ring_has_the_bits_of_threads_on_one_rank() {
    let ring = ThreadRing::new(CpuKernel::new().expect("a kernel"), DEADLINE);
    for seed in 0..40 {
        let dtype = [DType::F32, DType::Bf16][seed as usize % 2];
        let case = Configuration::tiled(seed, dtype);
        for backward in [false, true] {
            let call = RandomCall::new(&case, backward).expect("legal");
            let threads = ring.run(call.plan.request(), &call.inputs());
            let expected = bits(threads.expect("nothing fails").tensors());
            for ranks in [2, 5] {
                let call = RandomCall::new(&on_ranks(&case, ranks), backward).expect("legal");
                let stepped = lockstep::run(ring.kernel(), &call.plan, &call.inputs());
                let stepped = stepped.expect("nothing fails");
                assert_eq!(bits(stepped.tensors()), expected, "seed {seed}: {case:?}");
                let planned = call.plan.explain().expect("legal").sent_bytes;
                assert_eq!(stepped.trace.sent_bytes(), planned, "seed {seed}");
            }
        }
    }
}

#[test]
fn any_rank_may_die_in_any_round_without_changing_a_bit() {
    let kernel = CpuKernel::new().expect("a kernel");
    for seed in [2, 3, 5, 8] {
        let mut case = Configuration::tiled(seed, DType::F32);
        for backward in [false, true] {
            case.request.redundancy = 0;
            let alone = RandomCall::new(&case, backward).expect("legal");
            let expected = lockstep::run(&kernel, &alone.plan, &alone.inputs());
            let expected = bits(expected.expect("nothing fails").tensors());
            let mut ring = on_ranks(&case, 3);
            ring.request.redundancy = 1;
            let call = RandomCall::new(&ring, backward).expect("legal");
            for rank in 0..3 {
                for round in 0..call.plan.rank(rank).expect("a rank").rounds.len() {
                    let mut config = FaultConfig::none(5);
                    config.deaths = vec![RankDeath::new(rank, round)];
                    let run = fault_run::run(&kernel, &call.plan, &call.inputs(), &config);
                    let outcome = run.expect("it begins").result.expect("it survives");
                    let got = bits(outcome.tensors());
                    assert_eq!(got, expected, "seed {seed}: rank {rank} dies in {round}");
                }
            }
        }
    }
}
