//! The automatic choice: by predicted time, under a memory limit, without effect on results.

use encke::choose::{
    ChoiceError, Constraints, TIE_TOLERANCE, Threshold, Workload, choose, one_device_until,
};
use encke::cost::{Machine, find_device, find_link};
use encke::tune::{MachineId, MachineSource, builtin_machine};
use encke::{
    Attention, Auto, CheckpointPolicy, CpuKernel, Cut, DType, Kernel, Pass, Pattern, Precision,
    Queries, Rotating, Schedule, Shape,
};

use crate::support::TestTensors;

/// Nodes of 8 GPUs.
fn gpus() -> Machine {
    Machine {
        device: find_device("h200").expect("known"),
        ranks_per_node: 8,
        intra_node: find_link("nvlink").expect("known"),
        inter_node: find_link("ib400").expect("known"),
        nics: 8,
        stragglers: Default::default(),
    }
}

/// Two cores with built-in figures.
pub fn cores() -> Machine {
    builtin_machine(&MachineId {
        processor: "any".to_string(),
        cores: 2,
        instructions: "avx2".to_string(),
        gpu: None,
        version: "0".to_string(),
    })
}

fn constraints(tokens: usize) -> Constraints {
    let shape = Shape::new(1, tokens, 16, 16, 128).expect("legal");
    Constraints::new(shape, Pattern::dense().causal(true), DType::Bf16, 8)
}

fn kernel() -> CpuKernel {
    CpuKernel::new().expect("there is a CPU")
}

#[test]
fn long_sequences_get_a_ring_and_short_ones_one_device() {
    let (kernel, machine) = (kernel(), gpus());
    let short = choose(&kernel, &constraints(512), &machine).expect("legal");
    assert_eq!(short.winner().ranks, 1, "{}", short.reason);
    let long = choose(&kernel, &constraints(1 << 18), &machine).expect("legal");
    assert_eq!(long.winner().ranks, 8, "{}", long.reason);
    // The causal mask leaves contiguous ranks idle, and the predicted time shows it.
    assert_ne!(long.winner().cut, Cut::Contiguous);
    assert!(
        long.reason.contains("one device would take"),
        "{}",
        long.reason
    );
    let times: Vec<f64> = long.alternatives.iter().map(|of| of.seconds).collect();
    assert!(times.is_sorted(), "{times:?}");

    let threshold = one_device_until(&kernel, &constraints(512), &machine).expect("legal");
    let Threshold::Tokens(tokens) = threshold else {
        panic!("{threshold:?}")
    };
    assert!((512..1 << 18).contains(&tokens), "{tokens}");
    let beyond = choose(&kernel, &constraints(2 * tokens), &machine).expect("legal");
    let before = choose(&kernel, &constraints(tokens / 2), &machine).expect("legal");
    assert!(beyond.winner().ranks > 1, "{}", beyond.reason);
    assert_eq!(before.winner().ranks, 1, "{}", before.reason);
    let below = Constraints {
        one_device_below: Some(1 << 20),
        ..constraints(1 << 18)
    };
    let below = choose(&kernel, &below, &machine).expect("legal");
    assert_eq!((below.winner().ranks, below.alternatives.len()), (1, 1));
}

#[test]
fn ranks_on_shared_cores_are_chosen_only_to_save_memory() {
    let (kernel, machine) = (kernel(), cores());
    let choice = choose(&kernel, &constraints(4096), &machine).expect("legal");
    assert_eq!(choice.winner().ranks, 1, "{}", choice.reason);
    let whole = choice.winner().memory_bytes;
    let limited = |limit: usize| Constraints {
        memory_limit: Some(limit),
        ..constraints(4096)
    };
    let choice = choose(&kernel, &limited(whole / 2), &machine).expect("legal");
    assert!(choice.winner().ranks > 1 && choice.winner().fits);
    assert!(choice.winner().memory_bytes <= whole / 2);
    assert!(
        choice.reason.contains("one device would hold"),
        "{}",
        choice.reason
    );
    let refused = choose(&kernel, &limited(1000), &machine).unwrap_err();
    assert!(
        matches!(
            refused,
            ChoiceError::NothingFits {
                limit: 1000,
                ranks: 8,
                ..
            }
        ),
        "{refused}"
    );
    let threshold = one_device_until(&kernel, &constraints(4096), &machine).expect("legal");
    assert!(
        matches!(threshold, Threshold::NeverRing { .. }),
        "{threshold:?}"
    );
}

