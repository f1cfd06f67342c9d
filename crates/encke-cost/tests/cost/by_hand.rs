//! Cases small enough to be worked out on paper.
//!
//! Two ranks of four tokens: each has two jobs of 16 pairs x 4 channels x 4 = 256 operations, and
//! sends 4 rows of k and v, 128 bytes, to the other during the first.

use encke_core::sharding::Cut;
use encke_core::{GroupScale, MixingGradient, Mode, OffsetRule, Pattern};
use encke_cost::{Machine, SimulatedRun, TransferMode, simulate};
use encke_ring::trace::Activity;

use crate::support::{dense, link, machine, plan};

fn close(got: f64, expected: f64) {
    assert!(
        (got - expected).abs() < 1e-9 * expected.abs().max(1.0),
        "{got}, not {expected}"
    );
}

fn two_ranks(machine: &Machine) -> SimulatedRun {
    simulate(&dense(8, 2), machine, 0..2).unwrap()
}

#[test]
fn a_transfer_longer_than_the_jobs_is_partly_exposed() {
    // 1 s of jobs beside 0.5 + 128 / 64 = 2.5 s of transfer, then 1 s of jobs.
    let run = two_ranks(&machine(256.0, link(0.5, 64.0)));
    close(run.seconds, 3.5);
    close(run.flops, 1024.0);
    close(run.one_device_s, 4.0);
    close(run.efficiency, 4.0 / 7.0);
    close(run.hidden.unwrap(), 0.4);
    for rank in &run.ranks {
        close(rank.compute_s, 2.0);
        close(rank.exposed_s, 1.5);
        close(rank.idle_s, 0.0);
        assert_eq!((rank.sent_bytes, rank.received_bytes), (128, 128));
    }
    assert_eq!((run.links[0].bytes, run.links[0].transfers), (256, 2));
    close(run.links[0].busiest_port_s, 2.0);
    assert_eq!(run.links[1].bytes, 0);
}

#[test]
fn a_transfer_shorter_than_the_jobs_is_hidden() {
    let run = two_ranks(&machine(256.0, link(0.5, 256.0)));
    close(run.seconds, 2.0);
    close(run.hidden.unwrap(), 1.0);
    close(run.efficiency, 1.0);
}

#[test]
fn the_trace_has_the_intervals_and_transfers_of_recorded_ranks_only() {
    let run = two_ranks(&machine(256.0, link(0.5, 64.0)));
    let of_rank_1: Vec<(Activity, f64, f64)> = run
        .trace
        .events
        .iter()
        .filter(|event| event.rank == 1)
        .map(|e| (e.activity, e.start.as_secs_f64(), e.duration.as_secs_f64()))
        .collect();
    let expected = [
        (Activity::Compute, 0.0, 1.0),
        (Activity::Wait, 1.0, 1.5),
        (Activity::Compute, 2.5, 1.0),
    ];
    assert_eq!(of_rank_1, expected);
    assert_eq!(run.transfers.len(), 2);
    assert_eq!(
        (run.transfers[0].start_s, run.transfers[0].end_s),
        (0.0, 2.5)
    );
    let unrecorded = simulate(&dense(8, 2), &machine(256.0, link(0.5, 64.0)), 0..0).unwrap();
    assert!(unrecorded.trace.events.is_empty() && unrecorded.transfers.is_empty());
    assert_eq!(unrecorded.seconds, run.seconds);
}

#[test]
fn ranks_wait_for_a_slow_rank_whose_data_they_need() {
    // Three ranks; rank 1 takes three times as long. It sends its own rows at once, but posts its
    // transfers of round 1 only after its first round, at 3 s. The others have been ready since 2
    // s, and end their third round at 4 s.
    let mut slow = machine(256.0, link(0.0, f64::INFINITY));
    slow.stragglers.insert(1, 3.0);
    let run = simulate(&dense(12, 3), &slow, 0..3).unwrap();
    close(run.seconds, 9.0);
    assert_eq!(run.slowest, 1);
    for rank in [0, 2] {
        close(run.ranks[rank].idle_s, 1.0);
        close(run.ranks[rank].end_s, 4.0);
    }
}

#[test]
fn tasks_before_the_transfers_count_as_preparation() {
    let mut machine = machine(256.0, link(0.0, f64::INFINITY));
    machine.device.job_overhead_s = 0.25;
    machine.device.cell_bytes_per_s = 20.0;
    let run = simulate(&dense(4, 1), &machine, 0..1).unwrap();
    // The lse of 4 rows is filled: 16 bytes. One rank needs no softmax state. One job of 256
    // operations.
    close(run.ranks[0].prepare_s, 16.0 / 20.0);
    close(run.seconds, 1.25 + 0.8);
}

#[test]
fn contiguous_inputs_are_not_loaded() {
    let mut machine = machine(256.0, link(0.0, f64::INFINITY));
    machine.device.load_bytes_per_s = Some(48.0);
    let run = simulate(&dense(4, 1), &machine, 0..0).unwrap();
    close(run.ranks[0].load_s, 0.0);
    // Rank 0 has tokens 0, 1, 6 and 7: q, k and v of them are 192 bytes. Rank 1 has 2 to 5.
    let zigzag = plan(8, 1, 2, Pattern::dense(), Cut::Zigzag);
    let run = simulate(&zigzag, &machine, 0..0).unwrap();
    close(run.ranks[0].load_s, 4.0);
    close(run.ranks[1].load_s, 0.0);
}

