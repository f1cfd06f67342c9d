//! Shards sized by speed: a ring with a slow rank uses nearly all throughput that is left.

use encke_core::Pattern;
use encke_core::plan::balance::by_speed;
use encke_core::sharding::Cut;
use encke_cost::simulate;

use crate::support::{link, machine, plan};

/// The time of a ring in which one rank takes twice as long for every task, divided by the time at
/// the remaining throughput.
fn against_ideal(ranks: usize, slow: usize, pattern: &Pattern, cut: Cut) -> f64 {
    let mut machine = machine(1e6, link(1e-3, 1e7));
    machine.stragglers.insert(slow, 2.0);
    let plan = plan(1 << 14, 2, ranks, pattern.clone(), cut);
    let run = simulate(&plan, &machine, 0..0).unwrap();
    run.seconds / (run.one_device_s / (ranks as f64 - 0.5))
}

#[test]
fn one_rank_at_half_speed_costs_half_a_rank() {
    for ranks in [3, 4, 8] {
        for slow in [0, ranks / 2, ranks - 1] {
            let dense = Pattern::dense();
            let speeds: Vec<f64> = (0..ranks)
                .map(|rank| if rank == slow { 0.5 } else { 1.0 })
                .collect();
            let shape = plan(1 << 14, 2, ranks, dense.clone(), Cut::Contiguous)
                .request()
                .shape;
            let cut = by_speed(&dense, &shape, &speeds).unwrap();
            let even = against_ideal(ranks, slow, &dense, Cut::Contiguous);
            let weighed = against_ideal(ranks, slow, &dense, cut);
            assert!(
                weighed < 1.10,
                "{ranks} ranks, {slow} slow: {weighed}, even {even}"
            );
            assert!(even > 1.5, "{ranks} ranks, {slow} slow: {even}");
        }
    }
}
