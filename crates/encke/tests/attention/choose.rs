//! What is left open is decided: by predicted time, under a limit on memory, and never at the price
//! of a result.

use encke::choose::{
    ChoiceError, Constraints, TIE_TOLERANCE, Threshold, Workload, choose, one_device_until,
};
use encke::cost::{Machine, find_device, find_link};
use encke::tune::{MachineId, MachineSource, builtin_machine};
use encke::{
    Attention, Auto, CheckpointPolicy, CpuKernel, Cut, DType, Kernel, Pass, Pattern, Precision,
    Queries, Rotating, Schedule, Shape,
};

use crate::support::AttentionInputs;

/// Nodes of 8 GPUs.
fn gpus() -> Machine {
    Machine {
        device: find_device("h200").expect("known"),
        node: 8,
        inside: find_link("nvlink").expect("known"),
        between: find_link("ib400").expect("known"),
        nics: 8,
        stragglers: Default::default(),
    }
}

/// Two cores that nobody has measured.
fn cores() -> Machine {
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
fn a_ring_where_it_pays_and_one_device_where_it_does_not() {
    let (kernel, machine) = (kernel(), gpus());
    let short = choose(&kernel, &constraints(512), &machine).expect("legal");
    assert_eq!(short.winner().ranks, 1, "{}", short.reason);
    let long = choose(&kernel, &constraints(1 << 18), &machine).expect("legal");
    assert_eq!(long.winner().ranks, 8, "{}", long.reason);
    // The mask leaves contiguous ranks idle, and the clock sees it.
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
    let told = Constraints {
        one_device_below: Some(1 << 20),
        ..constraints(1 << 18)
    };
    let told = choose(&kernel, &told, &machine).expect("legal");
    assert_eq!((told.winner().ranks, told.alternatives.len()), (1, 1));
}

#[test]
fn ranks_that_share_their_cores_gain_nothing_but_memory() {
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
fn of_schedules_alike_the_simplest_or_on_the_way_back_of_threads_the_fewest_rounds() {
    let kernel = kernel();
    let widths = |work: Workload, machine: &Machine| {
        let constraints = Constraints {
            work,
            ranks: Some(4),
            ..constraints(1 << 16)
        };
        let choice = choose(&kernel, &constraints, machine).expect("legal");
        let near = choice.alternatives[0].seconds * (1.0 + TIE_TOLERANCE);
        let of = choice.winner();
        let alike = choice.alternatives.iter();
        let alike = alike.filter(|other| other.seconds <= near && other.cut == of.cut);
        let mut widths: Vec<usize> = alike.map(|other| other.schedule.width).collect();
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
fn what_is_kept_for_many_layers_is_weighed_against_doing_it_again() {
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
    assert!(many.seconds > one.seconds, "a forward pass more");
    let passes = many.forward_s.expect("timed") * 2.0 + many.backward_s.expect("timed");
    assert!((many.seconds / passes - 1.0).abs() < 1e-9);
}

#[test]
fn what_was_given_is_not_decided() {
    let (kernel, machine) = (kernel(), gpus());
    let given = Constraints {
        ranks: Some(3),
        cut: Some(Cut::Zigzag),
        queries: None,
        width: Some(1),
        ..constraints(1 << 14)
    };
    let choice = choose(&kernel, &given, &machine).expect("legal");
    assert_eq!(choice.alternatives.len(), 2);
    for of in &choice.alternatives {
        assert_eq!((of.ranks, &of.cut), (3, &Cut::Zigzag));
    }
    let who: Vec<Queries> = choice.alternatives.iter().map(|of| of.queries).collect();
    assert!(who.contains(&Queries::Sharded) && who.contains(&Queries::Replicated));
}

#[test]
fn schedules_are_weighed_where_they_are_open() {
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
    // Where memory is short, the narrow ones are left.
    let short = Constraints {
        memory_limit: Some(of(Schedule::RING).memory_bytes),
        ..open.clone()
    };
    let short = choose(&kernel, &short, &machine).expect("legal");
    assert!(short.alternatives.iter().any(|of| !of.fits));
    assert!(short.winner().schedule.width < 7, "{}", short.reason);
    // Whoever is to survive sends gradients of keys straight home.
    let surviving = Constraints {
        redundancy: 1,
        ..open
    };
    let surviving = choose(&kernel, &surviving, &machine).expect("legal");
    assert_eq!(surviving.alternatives.len(), 4);
    assert_eq!(surviving.winner().schedule.backward, Rotating::Keys);
}

#[test]
fn a_ring_that_was_chosen_computes_what_a_given_one_does() {
    let shape = Shape::new(1, 300, 4, 2, 16).expect("legal");
    let tensors = AttentionInputs::random(&shape, DType::F32, 6);
    let auto = Auto {
        machine: cores(),
        source: MachineSource::BuiltIn,
        ranks: true,
        cut: true,
        queries: false,
        width: true,
        rotate: true,
        most_ranks: 6,
        // Less than one rank would hold.
        memory_limit: Some(300 * (4 + 2 + 2 + 4) * 16 * 4),
        one_device_below: None,
    };
    let pattern = Pattern::dense().causal(true);
    let builder = || Attention::builder().pattern(pattern.clone());
    let chosen = builder().auto(auto).build().expect("legal");
    let choice = chosen
        .choice(shape, DType::F32, Pass::Forward)
        .expect("legal");
    let choice = choice.expect("it was left open");
    let winner = choice.winner();
    assert!(winner.ranks > 1, "{}", choice.reason);
    let given = builder().ranks(winner.ranks).sharding(winner.cut.clone());
    let given = given.schedule(winner.schedule).build().expect("legal");
    let (got, expected) = (tensors.forward(&chosen), tensors.forward(&given));
    assert_eq!((&got.out, &got.lse), (&expected.out, &expected.lse));
    assert_eq!(got.report.plan.ranks(), winner.ranks);
    // The clock was asked once, however often the call is made.
    let again = chosen
        .choice(shape, DType::F32, Pass::Forward)
        .expect("legal");
    assert!(std::sync::Arc::ptr_eq(
        &again.expect("it was left open"),
        &choice
    ));
    // Gradients take more memory, and there is no ring that would fit.
    let (q, k, v) = (tensors.q.view(), tensors.k.view(), tensors.v.view());
    let dout = tensors.dout.view();
    let refused = chosen
        .backward(&q, &k, &v, &got.checkpoint, &dout, None)
        .unwrap_err();
    assert!(
        refused.to_string().contains("nothing fits 230400 bytes"),
        "{refused}"
    );
}

#[test]
fn the_fastest_type_is_the_hardwares_and_nothing_asked_for_is_lowered() {
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
    for asked in [DType::F64, DType::F32] {
        assert_eq!(
            attention(Precision::Compute(asked)).compute_dtype(DType::F32),
            asked
        );
    }
    let shape = Shape::new(1, 64, 2, 2, 16).expect("legal");
    let forward = AttentionInputs::random(&shape, DType::F32, 1).forward(&fastest);
    assert_eq!(
        (forward.out.dtype(), forward.lse.dtype()),
        (expected, DType::F32)
    );
}
