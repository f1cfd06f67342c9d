//! The second table: memory of the rank that holds most, by component and ring size.

use anyhow::Result;
use encke::explain::bytes;
use encke::plan::program::Component;
use encke::{Attention, DType, Pattern, RankMemory, Shape};
use encke_lab::memory_table;
use encke_lab::tensors::RandomTensors;
use encke_lab::terminal::{Paint, bar, say};

use super::{RINGS, SEED, print_question};

const INTRODUCTION: &str = "\
4,096 tokens, dense causal attention, f32. Bytes of the rank that holds most,
planned before anything runs, and allocated. Travelling buffers hold rows of other
ranks, one being read while the next is received; the carry is the running softmax
of the rank's own queries; upstream are the inputs of the backward pass. The
workspace is scratch memory of the kernel.
";

/// Prints the tables.
pub fn show(paint: Paint) -> Result<()> {
    print_question(paint, "2. What does a rank hold?", INTRODUCTION)?;
    let shape = Shape::new(1, 4096, 4, 2, 32)?;
    let tensors = RandomTensors::new(&shape, DType::F32, SEED)?;
    let (q, k, v) = tensors.views();
    let progress = bar(RINGS.len());
    let (mut forward_rows, mut backward_rows) = (Vec::new(), Vec::new());
    for ranks in RINGS {
        progress.set_message(format!("ring of {ranks}"));
        let pattern = Pattern::dense().causal(true);
        let attention = Attention::builder().pattern(pattern).ranks(ranks).build()?;
        let forward = attention.forward(&q, &k, &v)?;
        let kept = &forward.checkpoint;
        let backward = attention.backward(&q, &k, &v, kept, &tensors.dout.view(), None)?;
        forward_rows.extend(largest(forward.report.memory).map(|m| (ranks, m)));
        backward_rows.extend(largest(backward.report.memory).map(|m| (ranks, m)));
        progress.inc(1);
    }
    progress.finish_and_clear();
    for (pass, rows) in [("forward", &forward_rows), ("backward", &backward_rows)] {
        let rows = rows.iter().map(|(ranks, m)| (ranks.to_string(), m));
        let heading = format!("{pass}, ranks:");
        let table = memory_table::by_component(2, &heading, &rows.collect::<Vec<_>>());
        say(&format!("\n{table}"))?;
    }
    if let (Some((_, one)), Some((p, many))) = (forward_rows.first(), forward_rows.last()) {
        let (one, many) = (bytes(kv_bytes(one)), bytes(kv_bytes(many)));
        say(&format!(
            "\n  Keys and values, own and travelling: {one} on 1 rank, {many} on each of {p}:\n  \
             O(n/p). After an all-gather every rank would hold {one}, for any p.\n"
        ))?;
    }
    Ok(())
}

/// The rank that holds most.
fn largest(memory: Vec<RankMemory>) -> Option<RankMemory> {
    memory.into_iter().max_by_key(RankMemory::planned_bytes)
}

/// Bytes of keys and values, own and travelling.
fn kv_bytes(memory: &RankMemory) -> usize {
    let of = |component| memory.planned.get(&component).copied().unwrap_or(0);
    of(Component::OwnKv) + of(Component::TravellingKv)
}
