//! Load balancing against a straggler, in wall-clock time: a ring with one rank slowed to half
//! speed, the partition it proposes, and the ring after the resize.
//!
//! Every rank computes on one core of its own (a pool of one thread); the slow one sleeps after
//! each job for as long as the job took. The ideal time follows: p cores of which one has half its
//! speed take p / (p - 1/2) times as long as p full ones.
//!
//! ```text
//! cargo run --release -p encke --example straggler -- [ranks] [tokens]
//! ```

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use encke::conformance::Random;
use encke::{Attention, CpuKernel, DType, Data, Kernel, Pass, Report, Sharded, Slice, View};
use encke_core::job::{Block, Job};
use encke_core::kernel::{Carry, Gradients, Result as KernelResult, SoftmaxState, Upstream};
use encke_core::memory::{HostKernel, Memory};

type Error = Box<dyn std::error::Error>;

/// The rank that is slow.
const SLOW: &str = "encke-rank-1";
/// Calls, and turns; the median counts.
const CALLS: usize = 15;

/// Whether the slow rank is slowed now.
static DISTURBED: AtomicBool = AtomicBool::new(false);

std::thread_local! {
    static CORE: rayon::ThreadPool =
        rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a thread can be spawned");
}

/// The CPU kernel with one core for each rank, one of which can be slowed to half speed.
struct ThrottledKernel(CpuKernel);

impl ThrottledKernel {
    fn job(&self, work: impl FnOnce() -> KernelResult<()> + Send) -> KernelResult<()> {
        let begin = Instant::now();
        CORE.with(|core| core.install(work))?;
        let slow = std::thread::current().name() == Some(SLOW);
        if slow && DISTURBED.load(Ordering::Relaxed) {
            std::thread::sleep(begin.elapsed());
        }
        Ok(())
    }
}

impl HostKernel for ThrottledKernel {
    fn name(&self) -> &'static str {
        Memory::name(&self.0)
    }
}

impl Kernel for ThrottledKernel {
    fn attend(
        &self,
        job: &Job,
        q: Slice<'_>,
        k: Slice<'_>,
        v: Slice<'_>,
        state: SoftmaxState<'_, Data>,
    ) -> KernelResult<()> {
        self.job(|| self.0.attend(job, q, k, v, state))
    }
    fn merge(&self, block: &Block, from: &Carry<Data>, to: &mut Carry<Data>) -> KernelResult<()> {
        self.0.merge(block, from, to)
    }
    fn finish(
        &self,
        cells: usize,
        dim: usize,
        gain: f64,
        carry: &Carry<Data>,
        out: &mut Data,
        lse: &mut Data,
    ) -> KernelResult<()> {
        self.0.finish(cells, dim, gain, carry, out, lse)
    }
    fn delta(
        &self,
        cells: usize,
        dim: usize,
        out: Slice<'_>,
        dout: Slice<'_>,
        dlse: Option<Slice<'_>>,
        delta: &mut Data,
    ) -> KernelResult<()> {
        self.0.delta(cells, dim, out, dout, dlse, delta)
    }
    fn backward(
        &self,
        job: &Job,
        q: Slice<'_>,
        k: Slice<'_>,
        v: Slice<'_>,
        upstream: Upstream<Slice<'_>>,
        gradients: Gradients<'_, Data>,
    ) -> KernelResult<()> {
        self.job(|| self.0.backward(job, q, k, v, upstream, gradients))
    }
    fn workspace_bytes(&self, job: &Job, pass: Pass, dtype: DType) -> usize {
        self.0.workspace_bytes(job, pass, dtype)
    }
}

/// A ring with its sharded q, k and v.
struct StragglerRing {
    attention: Attention<ThrottledKernel>,
    inputs: [Sharded; 3],
}

impl StragglerRing {
    /// A ring with equal shards.
    fn new(
        ranks: usize,
        dims: [usize; 4],
        tensors: &[Vec<f32>; 3],
    ) -> Result<StragglerRing, Error> {
        let builder = Attention::builder().ranks(ranks);
        let attention = builder.build_on(ThrottledKernel(CpuKernel::new()?))?;
        let shard = |values: &Vec<f32>| -> Result<Sharded, Error> {
            Ok(attention.shard(&View::contiguous(values, dims)?)?)
        };
        let [q, k, v] = tensors.each_ref().map(shard);
        let inputs = [q?, k?, v?];
        Ok(StragglerRing { attention, inputs })
    }

    /// Seconds and report of a call, with or without the slow rank.
    fn call(&self, disturbed: bool) -> Result<(f64, Report), Error> {
        let [q, k, v] = &self.inputs;
        DISTURBED.store(disturbed, Ordering::Relaxed);
        let begin = Instant::now();
        let report = self.attention.forward_shards(q, k, v)?.report;
        Ok((begin.elapsed().as_secs_f64(), report))
    }
}

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default: usize| arguments.next().map_or(Ok(default), |text| text.parse());
    let (ranks, tokens) = (number(2)?, number(8192)?);
    let (heads, dim) = (4, 64);
    let mut random = Random::new(1);
    let mut values = || -> Vec<f32> {
        (0..tokens * heads * dim)
            .map(|_| random.unit() as f32)
            .collect()
    };
    let tensors = [values(), values(), values()];
    let dims = [1, tokens, heads, dim];
    let even = StragglerRing::new(ranks, dims, &tensors)?;
    let mut ring = StragglerRing::new(ranks, dims, &tensors)?;
    println!("{ranks} ranks, a core each; {tokens} tokens x {heads} heads x {dim}, f32, forward");

    // The proposal comes from the report of a median call; the first call allocates.
    ring.call(true)?;
    let mut calls = Vec::new();
    for _ in 0..CALLS {
        calls.push(ring.call(true)?);
    }
    calls.sort_by(|one, other| one.0.total_cmp(&other.0));
    let proposal = calls[CALLS / 2].1.proposal()?;
    let proposal = proposal.ok_or("the trace shows no computation")?;
    println!(
        "proposed tokens per rank        {:?}, from speeds {:.2?}",
        proposal.sizes, proposal.speeds
    );
    let [q, k, v] = &mut ring.inputs;
    let moved = ring.attention.resize(proposal.sizes, &mut [q, k, v])?;
    println!(
        "moved                           {:8} bytes",
        moved.sent_bytes
    );

    // All three take turns, so that other load on the machine affects them alike.
    for ring in [&even, &ring] {
        ring.call(true)?;
    }
    let mut turns = Vec::new();
    for _ in 0..CALLS {
        let (whole, _) = even.call(false)?;
        let (uneven, _) = even.call(true)?;
        let (balanced, _) = ring.call(true)?;
        let ideal = whole * ranks as f64 / (ranks as f64 - 0.5);
        turns.push([whole, uneven, balanced, ideal, balanced / ideal]);
    }
    let median = |of: usize| {
        let column: Vec<f64> = turns.iter().map(|turn| turn[of]).collect();
        encke::cost::median(&column)
    };
    for (label, of) in [
        ("all ranks at full speed", 0),
        ("rank 1 at half speed", 1),
        ("the same, shards by speed", 2),
        ("ideal", 3),
    ] {
        println!("{label:30}  {:8.1} ms", 1e3 * median(of));
    }
    println!(
        "behind the ideal                {:8.1} % (median of {CALLS} turns' ratios)",
        100.0 * (median(4) - 1.0)
    );
    Ok(())
}
