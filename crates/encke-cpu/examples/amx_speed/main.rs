//! How fast the tile kernels are, and where their time goes: `cargo run --release -p encke-cpu
//! --example amx_speed -- [threads] [check|peak|phases|forward|backward|f32 ...]`.
//!
//! Checks every variant's answer first. Then, from one run and best of several: the peak of the
//! tiles (registers only, and fed from the first-level cache), the phases of the forward pass one
//! by one and one after the other, and GFLOP/s of all variants with the share of the peak that was
//! measured just before. Operations are counted as attention counts them (four per pair and
//! channel forward, ten backward).
//!
//! Variants compute in bf16, or with the word `f32` in that; phases are those of bf16.
//!
//! Without tiles it runs on emulated ones, with tiny sizes, to show that it works; its figures
//! then mean nothing.

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
        run::<internals::Hardware>(true);
    } else if internals::has_avx512() {
        println!("NO QUERY_TILES HERE: emulated ones, tiny sizes, figures that mean nothing");
        run::<internals::Emulated>(false);
    } else {
        println!("neither tiles nor AVX-512 here: nothing to measure");
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    println!("no tiles on this architecture");
}

/// Everything that the arguments ask for.
#[cfg(target_arch = "x86_64")]
fn run<T: internals::TileUnit>(real: bool) {
    let mut arguments = std::env::args().skip(1).peekable();
    let threads = arguments.peek().and_then(|word| word.parse().ok());
    if threads.is_some() {
        arguments.next();
    }
    let threads: usize = threads.unwrap_or(2);
    let (kind, wanted): (Vec<String>, Vec<String>) = arguments.partition(|word| word == "f32");
    let want = |what: &str| wanted.is_empty() || wanted.iter().any(|word| word == what);
    let wide = !kind.is_empty();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    pool.expect("threads").install(|| {
        println!("{} tiles, {threads} threads", T::NAME);
        if want("check") {
            match wide {
                true => check::check::<T, f32>(),
                false => check::check::<T, half::bf16>(),
            }
        }
        if real && want("peak") {
            peak::peaks::<T>(threads);
        }
        if want("phases") {
            phases::phases::<T>(real);
        }
        for (word, forward) in [("forward", true), ("backward", false)] {
            if want(word) {
                match wide {
                    true => table::table::<T, f32>(real, threads, forward),
                    false => table::table::<T, half::bf16>(real, threads, forward),
                }
            }
        }
    });
}
