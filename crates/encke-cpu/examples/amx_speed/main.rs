//! Benchmark of the tile kernels:
//! `cargo run --release -p encke-cpu --example amx_speed -- [THREADS] [PART ...] [f32]`,
//! where PART is check, peak, phases, forward or backward; without any, all of them run.
//!
//! First it checks the results of every variant. Then it measures, best of several runs: the peak
//! of the tiles (from registers only, and fed from the L1 cache), the phases of the forward pass
//! separately and in sequence, and GFLOP/s of all variants with their share of the peak that was
//! measured just before. Attention counts four operations per pair and channel forward, and ten
//! backward.
//!
//! Variants compute in bf16, or in f32 if the arguments include `f32`; phases are always bf16.

#[cfg(target_arch = "x86_64")]
mod block;
#[cfg(target_arch = "x86_64")]
mod check;
#[cfg(target_arch = "x86_64")]
mod memory;
#[cfg(target_arch = "x86_64")]
mod peak;
#[cfg(target_arch = "x86_64")]
mod phases;
#[cfg(target_arch = "x86_64")]
mod table;
#[cfg(target_arch = "x86_64")]
mod tensors;
#[cfg(target_arch = "x86_64")]
mod variants;

#[cfg(target_arch = "x86_64")]
use encke_cpu::internals;

#[cfg(target_arch = "x86_64")]
fn main() {
    if internals::available() {
        run();
    } else {
        println!("no tiles on this machine: nothing to measure");
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    println!("no tiles on this architecture");
}

/// Runs the parts that the arguments name.
#[cfg(target_arch = "x86_64")]
fn run() {
    let mut arguments = std::env::args().skip(1).peekable();
    let threads = arguments.peek().and_then(|word| word.parse().ok());
    if threads.is_some() {
        arguments.next();
    }
    let threads: usize = threads.unwrap_or(2);
    let (f32_words, parts): (Vec<String>, Vec<String>) = arguments.partition(|word| word == "f32");
    let selected = |part: &str| parts.is_empty() || parts.iter().any(|word| word == part);
    let in_f32 = !f32_words.is_empty();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    pool.expect("threads").install(|| {
        println!("{threads} threads");
        if selected("check") {
            match in_f32 {
                true => check::check::<f32>(),
                false => check::check::<half::bf16>(),
            }
        }
        if selected("peak") {
            peak::peaks(threads);
        }
        if selected("phases") {
            phases::phases();
        }
        for (word, forward) in [("forward", true), ("backward", false)] {
            if selected(word) {
                match in_f32 {
                    true => table::table::<f32>(forward),
                    false => table::table::<half::bf16>(forward),
                }
            }
        }
    });
}
