//! The speed of every variant, beside the peak measured just before.

use encke_core::job::Job;

use crate::amx;
use crate::amx::Pool;
use crate::amx::tiles::Tiles;
use crate::numbers::{Numbers, Timed, job, time};
use crate::peak::peak;
use crate::variants::{Backward, Forward, backwards, forwards};

/// One call of a variant.
type Body<'a, N> = Box<dyn Fn(&mut Numbers<N>) + 'a>;

fn forward_body<'a, N: Timed>(run: Forward<N>, scratch: &'a Pool, job: &'a Job) -> Body<'a, N> {
    Box::new(move |numbers| numbers.forward(run, scratch, job))
}

fn backward_body<'a, N: Timed>(run: Backward<N>, scratch: &'a Pool, job: &'a Job) -> Body<'a, N> {
    Box::new(move |numbers| numbers.backward(run, scratch, job))
}

/// The shortest and the median time of each variant, taken in turns: how fast a machine is changes
/// from one second to the next, and by more than variants differ.
fn turns<N>(real: bool, runs: &[Body<'_, N>], numbers: &mut Numbers<N>) -> Vec<(f64, f64)> {
    let rounds = if real { 9 } else { 1 };
    let mut seconds = vec![Vec::new(); runs.len()];
    for _ in 0..rounds {
        for (run, seconds) in runs.iter().zip(&mut seconds) {
            seconds.push(time(1, || run(numbers)).0);
        }
    }
    let summary = |mut seconds: Vec<f64>| {
        seconds.sort_by(f64::total_cmp);
        (seconds[0], seconds[rounds / 2])
    };
    seconds.into_iter().map(summary).collect()
}

/// GFLOP/s of every variant.
pub fn table<T: Tiles, N: Timed>(real: bool, threads: usize, forward: bool) {
    let sizes: &[(usize, usize)] = match real {
        true => &[(1024, 8), (4096, 8), (16384, 2)],
        false => &[(64, 1), (192, 1)],
    };
    let scratch = Pool::default();
    for dim in [64, 128] {
        for &(tokens, heads) in sizes {
            for causal in [false, true] {
                let job = job(tokens, heads, dim, causal);
                let mut numbers = Numbers::<N>::new(&job);
                let operations = job.pairs() as f64 * dim as f64 * 1e-9;
                let peak = if real { peak::<T>(threads) } else { f64::NAN };
                println!(
                    "{} {} dim {dim}, {tokens} tokens, {heads} heads, {}; peak {peak:.0} GFLOP/s",
                    N::DTYPE,
                    if forward { "forward" } else { "backward" },
                    if causal { "causal" } else { "full" },
                );
                if !forward {
                    numbers.forward(amx::forward::<T, N>, &scratch, &job);
                    numbers.finish(&job);
                }
                let (names, runs): (Vec<_>, Vec<Body<'_, N>>) = match forward {
                    true => forwards::<T, N>()
                        .into_iter()
                        .map(|(name, run)| (name, forward_body(run, &scratch, &job)))
                        .unzip(),
                    false => backwards::<T, N>()
                        .into_iter()
                        .map(|(name, run)| (name, backward_body(run, &scratch, &job)))
                        .unzip(),
                };
                let flop = if forward { 4.0 } else { 10.0 } * operations;
                for (name, (best, median)) in names.iter().zip(turns(real, &runs, &mut numbers)) {
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