#[test]
fn tied_schedules_prefer_the_narrowest_or_for_backward_on_threads_the_widest() {
    let kernel = kernel();
    let widths = |work: Workload, machine: &Machine| {
        let constraints = Constraints {
            work,
            ranks: Some(4),
            ..constraints(1 << 16)
        };
        let choice = choose(&kernel, &constraints, machine).expect("legal");
        let limit = choice.alternatives[0].seconds * (1.0 + TIE_TOLERANCE);
        let of = choice.winner();
        let tied = choice.alternatives.iter();
        let tied = tied.filter(|other| other.seconds <= limit && other.cut == of.cut);
        let mut widths: Vec<usize> = tied.map(|other| other.schedule.width).collect();
        widths.sort_unstable();
        let (least, most) = (widths[0], widths[widths.len() - 1]);
        assert!(least < most, "{work:?}: nothing to choose from");
        (of.schedule.width, least, most)
    };
    let (chosen, _, most) = widths(Workload::Backward, &cores());
    assert_eq!(chosen, most);
    for (work, machine) in [(Workload::Forward, cores()), (Workload::Backward, gpus())] {
        let (chosen, least, _) = widths(work, &machine);
        assert_eq!(chosen, least, "{work:?}");
    }
}

#[test]
fn outputs_saved_for_many_layers_are_weighed_against_recomputing() {
    let (kernel, machine) = (kernel(), gpus());
    let training = |layers: usize, limit: Option<usize>| {
        let constraints = Constraints {
            work: Workload::Training { layers },
            ranks: Some(4),
            memory_limit: limit,
            ..constraints(1 << 16)
        };
        choose(&kernel, &constraints, &machine).expect("legal")
    };
    let one = training(1, None);
    assert_eq!(one.winner().checkpoint, Some(CheckpointPolicy::KeepOutput));
    let limit = one.winner().memory_bytes * 5 / 4;
    let many = training(64, Some(limit));
    assert_eq!(many.winner().checkpoint, Some(CheckpointPolicy::Recompute));
    let (one, many) = (one.winner(), many.winner());
    assert!(many.seconds > one.seconds, "one more forward pass");
    let passes = many.forward_s.expect("timed") * 2.0 + many.backward_s.expect("timed");
    assert!((many.seconds / passes - 1.0).abs() < 1e-9);
}

#[test]
fn fixed_settings_are_not_varied() {
    let (kernel, machine) = (kernel(), gpus());
    let fixed = Constraints {
        ranks: Some(3),
        cut: Some(Cut::Zigzag),
        queries: None,
        width: Some(1),
        ..constraints(1 << 14)
    };
    let choice = choose(&kernel, &fixed, &machine).expect("legal");
    assert_eq!(choice.alternatives.len(), 2);
    for of in &choice.alternatives {
        assert_eq!((of.ranks, &of.cut), (3, &Cut::Zigzag));
    }
    let queries: Vec<Queries> = choice.alternatives.iter().map(|of| of.queries).collect();
    assert!(queries.contains(&Queries::Sharded) && queries.contains(&Queries::Replicated));
}

#[test]
fn what_is_fixed_excludes_alternatives_that_do_not_go_with_it() {
    let (kernel, machine) = (kernel(), gpus());
    let with = |nodes: Schedule, ranks: usize, queries: Option<Queries>| {
        let fixed = Constraints {
            ranks: Some(ranks),
            width: Some(1),
            nodes: Some(nodes),
            queries,
            ..constraints(4096)
        };
        choose(&kernel, &fixed, &machine)
    };
    // Divided heads have no striped shards, and two levels no replicated queries.
    for (nodes, queries) in [
        (Schedule::RING.with_heads(2), Some(Queries::Sharded)),
        (Schedule::RING.with_node(2), None),
    ] {
        let choice = with(nodes, 4, queries).expect("some alternatives remain");
        let winner = choice.winner();
        let schedule = (winner.schedule.node, winner.schedule.heads);
        assert_eq!(schedule, (nodes.node, nodes.heads));
        assert!(
            choice
                .alternatives
                .iter()
                .all(|of| of.queries == Queries::Sharded)
        );
    }
    let none = with(Schedule::RING.with_heads(2), 3, Some(Queries::Sharded));
    let none = none.expect_err("three ranks do not fill groups of two");
    assert!(none.to_string().contains("divides heads"), "{none}");
}

