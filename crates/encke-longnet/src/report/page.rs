//! The page: sections for rings, for patterns, and for the retrieval task.

use anyhow::Result;
use encke::explain::{bytes, grouped};
use encke_lab::charts::axis::Screen;
use encke_lab::charts::html::{self, charts, details, section, table};
use encke_lab::charts::markup::Markup;
use encke_lab::format::percent;

use super::curves::{Curve, draw};
use crate::record::{RetrievalRecord, RunRecord, TrainingRecord, median};
use crate::retrieval::RetrievalPattern;

/// The whole document.
pub fn document(records: &[RunRecord]) -> Result<String> {
    let trained = records.iter().filter_map(|record| match record {
        RunRecord::Training(training) => Some(training),
        RunRecord::Retrieval(_) => None,
    });
    let mut groups: Vec<Vec<&TrainingRecord>> = Vec::new();
    for run in trained {
        let same = |group: &&mut Vec<&TrainingRecord>| group[0].settings == run.settings;
        match groups.iter_mut().find(same) {
            Some(group) => group.push(run),
            None => groups.push(vec![run]),
        }
    }
    for group in &mut groups {
        group.sort_by_key(|run| run.ranks);
    }
    let mut main = Markup::new("main")
        .with(Markup::new("p").class("eyebrow").text("longnet report"))
        .with(
            Markup::new("header")
                .with(Markup::new("h1").text("Training a LongNet"))
                .with(Markup::new("p").text(
                    "A byte-level language model with Encke’s attention. All figures come from \
                 recorded runs.",
                )),
        );
    for (at, group) in groups
        .iter()
        .enumerate()
        .filter(|(_, group)| group.len() > 1)
    {
        main = main.with(rings(at, group));
    }
    if !groups.is_empty() {
        main = main.with(patterns(&groups));
    }
    for record in records {
        if let RunRecord::Retrieval(retrieval) = record {
            main = main.with(retrieval_section(retrieval));
        }
    }
    let data = serde_json::to_string(records)?;
    Ok(html::document("longnet: training a LongNet", main, &data))
}

fn ring_name(run: &TrainingRecord) -> String {
    match run.processes {
        true => format!("p = {}, processes", run.ranks),
        false => format!("p = {}", run.ranks),
    }
}

fn pattern(run: &TrainingRecord) -> String {
    match run.settings.segment_lengths.is_empty() {
        true => "dense".to_string(),
        false => {
            let branch = |(w, r): (&usize, &usize)| format!("({w}, {r})");
            let branches = run
                .settings
                .segment_lengths
                .iter()
                .zip(&run.settings.dilation_rates);
            branches.map(branch).collect::<Vec<_>>().join(" ")
        }
    }
}

fn losses(name: String, run: &TrainingRecord) -> Curve {
    let points = run.losses.iter().enumerate();
    Curve {
        name,
        points: points
            .map(|(step, loss)| ((step + 1) as f64, *loss))
            .collect(),
    }
}

/// The largest relative difference between the losses of two runs, and that of the last step.
fn differences(run: &TrainingRecord, from: &TrainingRecord) -> (f64, f64) {
    let pairs = run.losses.iter().zip(&from.losses);
    let differences: Vec<f64> = pairs.map(|(a, b)| (a - b).abs() / b.abs()).collect();
    (
        differences.iter().copied().fold(0.0, f64::max),
        differences.last().copied().unwrap_or(0.0),
    )
}

fn median_step(run: &TrainingRecord) -> String {
    format!("{:.3} s", median(&run.seconds).unwrap_or(0.0))
}

/// Runs that differ only in their ring.
fn rings(at: usize, group: &[&TrainingRecord]) -> Markup {
    let first = group[0];
    let last = group[1..]
        .iter()
        .map(|run| differences(run, first).1)
        .fold(0.0, f64::max);
    let steps = group.iter().map(|run| run.losses.len()).min().unwrap_or(0);
    let finding = match last {
        0.0 => format!("After {steps} steps the losses of all rings have the same bits"),
        last => format!("After {steps} steps the losses of all rings agree to {last:.0e}"),
    };
    let lead = format!(
        "The loss in nats per byte, with {} tokens per step and the branches {}; where lines \
         coincide, later ones are drawn thinner.",
        grouped(first.settings.tokens as u128),
        pattern(first)
    );
    let curves: Vec<Curve> = group
        .iter()
        .map(|run| losses(ring_name(run), run))
        .collect();
    let row = |run: &&TrainingRecord| {
        let (largest, last) = differences(run, first);
        vec![
            ring_name(run),
            run.losses
                .last()
                .map_or(String::new(), |loss| format!("{loss:.6}")),
            format!("{last:.1e}"),
            format!("{largest:.1e}"),
            median_step(run),
            bytes(run.rank_bytes),
        ]
    };
    let headings = [
        "ring",
        "last loss",
        "difference, last step",
        "largest difference",
        "median step",
        "attention bytes per rank",
    ];
    section(&format!("rings-{at}"), &finding, &lead)
        .with_all(charts(|screen| {
            curve_chart(&curves, screen, "Loss by step, for each ring")
        }))
        .with(details([table(
            "The same training on several rings",
            headings.map(str::to_string).to_vec(),
            group.iter().map(row).collect(),
        )]))
}

