//! Measures the overhead of the ring on one GPU: one fused call, the same work by several ranks
//! with pointer hops, the same with hops through pinned host memory, and those hops alone.
//!
//! Forward, bf16, causal, zigzag. Hops are bounded by the host link, which all ranks share, so the
//! bytes in each direction are printed with the time. Results are checked first: all three must
//! agree. Then the variants run alternately, so that all see the same clocks, and medians are
//! printed.
//!
//! `hops [ranks=8] [tokens=65536] [heads=16] [kv-heads=16] [dim=128] [times=7] [path=auto]`

use std::process::ExitCode;

use std::time::{Duration, Instant};

use encke_core::conformance::Random;
use encke_core::memory::Memory;
use encke_core::plan::program::{RankPlan, Role};
use encke_core::plan::{Plan, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::transport::{Incoming, Outgoing, Transport};
use encke_core::{DType, Data, Pattern, Shape, Tensor};
use encke_cuda::{Buffer, CudaKernel, Hops, Path};
use encke_ring::Rank;
use encke_ring::threads::{Endpoint, endpoints};
use encke_ring::trace::Recorder;
use half::bf16;

type Failed = Box<dyn std::error::Error + Send + Sync>;
type Result<T> = std::result::Result<T, Failed>;

const DEADLINE: Duration = Duration::from_secs(60);

/// The command line.
struct HopBenchOptions {
    ranks: usize,
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    times: usize,
    path: Path,
}

fn path(name: &str) -> Result<Path> {
    match name {
        "auto" => Ok(Path::Auto),
        "hopper" => Ok(Path::Hopper),
        "mma" => Ok(Path::Mma),
        "plain" => Ok(Path::Plain),
        _ => Err(format!("there is no path {name}: auto, hopper, mma, plain").into()),
    }
}

impl HopBenchOptions {
    fn read() -> Result<HopBenchOptions> {
        let mut options = HopBenchOptions {
            ranks: 8,
            tokens: 65536,
            heads: 16,
            kv_heads: 16,
            dim: 128,
            times: 7,
            path: Path::Auto,
        };
        for argument in std::env::args().skip(1) {
            let (name, value) = argument.split_once('=').ok_or("write name=value")?;
            if name == "path" {
                options.path = path(value)?;
                continue;
            }
            let field = match name {
                "ranks" => &mut options.ranks,
                "tokens" => &mut options.tokens,
                "heads" => &mut options.heads,
                "kv-heads" => &mut options.kv_heads,
                "dim" => &mut options.dim,
                "times" => &mut options.times,
                _ => return Err(format!("there is no option {name}").into()),
            };
            *field = value.parse()?;
        }
        Ok(options)
    }

    fn request(&self, ranks: usize) -> Result<Request> {
        let HopBenchOptions {
            tokens,
            heads,
            kv_heads,
            dim,
            ..
        } = *self;
        let shape = Shape::new(1, tokens, heads, kv_heads, dim)?;
        let sharding = match ranks {
            1 => Sharding::contiguous(1)?,
            _ => Sharding::new(ranks, Cut::Zigzag)?,
        };
        let pattern = Pattern::dense().causal(true);
        Ok(Request::new(shape, pattern, sharding, DType::Bf16))
    }
}

/// Ranks with their inputs on the GPU, for repeated runs.
struct RankGroup<'a> {
    kernel: &'a CudaKernel,
    plan: Plan,
    hops: Hops,
    ranks: Vec<Rank<CudaKernel>>,
}