#[test]
fn open_schedules_are_all_tried() {
    let (kernel, machine) = (kernel(), gpus());
    let open = Constraints {
        work: Workload::Backward,
        ranks: Some(8),
        cut: Some(Cut::Contiguous),
        ..constraints(1 << 14)
    };
    let choice = choose(&kernel, &open, &machine).expect("legal");
    let mut seen: Vec<Schedule> = choice.alternatives.iter().map(|of| of.schedule).collect();
    seen.sort_by_key(|of| (of.width, of.backward == Rotating::Queries));
    let both = |width| {
        [Rotating::Keys, Rotating::Queries].map(|of| Schedule {
            width,
            backward: of,
            ..Schedule::RING
        })
    };
    assert_eq!(seen, [1, 2, 4, 7].map(both).concat());
    // As many heads as key heads: queries are fewer bytes than keys, at every width.
    let of = |schedule: Schedule| {
        let mut all = choice.alternatives.iter();
        all.find(|of| of.schedule == schedule).expect("considered")
    };
    for [keys, queries] in [1, 2, 4, 7].map(both) {
        assert!(of(queries).sent_bytes < of(keys).sent_bytes);
        assert_eq!(of(keys).sent_bytes, of(Schedule::RING).sent_bytes);
        assert!(of(keys).memory_bytes >= of(Schedule::RING).memory_bytes);
    }
    // With little memory only the narrow ones fit.
    let short = Constraints {
        memory_limit: Some(of(Schedule::RING).memory_bytes),
        ..open.clone()
    };
    let short = choose(&kernel, &short, &machine).expect("legal");
    assert!(short.alternatives.iter().any(|of| !of.fits));
    assert!(short.winner().schedule.width < 7, "{}", short.reason);
    // With redundancy, key gradients are sent directly to their owner, so keys rotate.
    let surviving = Constraints {
        redundancy: 1,
        ..open
    };
    let surviving = choose(&kernel, &surviving, &machine).expect("legal");
    assert_eq!(surviving.alternatives.len(), 4);
    assert_eq!(surviving.winner().schedule.backward, Rotating::Keys);
}

#[test]
fn a_chosen_ring_gives_the_bits_of_the_same_explicit_ring() {
    let shape = Shape::new(1, 300, 4, 2, 16).expect("legal");
    let tensors = TestTensors::random(&shape, DType::F32, 6);
    let pattern = Pattern::dense().causal(true);
    let builder = || Attention::builder().pattern(pattern.clone());
    let choice_within = |memory_limit| {
        let auto = Auto {
            machine: cores(),
            source: MachineSource::BuiltIn,
            ranks: true,
            cut: true,
            queries: false,
            width: true,
            rotate: true,
            most_ranks: 6,
            memory_limit,
            one_device_below: None,
        };
        let chosen = builder().auto(auto).build().expect("legal");
        let choice = chosen
            .choice(shape, DType::F32, Pass::Forward)
            .expect("legal");
        (chosen, choice.expect("settings are automatic"))
    };
    // Kernels differ in the memory of a pass: what the smallest alternative needs, no less.
    let open = choice_within(None).1;
    let needs = open.alternatives.iter().map(|of| of.memory_bytes);
    let least = needs.min().expect("there are alternatives");
    let (chosen, choice) = choice_within(Some(least));
    let winner = choice.winner();
    assert!(winner.ranks > 1, "{}", choice.reason);
    let given = builder().ranks(winner.ranks).sharding(winner.cut.clone());
    let given = given.schedule(winner.schedule).build().expect("legal");
    let (got, expected) = (tensors.forward(&chosen), tensors.forward(&given));
    assert_eq!((&got.out, &got.lse), (&expected.out, &expected.lse));
    assert_eq!(got.report.plan.ranks(), winner.ranks);
    // The second choice comes from the cache.
    let again = chosen
        .choice(shape, DType::F32, Pass::Forward)
        .expect("legal");
    assert!(std::sync::Arc::ptr_eq(
        &again.expect("settings are automatic"),
        &choice
    ));
    // The backward pass takes more memory, and no ring fits.
    let (q, k, v) = (tensors.q.view(), tensors.k.view(), tensors.v.view());
    let dout = tensors.dout.view();
    let refused = chosen
        .backward(&q, &k, &v, &got.checkpoint, &dout, None)
        .unwrap_err();
    let expected = format!("nothing fits {least} bytes");
    assert!(refused.to_string().contains(&expected), "{refused}");
}

#[test]
fn fastest_precision_lowers_f32_only_and_never_an_explicit_type() {
    let attention = |precision| {
        Attention::builder()
            .precision(precision)
            .build()
            .expect("legal")
    };
    let fastest = attention(Precision::Fastest);
    let expected = fastest.kernel().fastest_dtype();
    assert!(matches!(expected, DType::F32 | DType::Bf16), "{expected}");
    assert_eq!(fastest.compute_dtype(DType::F32), expected);
    for stored in [DType::F64, DType::Bf16, DType::F16] {
        assert_eq!(fastest.compute_dtype(stored), stored);
    }
    for explicit in [DType::F64, DType::F32] {
        assert_eq!(
            attention(Precision::Compute(explicit)).compute_dtype(DType::F32),
            explicit
        );
    }
    let shape = Shape::new(1, 64, 2, 2, 16).expect("legal");
    let forward = TestTensors::random(&shape, DType::F32, 1).forward(&fastest);
    assert_eq!(
        (forward.out.dtype(), forward.lse.dtype()),
        (expected, DType::F32)
    );
}
