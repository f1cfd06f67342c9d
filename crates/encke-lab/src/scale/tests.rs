//! The page and its shortcuts.

use encke_cost::{find_device, find_link};

use super::*;

fn cluster() -> Machine {
    Machine {
        device: find_device("h200").unwrap(),
        ranks_per_node: 8,
        intra_node: find_link("nvlink").unwrap(),
        inter_node: find_link("ib400").unwrap(),
        nics: 8,
        stragglers: Default::default(),
    }
}

/// A ring twice as large as the line's points, simulated and continued.
#[test]
fn larger_rings_continue_the_line() {
    let (machine, shard) = (cluster(), 1 << 15);
    for pattern in ScalePattern::ALL {
        let small = request(pattern, GROUPED, shard * 16, 16).unwrap();
        let all = schedules::compared(&small, 8);
        assert_eq!(all.len(), 3);
        for schedule in all {
            let times = |ranks: usize| {
                let request = request(pattern, GROUPED, shard * ranks, ranks).unwrap();
                schedules::times(&request, schedule, &machine, true).unwrap()
            };
            // The line begins at 8 members, which are groups where heads are divided. LongNet's
            // longest segment is 32 of these shards.
            let most = if schedule.1.heads > 1 { 128 } else { 64 };
            let continued = match pattern {
                ScalePattern::Dense => continued([times(most / 2), times(most)], most, 2 * most),
                ScalePattern::Longnet => repeated(times(most), most, 2 * most),
            };
            let simulated = times(2 * most);
            for (one, other) in [
                (continued.seconds(), simulated.seconds()),
                (continued.efficiency, simulated.efficiency),
                (continued.inside_bytes as f64, simulated.inside_bytes as f64),
                (
                    continued.between_bytes as f64,
                    simulated.between_bytes as f64,
                ),
                (continued.memory_bytes as f64, simulated.memory_bytes as f64),
            ] {
                let error = (one - other).abs() / other.max(1e-12);
                assert!(error < 0.03, "{pattern:?} {schedule:?}: {one} and {other}");
            }
        }
    }
}

#[test]
fn the_page_and_the_table_say_what_they_are_made_from() {
    let mut told = 0;
    let findings = predict(&cluster(), 16, &mut |_| told += 1).unwrap();
    assert_eq!(told, findings.grid.len());
    let (page, text) = (document(&findings).unwrap(), markdown(&findings));
    for part in ["Predicted, not measured", "data sheet", "nvlink", "ib400"] {
        assert!(page.contains(part), "the page has no {part}");
        assert!(text.contains(part), "the table has no {part}: {text}");
    }
    for of in schedules::compared(
        &request(ScalePattern::Dense, GROUPED, 1 << 17, 16).unwrap(),
        8,
    ) {
        assert!(page.contains(of.0), "the page has no {}", of.0);
    }
    let svg = page.matches("<svg").count();
    assert_eq!(svg, 2 * 4 * 2, "two patterns, four charts, two widths");
    // A slower schedule that fits is taken before a faster one that does not.
    let slower = findings.grid.iter().find(|of| {
        let mut others = of.schedules.iter();
        of.fits() && others.any(|other| other.seconds() < 0.98 * of.fastest().seconds())
    });
    let slower = slower.expect("8M tokens on 8 devices").schedules.iter();
    assert!(slower.clone().any(|of| of.memory_bytes > DEVICE_BYTES));
    // A point that does not fit is marked.
    let full = || findings.grid.iter().filter(|of| !of.fits());
    assert_eq!(full().map(|of| of.tokens).min(), Some(1 << 26));
    assert_eq!(text.matches("(too much)").count(), full().count());
}