impl<'a> RankGroup<'a> {
    fn new(
        kernel: &'a CudaKernel,
        request: Request,
        hops: Hops,
        inputs: &[(Role, Tensor)],
    ) -> Result<RankGroup<'a>> {
        let plan = Plan::new(request)?;
        let mut ranks = Vec::new();
        for rank in 0..plan.ranks() {
            let mut rank = Rank::new(kernel, plan.rank(rank)?)?;
            for (role, tensor) in inputs {
                rank.load(kernel, *role, &tensor.view())?;
            }
            ranks.push(rank);
        }
        Ok(RankGroup {
            kernel,
            plan,
            hops,
            ranks,
        })
    }

    /// One call, from the first enqueued task to the last result.
    fn run(&mut self) -> Result<Duration> {
        let device = self.kernel.device();
        device.set_hops(self.hops);
        device.synchronize()?;
        let (kernel, start) = (self.kernel, Instant::now());
        let wires: Vec<Endpoint<Buffer>> = endpoints(self.ranks.len(), DEADLINE);
        std::thread::scope(|scope| -> Result<()> {
            let members = self.ranks.iter_mut().zip(wires);
            let threads: Vec<_> = members
                .map(|(rank, mut wire)| {
                    scope.spawn(move || {
                        let mut recorder = Recorder::new(rank.plan().rank, start);
                        rank.run(kernel, &mut wire, &mut recorder)
                    })
                })
                .collect();
            for thread in threads {
                thread.join().map_err(|_| "a rank panicked")??;
            }
            Ok(())
        })?;
        device.synchronize()?;
        Ok(start.elapsed())
    }

    fn out(&self) -> Result<Tensor> {
        let shape = &self.plan.request().shape;
        let dims = [1, shape.tokens, shape.heads, shape.dim];
        let mut out = Tensor::zeros(DType::Bf16, dims);
        for rank in &self.ranks {
            rank.store(self.kernel, Role::Out, &mut out)?;
        }
        Ok(out)
    }
}

/// A rank that only sends and receives: its program, and the buffers of its messages.
struct HopOnlyRank {
    program: RankPlan,
    buffers: Vec<Option<Buffer>>,
}

impl HopOnlyRank {
    fn new(kernel: &CudaKernel, program: RankPlan) -> Result<HopOnlyRank> {
        let rounds = program.rounds.iter();
        let messages = rounds.flat_map(|round| round.sends.iter().chain(&round.receives));
        let mut buffers: Vec<Option<Buffer>> = program.buffers.iter().map(|_| None).collect();
        for message in messages {
            let planned = &program.buffers[message.buffer.0];
            if buffers[message.buffer.0].is_none() {
                let buffer = kernel.allocate(planned.dtype, planned.elements)?;
                buffers[message.buffer.0] = Some(buffer);
            }
        }
        Ok(HopOnlyRank { program, buffers })
    }

    /// Runs all hops of the program; returns the bytes sent.
    fn run(&mut self, wire: &mut Endpoint<Buffer>) -> Result<usize> {
        let HopOnlyRank { program, buffers } = self;
        let mut bytes = 0;
        for (number, round) in program.rounds.iter().enumerate() {
            let taken = round.receives.iter().map(|message| {
                let buffer = buffers[message.buffer.0].take();
                buffer.ok_or("a buffer is received into twice in one round")
            });
            let mut taken = taken.collect::<std::result::Result<Vec<Buffer>, _>>()?;
            let sends = round.sends.iter().map(|message| {
                let parcel = buffers[message.buffer.0].as_ref();
                let parcel = parcel.ok_or("a buffer is sent and received into in one round")?;
                let to = message.address;
                Ok(Outgoing { to, parcel })
            });
            let sends = sends.collect::<Result<Vec<_>>>()?;
            let receives = round.receives.iter().zip(&mut taken);
            let mut receives: Vec<Incoming<'_, Buffer>> = receives
                .map(|(message, parcel)| Incoming {
                    from: message.address,
                    parcel,
                })
                .collect();
            let moved = wire.exchange(number, &sends, &mut receives, &mut || {})?;
            bytes += moved.sent_bytes;
            drop(sends);
            for (message, buffer) in round.receives.iter().zip(taken) {
                buffers[message.buffer.0] = Some(buffer);
            }
        }
        Ok(bytes)
    }
}

/// The hops of a plan without its jobs: their time, and the bytes in each direction.
fn hops_alone(kernel: &CudaKernel, plan: &Plan) -> Result<(Duration, usize)> {
    let device = kernel.device();
    device.set_hops(Hops::Pinned);
    let hop_only = |rank: usize| HopOnlyRank::new(kernel, plan.rank(rank)?);
    let mut ranks = (0..plan.ranks())
        .map(hop_only)
        .collect::<Result<Vec<_>>>()?;
    device.synchronize()?;
    let start = Instant::now();
    let bytes = std::thread::scope(|scope| -> Result<usize> {
        let wires: Vec<Endpoint<Buffer>> = endpoints(ranks.len(), DEADLINE);
        let threads: Vec<_> = ranks
            .iter_mut()
            .zip(wires)
            .map(|(rank, mut wire)| scope.spawn(move || rank.run(&mut wire)))
            .collect();
        let mut bytes = 0;
        for thread in threads {
            bytes += thread.join().map_err(|_| "a rank panicked")??;
        }
        Ok(bytes)
    })?;
    device.synchronize()?;
    Ok((start.elapsed(), bytes))
}

