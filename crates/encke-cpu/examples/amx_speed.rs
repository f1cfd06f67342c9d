//! How fast the tile kernels are, and where their time goes:
//! `cargo run --release -p encke-cpu --example amx_speed -- [threads] [check|peak|phases|forward|backward ...]`.
//!
//! Checks every variant's answer first. Then, from one run and best of several: the peak of the
//! tiles (registers only, and fed from the first-level cache), the phases of the forward pass one
//! by one and one after the other, and GFLOP/s of all variants with the share of the peak that was
//! measured just before. Operations are counted as attention counts them (four per pair and
//! channel forward, ten backward).
//!
//! Without tiles it runs on emulated ones, with tiny sizes, to show that it works; its figures
//! then mean nothing.

#[cfg(target_arch = "x86_64")]
#[allow(dead_code, unused_imports)]
#[path = "../src/amx/mod.rs"]
mod amx;
#[cfg(target_arch = "x86_64")]
#[allow(dead_code)]
#[path = "../src/real.rs"]
mod real;
#[cfg(target_arch = "x86_64")]
#[allow(dead_code)]
#[path = "../src/schedule.rs"]
mod schedule;
#[cfg(target_arch = "x86_64")]
#[allow(dead_code)]
#[path = "../src/shared.rs"]
mod shared;
#[cfg(target_arch = "x86_64")]
#[allow(dead_code)]
#[path = "../src/target.rs"]
mod target;
#[cfg(target_arch = "x86_64")]
#[allow(dead_code)]
#[path = "../src/vector.rs"]
mod vector;

