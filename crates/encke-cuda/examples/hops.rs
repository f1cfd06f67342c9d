//! What the ring costs on one GPU: one fused call, the same work by several ranks that hand over
//! pointers, the same with hops through the host's memory, and those hops alone.
//!
//! Forward, bf16, causal, zigzag. The answer is checked first: the three must agree. Then they take
//! turns, so that all of them see the same clocks, and medians are printed.
//!
//! `hops [ranks=8] [tokens=65536] [heads=16] [kv-heads=16] [dim=128] [times=7] [path=auto]`

use std::process::ExitCode;

use std::time::{Duration, Instant};

use encke_core::conformance::Random;
use encke_core::kernel::Kernel;
use encke_core::plan::program::Role;
use encke_core::plan::{Plan, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::transport::{Address, Incoming, Outgoing, Transport};
use encke_core::{DType, Data, Pattern, Shape, Tensor};
use encke_cuda::{Buffer, CudaKernel, Hops, Path};
use encke_ring::Rank;
use encke_ring::threads::{Endpoint, endpoints};
use encke_ring::trace::Recorder;
use half::bf16;

type Failed = Box<dyn std::error::Error + Send + Sync>;
type Result<T> = std::result::Result<T, Failed>;

const DEADLINE: Duration = Duration::from_secs(60);

/// What is measured.
struct Options {
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

impl Options {
    fn read() -> Result<Options> {
        let mut options = Options {
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
            let place = match name {
                "ranks" => &mut options.ranks,
                "tokens" => &mut options.tokens,
                "heads" => &mut options.heads,
                "kv-heads" => &mut options.kv_heads,
                "dim" => &mut options.dim,
                "times" => &mut options.times,
                _ => return Err(format!("there is no option {name}").into()),
            };
            *place = value.parse()?;
        }
        Ok(options)
    }

    fn request(&self, ranks: usize) -> Result<Request> {
        let Options {
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

/// Ranks with their inputs on the GPU, ready to be run again and again.
struct Group<'a> {
    kernel: &'a CudaKernel,
    plan: Plan,
    hops: Hops,
    ranks: Vec<Rank<CudaKernel>>,
}

impl<'a> Group<'a> {
    fn new(
        kernel: &'a CudaKernel,
        request: Request,
        hops: Hops,
        inputs: &[(Role, Tensor)],
    ) -> Result<Group<'a>> {
        let plan = Plan::new(request)?;
        let mut ranks = Vec::new();
        for rank in 0..plan.ranks() {
            let mut rank = Rank::new(kernel, plan.rank(rank)?)?;
            for (role, tensor) in inputs {
                rank.load(kernel, *role, &tensor.view())?;
            }
            ranks.push(rank);
        }
        Ok(Group {
            kernel,
            plan,
            hops,
            ranks,
        })
    }

    /// One call, from the first task enqueued to the last number there.
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

/// The hops of a ring without its jobs: k and v of every rank, all the way round.
fn hops_alone(kernel: &CudaKernel, options: &Options) -> Result<Duration> {
    let device = kernel.device();
    device.set_hops(Hops::Pinned);
    let (ranks, rows) = (options.ranks, options.tokens / options.ranks);
    let elements = rows * options.kv_heads * options.dim;
    let mut buffers: Vec<[Buffer; 4]> = Vec::new();
    for _ in 0..ranks {
        let make = || kernel.allocate(DType::Bf16, elements);
        buffers.push([make()?, make()?, make()?, make()?]);
    }
    device.synchronize()?;
    let start = Instant::now();
    let address = |peer: usize, tag: u64| Address {
        peer,
        tag,
        elements,
    };
    let live = |rank: usize, buffers: &mut [Buffer; 4], wire: &mut Endpoint<Buffer>| {
        let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        for round in 1..ranks {
            let [k, v, to_k, to_v] = &mut *buffers;
            let sends = [(1, &*k), (2, &*v)].map(|(tag, parcel)| Outgoing {
                to: address(next, tag),
                parcel,
            });
            let mut receives = [(1, to_k), (2, to_v)].map(|(tag, parcel)| Incoming {
                from: address(previous, tag),
                parcel,
            });
            wire.exchange(round, &sends, &mut receives, &mut || {})?;
            buffers.swap(0, 2);
            buffers.swap(1, 3);
        }
        Ok::<(), Failed>(())
    };
    let live = &live;
    std::thread::scope(|scope| -> Result<()> {
        let wires = endpoints(ranks, DEADLINE).into_iter().enumerate();
        let threads: Vec<_> = wires
            .zip(&mut buffers)
            .map(|((rank, mut wire), buffers)| scope.spawn(move || live(rank, buffers, &mut wire)))
            .collect();
        for thread in threads {
            thread.join().map_err(|_| "a rank panicked")??;
        }
        Ok(())
    })?;
    device.synchronize()?;
    Ok(start.elapsed())
}

fn inputs(options: &Options) -> Result<Vec<(Role, Tensor)>> {
    let mut random = Random::new(1);
    let mut tensor = |heads: usize| {
        let dims = [1, options.tokens, heads, options.dim];
        let number = |_| bf16::from_f64(random.unit());
        let numbers = (0..dims.iter().product::<usize>()).map(number).collect();
        Tensor::from_data(Data::Bf16(numbers), dims)
    };
    let (q, k, v) = (
        tensor(options.heads)?,
        tensor(options.kv_heads)?,
        tensor(options.kv_heads)?,
    );
    Ok(vec![(Role::Q, q), (Role::K, k), (Role::V, v)])
}

/// The largest difference, relative to the largest number.
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
    let options = Options::read()?;
    let kernel = CudaKernel::new(0)?.path(options.path);
    let inputs = inputs(&options)?;
    let group = |ranks, hops| Group::new(&kernel, options.request(ranks)?, hops, &inputs);
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
        return Err("the ring is wrong, so its time means nothing".into());
    }
    let mut times: [Vec<Duration>; 4] = Default::default();
    for _ in 0..options.times {
        for (group, times) in groups.iter_mut().zip(&mut times) {
            times.push(group.run()?);
        }
        times[3].push(hops_alone(&kernel, &options)?);
    }
    let [fused, pointer, pinned, alone] = times.each_mut().map(|times| median(times));
    report(&options, names, [fused, pointer, pinned], alone);
    Ok(())
}

fn report(options: &Options, names: [&str; 3], times: [f64; 3], alone: f64) {
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
    let rows = options.tokens / options.ranks;
    let hop = 4 * rows * options.kv_heads * options.dim;
    let bytes = (hop * options.ranks * (options.ranks - 1)) as f64;
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
