//! The page: a section for rings, one for patterns, one for the retrieval task.

use anyhow::Result;
use encke::explain::{bytes, grouped};
use encke_lab::charts::axis::Screen;
use encke_lab::charts::html::{self, charts, details, section, table};
use encke_lab::charts::markup::Markup;
use encke_lab::format::percent;

use super::curves::{Curve, draw};
use crate::record::{Record, Retrieval, Training};
use crate::retrieval::Reach;

/// The whole document.
pub fn document(records: &[Record]) -> Result<String> {
    let trained = records.iter().filter_map(|record| match record {
        Record::Training(training) => Some(training),
        Record::Retrieval(_) => None,
    });
    let mut groups: Vec<Vec<&Training>> = Vec::new();
    for run in trained {
        let same = |group: &&mut Vec<&Training>| group[0].settings == run.settings;
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
        .with(Markup::new("header").with(Markup::new("h1").text("A LongNet that learns")).with(
            Markup::new("p").text(
                "A byte-level language model whose attention is Encke’s. Everything below was trained and \
                 recorded; nothing is drawn by hand.",
            ),
        ));
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
        if let Record::Retrieval(retrieval) = record {
            main = main.with(retrieved(retrieval));
        }
    }
    let data = serde_json::to_string(records)?;
    Ok(html::document(
        "longnet: a LongNet that learns",
        main,
        &data,
    ))
}

fn who(run: &Training) -> String {
    match run.processes {
        true => format!("p = {}, processes", run.ranks),
        false => format!("p = {}", run.ranks),
    }
}

fn pattern(run: &Training) -> String {
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

fn losses(name: String, run: &Training) -> Curve {
    let points = run.losses.iter().enumerate();
    Curve {
        name,
        points: points
            .map(|(step, loss)| ((step + 1) as f64, *loss))
            .collect(),
    }
}

/// The largest difference of a run's losses from another one's, relative, and that of the last step.
pub fn apart(run: &Training, from: &Training) -> (f64, f64) {
    let pairs = run.losses.iter().zip(&from.losses);
    let apart: Vec<f64> = pairs.map(|(a, b)| (a - b).abs() / b.abs()).collect();
    (
        apart.iter().copied().fold(0.0, f64::max),
        apart.last().copied().unwrap_or(0.0),
    )
}

fn median(seconds: &[f64]) -> f64 {
    let mut sorted = seconds.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

/// Runs that differ in their ring alone.
fn rings(at: usize, group: &[&Training]) -> Markup {
    let first = group[0];
    let last = group[1..]
        .iter()
        .map(|run| apart(run, first).1)
        .fold(0.0, f64::max);
    let steps = group.iter().map(|run| run.losses.len()).min().unwrap_or(0);
    let finding = match last {
        0.0 => format!("After {steps} steps the losses of all rings have the same bits"),
        last => format!("After {steps} steps the losses of all rings agree to {last:.0e}"),
    };
    let lead = format!(
        "The loss, in nats for each byte, over {} tokens a step with the branches {}; lines that \
         coincide are drawn thinner and thinner.",
        grouped(first.settings.tokens as u128),
        pattern(first)
    );
    let curves: Vec<Curve> = group.iter().map(|run| losses(who(run), run)).collect();
    let row = |run: &&Training| {
        let (largest, last) = apart(run, first);
        vec![
            who(run),
            run.losses
                .last()
                .map_or(String::new(), |loss| format!("{loss:.6}")),
            format!("{last:.1e}"),
            format!("{largest:.1e}"),
            format!("{:.3} s", median(&run.seconds)),
            bytes(run.rank_bytes),
        ]
    };
    let headings = [
        "ring",
        "last loss",
        "off the first, last step",
        "at most",
        "median step",
        "a rank’s attention",
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

fn curve_chart(curves: &[Curve], screen: Screen, words: &str) -> Markup {
    draw(curves, screen, 0.0, ("step", "loss, nats a byte"), words)
}

/// Runs that differ in more than their ring: the first of each group.
fn patterns(groups: &[Vec<&Training>]) -> Markup {
    let runs: Vec<&Training> = groups.iter().map(|group| group[0]).collect();
    let last = |run: &Training| run.losses.last().copied().unwrap_or(0.0);
    let finding = match runs[..] {
        [only] => format!("The loss falls to {:.3} nats a byte", last(only)),
        _ => {
            let each: Vec<String> = runs
                .iter()
                .map(|run| format!("{:.3} ({})", last(run), pattern(run)))
                .collect();
            format!("Last losses: {}", each.join(", "))
        }
    };
    let lead = "One line for each model and pattern: branches are (segment length, dilation). Each step is \
                one sequence, so the lines go up and down together with what they read.";
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
    let row = |run: &&Training| {
        vec![
            pattern(run),
            grouped(run.settings.tokens as u128),
            run.settings.sizes.layers.to_string(),
            grouped(run.weights as u128),
            run.losses.len().to_string(),
            format!("{:.6}", last(run)),
            format!("{:.3} s", median(&run.seconds)),
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
fn retrieved(retrieval: &Retrieval) -> Markup {
    let name = |reach| match reach {
        Reach::Dilated => "local + dilated",
        Reach::Local => "local only",
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
        "Asked for what it read {} tokens before or more, a model answers: {}",
        grouped(nearest as u128),
        shares.join(", ")
    );
    let lead = format!(
        "A fact stands early in {} tokens of noise, questions at their end. Both models have local segments \
         of {}; one has a branch with dilation {} beside them. Guessing is right {} of the time. They \
         learn on short sequences first; the steps are those of all lengths.",
        grouped(retrieval.tokens as u128),
        retrieval.local,
        retrieval.dilation,
        percent(retrieval.chance)
    );
    let curve = |model: &crate::retrieval::Learned| Curve {
        name: name(model.reach).to_string(),
        points: model
            .course
            .iter()
            .map(|(_, step, _, share)| (*step as f64, *share))
            .collect(),
    };
    let curves: Vec<Curve> = retrieval.models.iter().map(curve).collect();
    let row = |model: &crate::retrieval::Learned| {
        vec![
            name(model.reach).to_string(),
            model.right.to_string(),
            model.asked.to_string(),
            percent(model.share()),
            model.steps.iter().sum::<usize>().to_string(),
        ]
    };
    let headings = ["model", "right", "of", "share", "steps"];
    let titles = ("step", "share of right answers while learning");
    section("retrieval", &finding, &lead)
        .with_all(charts(|screen| {
            draw(&curves, screen, 0.0, titles, "Right answers by step")
        }))
        .with(details([table(
            "The examination, on sequences no model has seen",
            headings.map(str::to_string).to_vec(),
            retrieval.models.iter().map(row).collect(),
        )]))
}