#[cfg(target_arch = "x86_64")]
fn main() {
    if amx::available() {
        speed::all::<amx::Hardware>(true);
    } else if amx::detect::vectors() {
        println!("NO TILES HERE: emulated ones, tiny sizes, figures that mean nothing");
        speed::all::<amx::emulated::Emulated>(false);
    } else {
        println!("neither tiles nor AVX-512 here: nothing to measure");
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    println!("no tiles on this architecture");
}

#[cfg(target_arch = "x86_64")]
mod speed {
    use super::amx::backward::backward_shaped;
    use super::amx::forward::forward_shaped;
    use super::amx::pack::{self, Sign, Slabs, Source};
    use super::amx::shape::{BackwardShape, Shape, Short};
    use super::amx::softmax::{self, Block, Lanes, Running, Scale};
    use super::amx::tiles::{Product, ROW_BYTES, SLAB_BYTES, TILE_BYTES, Tiles};
    use super::amx::{self, Given, Pool};
    use super::shared::Shared;
    use super::target::Target;
    use encke_core::conformance::Random;
    use encke_core::dtype::Slice;
    use encke_core::job::{Causal, Job, Operand};
    use encke_core::kernel::{Carry, Gradients, Kernel, Upstream};
    use encke_core::naive::NaiveKernel;
    use encke_core::{DType, Data};
    use half::bf16;
    use std::hint::black_box;
    use std::time::Instant;

    type Forward = fn(&Pool, &Job, [&[bf16]; 3], Target<'_, f32>);
    type Backward = fn(&Pool, &Job, Given<'_>, &mut [f32], &mut [f32], &mut [f32]);

    /// A list of names and functions, from shapes that differ from the usual in the given sizes.
    macro_rules! variants {
        ($shape:ident, $run:ident as $kind:ty, [$({$($size:ident: $value:expr),*}),* $(,)?]) => {
            vec![$({
                struct Variant;
                impl $shape for Variant {
                    $(variants!(@size $size, $value);)*
                }
                let name = concat!($(stringify!($size), " ", stringify!($value), " "),*);
                (name, $run::<T, Variant> as $kind)
            }),*]
        };
        (@size PREFETCH, $value:expr) => { const PREFETCH: bool = $value; };
        (@size $size:ident, $value:expr) => { const $size: usize = $value; };
    }

    fn forwards<T: Tiles>() -> Vec<(&'static str, Forward)> {
        variants!(
            Shape,
            forward_shaped as Forward,
            [
                {KEYS: 256},
                {KEYS: 128},
                {KEYS: 64},
                {KEYS: 128, PREFETCH: false},
                {KEYS: 256, PREFETCH: false},
                {KEYS: 512},
                {KEYS: 256, PACKED: 512, NUMBERS: 1 << 17},
                {KEYS: 128, PACKED: 512, NUMBERS: 1 << 17},
                {KEYS: 64, PACKED: 512, NUMBERS: 1 << 17},
                {KEYS: 256, PACKED: 2048},
                {KEYS: 256, DEGREE: 3},
            ]
        )
    }

    fn backwards<T: Tiles>() -> Vec<(&'static str, Backward)> {
        variants!(
            BackwardShape,
            backward_shaped as Backward,
            [
                {KEYS: 64},
                {KEYS: 64, TILES: 8},
                {KEYS: 64, NUMBERS: 1 << 16},
                {KEYS: 64, TILES: 8, NUMBERS: 1 << 16},
                {KEYS: 128},
                {KEYS: 128, NUMBERS: 1 << 16},
                {KEYS: 32, TILES: 8},
                {KEYS: 128, TILES: 2},
            ]
        )
    }

    pub fn all<T: Tiles>(real: bool) {
        let mut arguments = std::env::args().skip(1).peekable();
        let threads = arguments.peek().and_then(|word| word.parse().ok());
        if threads.is_some() {
            arguments.next();
        }
        let threads: usize = threads.unwrap_or(2);
        let wanted: Vec<String> = arguments.collect();
        let want = |what: &str| wanted.is_empty() || wanted.iter().any(|word| word == what);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        pool.expect("threads").install(|| {
            println!("{} tiles, {threads} threads", T::NAME);
            if want("check") {
                check::<T>();
            }
            if real && want("peak") {
                peaks::<T>(threads);
            }
            if want("phases") {
                phases::<T>(real);
            }
            if want("forward") {
                table::<T>(real, threads, true);
            }
            if want("backward") {
                table::<T>(real, threads, false);
            }
        });
    }

    /// The shortest and the median time of `runs` runs, in seconds.
    fn time(runs: usize, mut body: impl FnMut()) -> (f64, f64) {
        let mut seconds: Vec<f64> = (0..runs)
            .map(|_| {
                let start = Instant::now();
                body();
                start.elapsed().as_secs_f64()
            })
            .collect();
        seconds.sort_by(f64::total_cmp);
        (seconds[0], seconds[runs / 2])
    }

    fn job(tokens: usize, heads: usize, dim: usize, causal: bool) -> Job {
        let operand = |unit: usize| Operand {
            offset: 0,
            batch: 0,
            segment: 0,
            row: heads * unit,
            heads: (0..heads).map(|head| head * unit).collect(),
        };
        let mask = Causal {
            query: 0,
            query_step: 1,
            key: 0,
            key_step: 1,
        };
        Job {
            batch: 1,
            segments: 1,
            queries: tokens,
            keys: tokens,
            heads,
            dim,
            q: operand(dim),
            k: operand(dim),
            cells: operand(1),
            dq: None,
            causal: causal.then_some(mask),
            scale: 1.0 / (dim as f64).sqrt(),
            gain: 1.0,
        }
    }

    /// A job's numbers, in and out.
    struct Numbers {
        given: [Vec<bf16>; 4],
        acc: Vec<f32>,
        m: Vec<f32>,
        l: Vec<f32>,
        lse: Vec<f32>,
        delta: Vec<f32>,
        gradients: [Vec<f32>; 3],
    }

    impl Numbers {
        fn new(job: &Job) -> Numbers {
            let cells = job.queries * job.heads;
            let mut random = Random::new(7);
            let mut numbers = || {
                let number = |_| bf16::from_f64(1.7 * random.unit());
                (0..cells * job.dim).map(number).collect::<Vec<bf16>>()
            };
            Numbers {
                given: [numbers(), numbers(), numbers(), numbers()],
                acc: vec![0.0; cells * job.dim],
                m: vec![f32::NEG_INFINITY; cells],
                l: vec![0.0; cells],
                lse: vec![0.0; cells],
                delta: vec![0.0; cells],
                gradients: [(); 3].map(|()| vec![0.0; cells * job.dim]),
            }
        }

        fn forward(&mut self, run: Forward, pool: &Pool, job: &Job) {
            self.acc.fill(0.0);
            self.m.fill(f32::NEG_INFINITY);
            self.l.fill(0.0);
            let [q, k, v, _] = self.given.each_ref().map(Vec::as_slice);
            let carry = Carry {
                acc: Shared::new(&mut self.acc),
                m: Shared::new(&mut self.m),
                l: Shared::new(&mut self.l),
            };
            run(pool, job, [q, k, v], Target::Carry(carry));
        }

        /// What backward is told, from what forward left.
        fn finish(&mut self, job: &Job) {
            for cell in 0..self.m.len() {
                let row = cell * job.dim..(cell + 1) * job.dim;
                let pairs = self.acc[row.clone()].iter().zip(&self.given[3][row]);
                let product: f32 = pairs.map(|(x, y)| x * y.to_f32()).sum();
                self.lse[cell] = self.m[cell] + self.l[cell].ln();
                self.delta[cell] = product / self.l[cell];
            }
        }

        fn backward(&mut self, run: Backward, pool: &Pool, job: &Job) {
            let [q, k, v, dout] = self.given.each_ref().map(Vec::as_slice);
            let given = Given {
                q,
                k,
                v,
                dout,
                lse: &self.lse,
                delta: &self.delta,
            };
            let [dq, dk, dv] = &mut self.gradients;
            run(pool, job, given, dq, dk, dv);
        }
    }

    /// The largest difference, relative to the largest number.
    fn error(got: &[f32], expected: &Data) -> f64 {
        let expected = expected.to_f64();
        let size = expected.iter().fold(0.0, |size: f64, x| size.max(x.abs()));
        let pairs = got.iter().zip(&expected);
        pairs.fold(0.0, |worst: f64, (x, y)| {
            worst.max((f64::from(*x) - y).abs())
        }) / size
    }

    /// Every variant against the oracle, at a size that crosses its blocks.
    fn check<T: Tiles>() {
        let pool = Pool::default();
        for (dim, causal) in [(64, true), (128, false), (40, true)] {
            let job = job(333, 2, dim, causal);
            let mut numbers = Numbers::new(&job);
            let cells = job.queries * job.heads;
            let zeros = |count: usize| Data::zeros(DType::F32, count);
            let mut carry = Carry {
                acc: zeros(cells * dim),
                m: Data::F32(vec![f32::NEG_INFINITY; cells]),
                l: zeros(cells),
            };
            let [q, k, v, dout] = numbers.given.clone().map(Data::Bf16);
            NaiveKernel
                .forward(&job, q.as_slice(), k.as_slice(), v.as_slice(), &mut carry)
                .unwrap();
            let mut worst = [0.0f64; 2];
            let (mut out, mut lse) = (zeros(cells * dim), zeros(cells));
            NaiveKernel
                .finish(cells, dim, 1.0, &carry, &mut out, &mut lse)
                .unwrap();
            for (name, run) in forwards::<T>() {
                numbers.forward(run, &pool, &job);
                let mut mean = numbers.acc.clone();
                for (row, l) in mean.chunks_mut(dim).zip(&numbers.l) {
                    row.iter_mut().for_each(|x| *x /= l);
                }
                let off = error(&mean, &out);
                assert!(off < 5e-3, "{name}, dim {dim}: error {off:e}");
                worst[0] = worst[0].max(off);
            }
            numbers.finish(&job);
            let [mut dq, mut dk, mut dv] = [(); 3].map(|()| zeros(cells * dim));
            let upstream = Upstream {
                dout: dout.as_slice(),
                lse: Slice::F32(&numbers.lse),
                delta: Slice::F32(&numbers.delta),
            };
            let gradients = Gradients {
                dq: &mut dq,
                dk: &mut dk,
                dv: &mut dv,
            };
            NaiveKernel
                .backward(
                    &job,
                    q.as_slice(),
                    k.as_slice(),
                    v.as_slice(),
                    upstream,
                    gradients,
                )
                .unwrap();
            for (name, run) in backwards::<T>() {
                numbers.gradients.iter_mut().for_each(|data| data.fill(0.0));
                numbers.backward(run, &pool, &job);
                for (got, expected) in numbers.gradients.iter().zip([&dq, &dk, &dv]) {
                    let off = error(got, expected);
                    assert!(off < 1e-2, "{name}, dim {dim}: error {off:e}");
                    worst[1] = worst[1].max(off);
                }
            }
            println!(
                "checked, dim {dim}: largest error of all variants {:.1e} forward, {:.1e} backward",
                worst[0], worst[1]
            );
        }
    }

    const FLOP_PER_TILE: f64 = 16.0 * 16.0 * 32.0 * 2.0;

    /// GFLOP/s of tiles from registers, on all threads of the pool together.
    fn peak<T: Tiles>(threads: usize) -> f64 {
        const ROUNDS: usize = 200_000;
        let (best, _) = time(5, || {
            rayon::broadcast(|_| {
                // SAFETY: only called with tiles of the processor.
                unsafe {
                    T::configure();
                    amx::Hardware::multiply_registers(ROUNDS);
                    T::release();
                }
            });
        });
        threads as f64 * 4.0 * ROUNDS as f64 * FLOP_PER_TILE / best * 1e-9
    }

    fn peaks<T: Tiles>(threads: usize) {
        const ROUNDS: usize = 20_000;
        let (best, _) = time(5, || {
            rayon::broadcast(|_| {
                let mut memory = Memory::new(16);
                let at = memory.at();
                // SAFETY: the product stays in the memory, and tiles are configured.
                unsafe {
                    T::configure();
                    for _ in 0..ROUNDS {
                        T::multiply::<false>(Product {
                            a: at,
                            a_step: SLAB_BYTES,
                            b: [at.wrapping_add(12 << 10), at.wrapping_add(13 << 10)],
                            b_step: SLAB_BYTES,
                            b_row: ROW_BYTES,
                            c: [at.wrapping_add(24 << 10), at.wrapping_add(26 << 10)],
                            steps: 6,
                        });
                    }
                    T::release();
                }
            });
        });
        let fed = threads as f64 * 24.0 * ROUNDS as f64 * FLOP_PER_TILE / best * 1e-9;
        println!(
            "peak: {:.0} GFLOP/s from registers, {fed:.0} fed from the first-level cache \
             (products of 6 steps, sums stored)",
            peak::<T>(threads)
        );
    }

    /// Memory that begins at a page.
    struct Memory(Vec<Page>);

    #[derive(Clone)]
    #[repr(C, align(4096))]
    struct Page([u8; 4096]);

    impl Memory {
        fn new(pages: usize) -> Memory {
            Memory(vec![Page([0; 4096]); pages])
        }

        fn at(&mut self) -> *mut u8 {
            self.0.as_mut_ptr().cast()
        }
    }

    /// Blocks of keys that do not fit the first-level cache together, but the second.
    const BLOCKS: usize = 16;

    /// Two tiles of queries and some blocks of keys; one block fits the first-level cache.
    struct Bench {
        q: Memory,
        k: Memory,
        v: Memory,
        sums: Memory,
        scores: Memory,
        steps: usize,
        keys: usize,
        running: Running,
    }

    impl Bench {
        fn new(dim: usize, keys: usize) -> Bench {
            let steps = dim / 32;
            // Odd numbers of pages keep the buffers from looking alike.
            let memory = |slabs: usize| Memory::new(slabs.div_ceil(2) | 1);
            let mut bench = Bench {
                q: memory(2 * steps),
                k: memory(BLOCKS * keys / 32 * steps),
                v: memory(BLOCKS * keys / 32 * steps),
                sums: memory(2 * 2 * steps),
                scores: memory(2 * 2 * keys / 32),
                steps,
                keys,
                running: Running {
                    m: Lanes([f32::NEG_INFINITY; 32]),
                    l: Lanes([0.0; 32]),
                    visible: Lanes([i32::MAX; 32]),
                },
            };
            let numbers = Numbers::new(&job(keys.max(64), 1, dim, false));
            bench.pack(&numbers, dim);
            let bytes = bench.block_bytes();
            for memory in [&mut bench.k, &mut bench.v] {
                for block in 1..BLOCKS {
                    // SAFETY: the memory has this many blocks.
                    unsafe {
                        let to = memory.at().add(block * bytes);
                        std::ptr::copy_nonoverlapping(memory.at(), to, bytes);
                    }
                }
            }
            bench
        }

        fn pack(&mut self, numbers: &Numbers, dim: usize) {
            for tile in 0..2 {
                let source = source(&numbers.given[0], dim, tile * 32);
                let to = slabs(self.q.at().wrapping_add(tile * self.steps * SLAB_BYTES));
                // SAFETY: the memory has these slabs, and the vectors are there.
                unsafe { pack::lanes(&source, Sign::Plus, to) };
            }
            self.pack_keys(numbers, dim);
        }

        fn pack_keys(&mut self, numbers: &Numbers, dim: usize) {
            for step in 0..self.keys / 32 {
                let at = step * self.steps * SLAB_BYTES;
                // SAFETY: the memory has these slabs, and the vectors are there.
                unsafe {
                    let keys = source(&numbers.given[1], dim, step * 32);
                    pack::rows(&keys, slabs(self.k.at().wrapping_add(at)));
                    let values = source(&numbers.given[2], dim, step * 32);
                    pack::columns(&values, slabs(self.v.at().wrapping_add(at)));
                }
            }
        }

        fn block_bytes(&self) -> usize {
            self.keys / 32 * self.steps * SLAB_BYTES
        }

        fn buffer(&mut self, tile: usize) -> *mut u8 {
            let bytes = tile * 2 * self.keys / 32 * SLAB_BYTES;
            self.scores.at().wrapping_add(bytes)
        }

        /// # Safety
        /// Tiles are configured.
        unsafe fn qk<T: Tiles>(&mut self, tile: usize, block: usize) {
            let k = self.k.at().wrapping_add(block * self.block_bytes());
            let q = self.q.at().wrapping_add(tile * self.steps * SLAB_BYTES);
            for step in 0..self.keys / 32 {
                let c = self.buffer(tile).wrapping_add(2 * step * SLAB_BYTES);
                let a = step * self.steps * SLAB_BYTES;
                // SAFETY: all slabs are there, and tiles are configured.
                unsafe {
                    T::multiply::<false>(Product {
                        a: k.wrapping_add(a),
                        a_step: SLAB_BYTES,
                        b: [q, q.wrapping_add(TILE_BYTES)],
                        b_step: SLAB_BYTES,
                        b_row: ROW_BYTES,
                        c: [c, c.wrapping_add(SLAB_BYTES)],
                        steps: self.steps,
                    });
                }
            }
        }

        /// Fetches the given block meanwhile.
        fn softmax(&mut self, tile: usize, next: Option<usize>) {
            let (fetch, skip) = match next {
                None => (0, 0),
                Some(block) => (self.steps, block * self.block_bytes()),
            };
            let next = [self.k.at(), self.v.at()].map(|at| at.wrapping_add(skip).cast_const());
            let block = Block {
                scores: self.buffer(tile),
                steps: self.keys / 32,
                start: 0,
                masked: false,
                next,
                fetch,
            };
            // SAFETY: the scores are there, and so are the vectors.
            let rescale = unsafe {
                softmax::softmax::<Short>(
                    &block,
                    Scale::new(0.125),
                    &mut self.running,
                    softmax::EVERY,
                )
            };
            black_box(rescale);
        }

        /// # Safety
        /// Tiles are configured.
        unsafe fn pv<T: Tiles>(&mut self, tile: usize, block: usize) {
            let v = self.v.at().wrapping_add(block * self.block_bytes());
            let b = self.buffer(tile);
            let sums = tile * 2 * self.steps * SLAB_BYTES;
            for step in 0..self.steps {
                let c = self.sums.at().wrapping_add(sums + 2 * step * SLAB_BYTES);
                // SAFETY: all slabs are there, and tiles are configured.
                unsafe {
                    T::multiply::<true>(Product {
                        a: v.wrapping_add(step * SLAB_BYTES),
                        a_step: self.steps * SLAB_BYTES,
                        b: [b, b.wrapping_add(SLAB_BYTES)],
                        b_step: 2 * SLAB_BYTES,
                        b_row: 2 * ROW_BYTES,
                        c: [c, c.wrapping_add(SLAB_BYTES)],
                        steps: self.keys / 32,
                    });
                }
            }
        }
    }

    fn slabs(at: *mut u8) -> Slabs {
        Slabs {
            at,
            stride: SLAB_BYTES,
        }
    }

    fn source(
        numbers: &[bf16],
        dim: usize,
        first: usize,
    ) -> Source<'_, impl Fn(usize) -> Option<usize>> {
        Source {
            numbers,
            dim,
            count: 32,
            address: move |row: usize| Some((first + row) * dim),
        }
    }

    /// Where the time of 32 queries and a block of keys goes, on one thread, in the time one tile
    /// multiplication takes at its peak (16 cycles).
    fn phases<T: Tiles>(real: bool) {
        // Packing and softmax run on vectors and can be timed anywhere.
        let (rounds, vector_rounds) = (if real { 20_000 } else { 2 }, 20_000);
        let unit = if real {
            let (best, _) = time(7, || {
                // SAFETY: tiles are there.
                unsafe {
                    T::configure();
                    amx::Hardware::multiply_registers(100_000);
                    T::release();
                }
            });
            best / 400_000.0
        } else {
            1e-9
        };
        println!(
            "phases of 32 queries, in tile multiplications (of {:.2} ns), one thread, best of 7",
            unit * 1e9
        );
        println!(
            " dim  keys  pack k,v   floor      qk softmax      pv     sum |  in turn  two in turn  \
             from L2  fetched"
        );
        for (dim, keys) in [
            (64, 32),
            (64, 64),
            (64, 128),
            (128, 64),
            (128, 128),
            (128, 256),
        ] {
            let numbers = Numbers::new(&job(keys.max(64), 1, dim, false));
            let mut bench = Bench::new(dim, keys);
            let mut units = |rounds: usize, body: &mut dyn FnMut(&mut Bench)| {
                // SAFETY: tiles are there; they stay configured for this thread.
                unsafe { T::configure() };
                let (best, _) = time(7, || (0..rounds).for_each(|_| body(&mut bench)));
                best / rounds as f64 / unit
            };
            let pack = units(vector_rounds, &mut |bench| bench.pack_keys(&numbers, dim));
            // SAFETY: tiles are configured, here and below.
            let qk = units(rounds, &mut |bench| unsafe { bench.qk::<T>(0, 0) });
            let softmax = units(vector_rounds, &mut |bench| bench.softmax(0, None));
            // SAFETY: as above.
            let pv = units(rounds, &mut |bench| unsafe { bench.pv::<T>(0, 0) });
            // SAFETY: as above.
            let one = units(rounds, &mut |bench| unsafe {
                bench.qk::<T>(0, 0);
                bench.softmax(0, None);
                bench.pv::<T>(0, 0);
            });
            // SAFETY: as above.
            let two = units(rounds, &mut |bench| unsafe {
                bench.qk::<T>(1, 0);
                bench.softmax(0, None);
                bench.pv::<T>(0, 0);
                bench.qk::<T>(0, 0);
                bench.softmax(1, None);
                bench.pv::<T>(1, 0);
            }) / 2.0;
            let mut streamed = |fetched: bool| {
                let mut block = 0;
                // SAFETY: as above.
                units(rounds, &mut |bench| unsafe {
                    let next = (block + 1) % BLOCKS;
                    bench.qk::<T>(0, block);
                    bench.softmax(0, fetched.then_some(next));
                    bench.pv::<T>(0, block);
                    block = next;
                })
            };
            let (streamed, fetched) = (streamed(false), streamed(true));
            // SAFETY: as above.
            unsafe { T::release() };
            let floor = (keys / 16 * 2 * (dim / 32) * 2) as f64;
            println!(
                "{dim:>4} {keys:>5} {pack:>9.1} {floor:>7.1} {qk:>7.1} {softmax:>7.1} {pv:>7.1} \
                 {:>7.1} | {one:>8.1} {two:>12.1} {streamed:>8.1} {fetched:>8.1}",
                qk + softmax + pv,
            );
        }
    }

    /// GFLOP/s of every variant.
    fn table<T: Tiles>(real: bool, threads: usize, forward: bool) {
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
}
