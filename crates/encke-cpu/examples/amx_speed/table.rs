//! The speed of every variant, and its share of the peak measured just before.

use encke_core::job::Job;
use encke_cpu::internals::{Hardware, PagePool, forward};

use crate::peak::peak;
use crate::tensors::{BenchElement, BenchTensors, job, time};
use crate::variants::{BackwardFn, ForwardFn, backwards, forwards};

/// One call of a variant.
type BenchBody<'a, N> = Box<dyn Fn(&mut BenchTensors<N>) + 'a>;

fn forward_body<'a, N: BenchElement>(
    run: ForwardFn<N>,
    scratch: &'a PagePool,
    job: &'a Job,
) -> BenchBody<'a, N> {
    Box::new(move |tensors| tensors.forward(run, scratch, job))
}

fn backward_body<'a, N: BenchElement>(
    run: BackwardFn<N>,
    scratch: &'a PagePool,
    job: &'a Job,
) -> BenchBody<'a, N> {
    Box::new(move |tensors| tensors.backward(run, scratch, job))
}

/// The shortest and the median time of each variant. Runs of different variants alternate, because
/// the speed of a machine changes from second to second by more than variants differ.
fn alternate<N>(runs: &[BenchBody<'_, N>], tensors: &mut BenchTensors<N>) -> Vec<(f64, f64)> {
    let rounds = 9;
    let mut seconds = vec![Vec::new(); runs.len()];
    for _ in 0..rounds {
        for (run, seconds) in runs.iter().zip(&mut seconds) {
            seconds.push(time(1, || run(tensors)).0);
        }
    }
    let summary = |mut seconds: Vec<f64>| {
        seconds.sort_by(f64::total_cmp);
        (seconds[0], seconds[rounds / 2])
    };
    seconds.into_iter().map(summary).collect()
}

/// GFLOP/s of every variant.
pub fn table<N: BenchElement>(is_forward: bool) {
    let scratch = PagePool::default();
    for dim in [64, 128] {
        for (tokens, heads) in [(1024, 8), (4096, 8), (16384, 2)] {
            for causal in [false, true] {
                let job = job(tokens, heads, dim, causal);
                let mut tensors = BenchTensors::<N>::new(&job);
                let operations = job.pairs() as f64 * dim as f64 * 1e-9;
                let peak = peak();
                println!(
                    "{} {} dim {dim}, {tokens} tokens, {heads} heads, {}; peak {peak:.0} GFLOP/s",
                    N::DTYPE,
                    if is_forward { "forward" } else { "backward" },
                    if causal { "causal" } else { "full" },
                );
                if !is_forward {
                    tensors.forward(forward::<Hardware, N>, &scratch, &job);
                    tensors.finish(&job);
                }
                let (names, runs): (Vec<_>, Vec<BenchBody<'_, N>>) = match is_forward {
                    true => forwards::<N>()
                        .into_iter()
                        .map(|(name, run)| (name, forward_body(run, &scratch, &job)))
                        .unzip(),
                    false => backwards::<N>()
                        .into_iter()
                        .map(|(name, run)| (name, backward_body(run, &scratch, &job)))
                        .unzip(),
                };
                let flop = if is_forward { 4.0 } else { 10.0 } * operations;
                for (name, (best, median)) in names.iter().zip(alternate(&runs, &mut tensors)) {
                    println!(
                        "  {name:<56} {:7.0} GFLOP/s ({:4.1}%), median {:7.0}",
                        flop / best,
                        100.0 * flop / best / peak,
                        flop / median
                    );
                }
            }
        }
    }
}
