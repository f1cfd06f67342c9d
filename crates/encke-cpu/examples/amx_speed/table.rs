//! The speed of every variant, beside the peak measured just before.

use crate::amx;
use crate::amx::Pool;
use crate::amx::tiles::Tiles;
use crate::numbers::{Numbers, job, time};
use crate::peak::peak;
use crate::variants::{backwards, forwards};

/// GFLOP/s of every variant.
pub fn table<T: Tiles>(real: bool, threads: usize, forward: bool) {
    let sizes: &[(usize, usize)] = match real {
        true => &[(1024, 8), (4096, 8), (16384, 2)],
        false => &[(64, 1), (192, 1)],
    };
    let scratch = Pool::default();
    for dim in [64, 128] {
        for &(tokens, heads) in sizes {
            for causal in [false, true] {
                let job = job(tokens, heads, dim, causal);
                let mut numbers = Numbers::new(&job);
                let operations = job.pairs() as f64 * dim as f64 * 1e-9;
                let peak = if real { peak::<T>(threads) } else { f64::NAN };
                println!(
                    "{} dim {dim}, {tokens} tokens, {heads} heads, {}; peak {peak:.0} GFLOP/s",
                    if forward { "forward" } else { "backward" },
                    if causal { "causal" } else { "full" },
                );
                let report = |name: &str, flop: f64, (best, median): (f64, f64)| {
                    println!(
                        "  {name:<56} {:7.0} GFLOP/s ({:4.1}%), median {:7.0}",
                        flop / best,
                        100.0 * flop / best / peak,
                        flop / median
                    );
                };
                let runs = |seconds: f64| match real {
                    true => ((0.3 / seconds) as usize).clamp(2, 8),
                    false => 1,
                };
                if forward {
                    for (name, run) in forwards::<T>() {
                        let (first, _) = time(1, || numbers.forward(run, &scratch, &job));
                        let times = time(runs(first), || numbers.forward(run, &scratch, &job));
                        report(name, 4.0 * operations, times);
                    }
                    continue;
                }
                numbers.forward(amx::forward::<T>, &scratch, &job);
                numbers.finish(&job);
                for (name, run) in backwards::<T>() {
                    let (first, _) = time(1, || numbers.backward(run, &scratch, &job));
                    let times = time(runs(first), || numbers.backward(run, &scratch, &job));
                    report(name, 10.0 * operations, times);
                }
            }
        }
    }
}