#[test]
fn outputs_handed_to_the_caller_are_allocated() {
    let mut machine = machine(256.0, link(0.0, f64::INFINITY));
    machine.device.allocate_bytes_per_s = Some(40.0);
    // out and lse of 4 rows are 80 bytes; where two ranks share them, they are copied out instead.
    let run = simulate(&dense(4, 1), &machine, 0..0).unwrap();
    close(run.ranks[0].load_s, 2.0);
    close(run.seconds, 3.0);
    let run = simulate(&dense(4, 2), &machine, 0..0).unwrap();
    close(run.ranks[0].load_s, 0.0);
}

#[test]
fn a_job_of_few_tasks_occupies_part_of_a_device() {
    let mut machine = machine(256.0, link(0.0, f64::INFINITY));
    let speed = &mut machine.device.rates[0].forward;
    (speed.task_rows, speed.task_share) = (2.0, 0.25);
    // Four queries are two tasks and occupy half of it; one query is one task.
    close(simulate(&dense(4, 1), &machine, 0..0).unwrap().seconds, 2.0);
    close(
        simulate(&dense(1, 1), &machine, 0..0).unwrap().seconds,
        4.0 / 16.0,
    );
    close(simulate(&dense(8, 1), &machine, 0..0).unwrap().seconds, 4.0);
    // Under a causal mask the second of two tasks has three quarters of the work.
    let causal = plan(4, 1, 1, Pattern::dense().causal(true), Cut::Contiguous);
    let seconds = simulate(&causal, &machine, 0..0).unwrap().seconds;
    close(seconds, 10.0 / 16.0 * 3.0);
    // Two ranks with two tasks each keep all of it busy.
    machine.device.shared_cores = Some(4);
    close(simulate(&dense(8, 2), &machine, 0..0).unwrap().seconds, 4.0);
}

#[test]
fn strided_rows_are_slower() {
    let mut machine = machine(256.0, link(0.0, f64::INFINITY));
    machine.device.rates[0].forward.strided_slowdown = 0.5;
    close(simulate(&dense(4, 1), &machine, 0..0).unwrap().seconds, 1.0);
    let scale = GroupScale::One;
    let dilated = Pattern::dilated(&[8], &[2], Mode::Group { scale }).unwrap();
    let dilated = plan(8, 1, 1, dilated, Cut::Contiguous);
    close(simulate(&dilated, &machine, 0..0).unwrap().seconds, 1.5);
}

#[test]
fn the_diagonal_costs_at_most_the_masked_pairs() {
    let mut machine = machine(16.0, link(0.0, f64::INFINITY));
    let causal = plan(4, 1, 1, Pattern::dense().causal(true), Cut::Contiguous);
    close(simulate(&causal, &machine, 0..0).unwrap().seconds, 10.0);
    machine.device.rates[0].forward.diagonal_keys = 0.5;
    close(simulate(&causal, &machine, 0..0).unwrap().seconds, 12.0);
    machine.device.rates[0].forward.diagonal_keys = 1000.0;
    close(simulate(&causal, &machine, 0..0).unwrap().seconds, 16.0);
}

/// Two rings, ranks 0 and 2 and ranks 1 and 3, in two nodes: each node sends two messages at once.
fn crossing_rings() -> encke_core::plan::Plan {
    let mode = Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Exact,
    };
    let pattern = Pattern::dilated(&[16], &[2], mode).unwrap();
    plan(16, 2, 4, pattern, Cut::Striped)
}

#[test]
fn ranks_of_a_node_share_its_network_cards() {
    // Each rank has two jobs of 16 pairs, and sends 128 bytes to the other node.
    let mut machine = machine(256.0, link(0.0, 1e9));
    machine.ranks_per_node = 2;
    machine.inter_node = link(0.0, 64.0);
    let shared = simulate(&crossing_rings(), &machine, 0..4).unwrap();
    assert_eq!(shared.links[1].bytes, 4 * 128);
    close(shared.seconds, 4.0 + 1.0);
    machine.nics = 2;
    let own = simulate(&crossing_rings(), &machine, 0..4).unwrap();
    close(own.seconds, 2.0 + 1.0);
    machine.ranks_per_node = 4;
    let one_node = simulate(&crossing_rings(), &machine, 0..4).unwrap();
    assert_eq!(one_node.links[1].bytes, 0);
    close(one_node.seconds, 2.0);
}

#[test]
fn more_ranks_on_shared_cores_are_not_faster() {
    let mut machine = machine(256.0, link(0.0, f64::INFINITY));
    machine.device.shared_cores = Some(2);
    for ranks in [1, 2, 4, 8] {
        let run = simulate(&dense(32, ranks), &machine, 0..0).unwrap();
        close(run.seconds, 32.0 * 32.0 * 16.0 / 256.0);
        assert_eq!(run.devices, 1);
        close(run.efficiency, 1.0);
    }
}

#[test]
fn transfers_copied_by_the_sender_are_not_hidden() {
    let mut machine = machine(256.0, link(0.0, 64.0));
    machine.intra_node.mode = TransferMode::SenderThread;
    // Rank 1 has not posted when rank 0 looks: rank 0 computes, then copies. Rank 0 has posted when
    // rank 1 looks: rank 1 copies for 2 s, then computes for 1 s, until when rank 0 has copied.
    let run = two_ranks(&machine);
    close(run.seconds, 4.0);
    close(run.hidden.unwrap(), 1.0 - 4.0 / (3.0 + 3.0));
    assert_eq!(run.bytes(), 256);
}

#[test]
fn few_instances_are_slower_and_each_has_a_fixed_cost() {
    let mut machine = machine(256.0, link(0.0, f64::INFINITY));
    close(simulate(&dense(4, 1), &machine, 0..0).unwrap().seconds, 1.0);
    machine.device.rates[0].forward.few_instances_slowdown = 1.0;
    machine.device.rates[0].forward.instance_s = 0.5;
    close(simulate(&dense(4, 1), &machine, 0..0).unwrap().seconds, 2.5);
}