fn inputs(options: &HopBenchOptions) -> Result<Vec<(Role, Tensor)>> {
    let mut random = Random::new(1);
    let mut tensor = |heads: usize| {
        let dims = [1, options.tokens, heads, options.dim];
        let element = |_| bf16::from_f64(random.unit());
        let elements = (0..dims.iter().product::<usize>()).map(element).collect();
        Tensor::from_data(Data::Bf16(elements), dims)
    };
    let (q, k, v) = (
        tensor(options.heads)?,
        tensor(options.kv_heads)?,
        tensor(options.kv_heads)?,
    );
    Ok(vec![(Role::Q, q), (Role::K, k), (Role::V, v)])
}

/// The largest difference, relative to the largest value.
fn difference(a: &Tensor, b: &Tensor) -> f64 {
    let (a, b) = (a.to_f64(), b.to_f64());
    let most = a.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    let off = a.iter().zip(&b).map(|(a, b)| (a - b).abs());
    off.fold(0.0, |most: f64, x| if x.is_nan() { x } else { most.max(x) }) / most
}

fn median(times: &mut [Duration]) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64()
}

fn measure() -> Result<()> {
    let options = HopBenchOptions::read()?;
    let kernel = CudaKernel::new(0)?.path(options.path);
    let inputs = inputs(&options)?;
    let group = |ranks, hops| RankGroup::new(&kernel, options.request(ranks)?, hops, &inputs);
    let names = ["one fused call", "ring, pointer hops", "ring, pinned hops"];
    let mut groups = [
        group(1, Hops::Pointer)?,
        group(options.ranks, Hops::Pointer)?,
        group(options.ranks, Hops::Pinned)?,
    ];
    for group in &mut groups {
        group.run()?;
    }
    let outs = [groups[0].out()?, groups[1].out()?, groups[2].out()?];
    let off = difference(&outs[0], &outs[1]);
    let same = outs[1].data().bytes() == outs[2].data().bytes();
    println!("ring against fused: off by {off:.1e}; both kinds of hops: same bits: {same}");
    if !same || off.is_nan() || off > 0.02 {
        return Err("the ring's result is wrong; its time is not reported".into());
    }
    let mut times: [Vec<Duration>; 4] = Default::default();
    let mut bytes = 0;
    for _ in 0..options.times {
        for (group, times) in groups.iter_mut().zip(&mut times) {
            times.push(group.run()?);
        }
        let (alone, moved) = hops_alone(&kernel, &groups[2].plan)?;
        times[3].push(alone);
        bytes = moved;
    }
    let [fused, pointer, pinned, alone] = times.each_mut().map(|times| median(times));
    report(&options, names, [fused, pointer, pinned], (alone, bytes));
    Ok(())
}

fn report(
    options: &HopBenchOptions,
    names: [&str; 3],
    times: [f64; 3],
    (alone, bytes): (f64, usize),
) {
    let (n, d) = (options.tokens as f64, options.dim as f64);
    let flops = 2.0 * n * n * d * options.heads as f64;
    println!(
        "{} ranks, {} tokens, {} heads ({} of keys), dim {}, bf16, causal, zigzag, forward",
        options.ranks, options.tokens, options.heads, options.kv_heads, options.dim
    );
    for (name, time) in names.iter().zip(times) {
        println!(
            "{name:20} {:9.3} ms {:7.1} TFLOP/s {:6.1} % of one fused call",
            time * 1e3,
            flops / time / 1e12,
            100.0 * times[0] / time
        );
    }
    let bytes = bytes as f64;
    println!(
        "{:20} {:9.3} ms, {:.2} GB each way at {:.1} GB/s",
        "the hops alone",
        alone * 1e3,
        bytes / 1e9,
        bytes / alone / 1e9
    );
    let hidden = (times[1] + alone - times[2]) / alone.min(times[1]);
    println!("hidden: {:.0} % of the shorter of the two", 100.0 * hidden);
}

fn main() -> ExitCode {
    match measure() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
