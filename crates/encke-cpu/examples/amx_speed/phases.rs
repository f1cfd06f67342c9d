//! Time of each phase of a block.

use encke_cpu::internals::{Hardware, TileUnit};

use crate::block::{BLOCKS, BlockBench};
use crate::tensors::{BenchTensors, job, time};

/// Measures each phase of 32 queries and a block of keys, on one thread. The unit is the time of
/// one tile multiplication at the peak (16 cycles).
pub fn phases() {
    let rounds = 20_000;
    let (best, _) = time(7, || {
        // SAFETY: tiles are available.
        unsafe {
            Hardware::configure();
            Hardware::multiply_registers(100_000);
            Hardware::release();
        }
    });
    let unit = best / 400_000.0;
    println!(
        "phases of 32 queries, in tile multiplications (of {:.2} ns), one thread, best of 7",
        unit * 1e9
    );
    println!(
        " dim  keys  pack k,v   floor      qk softmax      pv     sum |  in turn  two in turn  \
         from L2"
    );
    for (dim, keys) in [
        (64, 32),
        (64, 64),
        (64, 128),
        (128, 64),
        (128, 128),
        (128, 256),
    ] {
        let tensors = BenchTensors::new(&job(keys.max(64), 1, dim, false));
        let mut bench = BlockBench::new(dim, keys);
        let mut units = |body: &mut dyn FnMut(&mut BlockBench)| {
            // SAFETY: tiles are available; they stay configured on this thread.
            unsafe { Hardware::configure() };
            let (best, _) = time(7, || (0..rounds).for_each(|_| body(&mut bench)));
            best / rounds as f64 / unit
        };
        let pack = units(&mut |bench| bench.pack_keys(&tensors, dim));
        // SAFETY: tiles are configured, here and below.
        let qk = units(&mut |bench| unsafe { bench.qk(0, 0) });
        let softmax = units(&mut |bench| bench.softmax(0));
        // SAFETY: as above.
        let pv = units(&mut |bench| unsafe { bench.pv(0, 0) });
        // SAFETY: as above.
        let one = units(&mut |bench| unsafe {
            bench.qk(0, 0);
            bench.softmax(0);
            bench.pv(0, 0);
        });
        // SAFETY: as above.
        let two = units(&mut |bench| unsafe {
            bench.qk(1, 0);
            bench.softmax(0);
            bench.pv(0, 0);
            bench.qk(0, 0);
            bench.softmax(1);
            bench.pv(1, 0);
        }) / 2.0;
        let mut block = 0;
        // SAFETY: as above.
        let streamed = units(&mut |bench| unsafe {
            bench.qk(0, block);
            bench.softmax(0);
            bench.pv(0, block);
            block = (block + 1) % BLOCKS;
        });
        // SAFETY: as above.
        unsafe { Hardware::release() };
        let floor = (keys / 16 * 2 * (dim / 32) * 2) as f64;
        println!(
            "{dim:>4} {keys:>5} {pack:>9.1} {floor:>7.1} {qk:>7.1} {softmax:>7.1} {pv:>7.1} \
             {:>7.1} | {one:>8.1} {two:>12.1} {streamed:>8.1}",
            qk + softmax + pv,
        );
    }
}