fn curve_chart(curves: &[Curve], screen: Screen, description: &str) -> Markup {
    let titles = ("step", "loss, nats per byte");
    draw(curves, screen, 0.0, titles, description)
}

/// Runs with different settings: the first of each group.
fn patterns(groups: &[Vec<&TrainingRecord>]) -> Markup {
    let runs: Vec<&TrainingRecord> = groups.iter().map(|group| group[0]).collect();
    let last = |run: &TrainingRecord| run.losses.last().copied().unwrap_or(0.0);
    let finding = match runs[..] {
        [only] => format!("The loss falls to {:.3} nats per byte", last(only)),
        _ => {
            let each: Vec<String> = runs
                .iter()
                .map(|run| format!("{:.3} ({})", last(run), pattern(run)))
                .collect();
            format!("Last losses: {}", each.join(", "))
        }
    };
    let lead = "One line for each model and pattern: branches are (segment length, dilation). Each \
                step is one sequence, so the lines vary together with the text.";
    let curves: Vec<Curve> = runs
        .iter()
        .map(|run| {
            let name = match run.settings.segment_lengths.is_empty() {
                true => "dense",
                false => "dilated",
            };
            losses(name.to_string(), run)
        })
        .collect();
    let row = |run: &&TrainingRecord| {
        vec![
            pattern(run),
            grouped(run.settings.tokens as u128),
            run.settings.sizes.layers.to_string(),
            grouped(run.weights as u128),
            run.losses.len().to_string(),
            format!("{:.6}", last(run)),
            median_step(run),
        ]
    };
    let headings = [
        "pattern",
        "tokens",
        "layers",
        "weights",
        "steps",
        "last loss",
        "median step",
    ];
    section("patterns", &finding, lead)
        .with_all(charts(|screen| {
            curve_chart(&curves, screen, "Loss by step, for each pattern")
        }))
        .with(details([table(
            "Models and patterns",
            headings.map(str::to_string).to_vec(),
            runs.iter().map(row).collect(),
        )]))
}

/// The retrieval task.
fn retrieval_section(retrieval: &RetrievalRecord) -> Markup {
    let name = |reach| match reach {
        RetrievalPattern::Dilated => "local + dilated",
        RetrievalPattern::Local => "local only",
    };
    let shares: Vec<String> = retrieval
        .models
        .iter()
        .map(|model| format!("{} {}", percent(model.share()), name(model.reach)))
        .collect();
    let nearest = retrieval
        .models
        .iter()
        .map(|model| model.shortest)
        .min()
        .unwrap_or(0);
    let finding = format!(
        "Right answers about facts at least {} tokens back: {}",
        grouped(nearest as u128),
        shares.join(", ")
    );
    let lead = format!(
        "A fact is placed early in {} tokens of noise, questions at their end. Both models have \
         local segments of {}; one also has a branch with dilation {}. Guessing is right {} of the \
         time. Training starts on short sequences; the steps are those of all lengths.",
        grouped(retrieval.tokens as u128),
        retrieval.local,
        retrieval.dilation,
        percent(retrieval.chance)
    );
    let curve = |model: &crate::retrieval::RetrievalResult| Curve {
        name: name(model.reach).to_string(),
        points: model
            .history
            .iter()
            .map(|(_, step, _, share)| (*step as f64, *share))
            .collect(),
    };
    let curves: Vec<Curve> = retrieval.models.iter().map(curve).collect();
    let row = |model: &crate::retrieval::RetrievalResult| {
        vec![
            name(model.reach).to_string(),
            model.right.to_string(),
            model.asked.to_string(),
            percent(model.share()),
            model.steps.iter().sum::<usize>().to_string(),
        ]
    };
    let headings = ["model", "right", "of", "share", "steps"];
    let titles = ("step", "accuracy during training");
    section("retrieval", &finding, &lead)
        .with_all(charts(|screen| {
            draw(&curves, screen, 0.0, titles, "Right answers by step")
        }))
        .with(details([table(
            "The test, on sequences that were not trained on",
            headings.map(str::to_string).to_vec(),
            retrieval.models.iter().map(row).collect(),
        )]))
}
