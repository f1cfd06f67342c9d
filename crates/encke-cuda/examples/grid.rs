//! Measures what `bits = invariant` costs on one GPU: one rank, bf16, planned bits summed in any
//! order and in a fixed one, and invariant bits, in turns, so that all see the same clocks;
//! medians.
//!
//! Results are checked first: four ranks must have the bits of one.
//!
//! `grid [tokens=16384] [heads=16] [kv-heads=16] [dim=128] [times=9]`

use std::process::ExitCode;
use std::time::{Duration, Instant};

use encke_core::conformance::Random;
use encke_core::plan::program::Role;
use encke_core::plan::{Pass, Plan, Request};
use encke_core::sharding::Sharding;
use encke_core::{Bits, DType, Data, Pattern, Shape, Tensor};
use encke_cuda::{Buffer, CudaKernel, Summation};
use encke_ring::Rank;
use encke_ring::threads::{Endpoint, endpoints};
use encke_ring::trace::Recorder;
use half::bf16;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;
type Inputs = Vec<(Role, Tensor)>;

const DEADLINE: Duration = Duration::from_secs(60);
const GRADIENTS: [Role; 3] = [Role::Dq, Role::Dk, Role::Dv];

/// The command line.
struct GridBenchOptions {
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    times: usize,
}

impl GridBenchOptions {
    fn read() -> Result<GridBenchOptions> {
        let mut options = GridBenchOptions {
            tokens: 16384,
            heads: 16,
            kv_heads: 16,
            dim: 128,
            times: 9,
        };
        for argument in std::env::args().skip(1) {
            let (name, value) = argument.split_once('=').ok_or("write name=value")?;
            let field = match name {
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

    fn request(&self, bits: Bits, causal: bool, pass: Pass, ranks: usize) -> Result<Request> {
        let shape = Shape::new(1, self.tokens, self.heads, self.kv_heads, self.dim)?;
        let pattern = Pattern::dense().causal(causal);
        let sharding = Sharding::contiguous(ranks)?;
        Ok(Request {
            bits,
            pass,
            ..Request::new(shape, pattern, sharding, DType::Bf16)
        })
    }

    /// A tensor of random elements.
    fn tensor(&self, random: &mut Random, heads: usize) -> Result<Tensor> {
        let dims = [1, self.tokens, heads, self.dim];
        let element = |_| bf16::from_f64(random.unit());
        let elements = (0..dims.iter().product::<usize>()).map(element).collect();
        Ok(Tensor::from_data(Data::Bf16(elements), dims)?)
    }
}

/// The ranks of a call, with their inputs on the GPU.
struct GridBenchRing<'a> {
    kernel: &'a CudaKernel,
    ranks: Vec<Rank<CudaKernel>>,
}

impl<'a> GridBenchRing<'a> {
    fn new(kernel: &'a CudaKernel, request: Request, inputs: &Inputs) -> Result<Self> {
        let plan = Plan::new(request)?;
        let mut ranks = Vec::new();
        for rank in 0..plan.ranks() {
            let mut rank = Rank::new(kernel, plan.rank(rank)?)?;
            for (role, tensor) in inputs {
                rank.load(kernel, *role, &tensor.view())?;
            }
            ranks.push(rank);
        }
        Ok(GridBenchRing { kernel, ranks })
    }

    /// One call, from the first enqueued task to the last result.
    fn run(&mut self) -> Result<Duration> {
        let (kernel, device) = (self.kernel, self.kernel.device());
        device.synchronize()?;
        let start = Instant::now();
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

    fn take(&self, role: Role, dtype: DType, dims: [usize; 4]) -> Result<Tensor> {
        let mut tensor = Tensor::zeros(dtype, dims);
        for rank in &self.ranks {
            rank.store(self.kernel, role, &mut tensor)?;
        }
        Ok(tensor)
    }
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
    times[times.len() / 2].as_secs_f64() * 1e3
}

/// Runs the calls in turns, and prints the medians.
fn in_turns(what: &str, rings: &mut [GridBenchRing<'_>], times: usize) -> Result<()> {
    let mut all: Vec<Vec<Duration>> = rings.iter().map(|_| Vec::new()).collect();
    for _ in 0..times + 1 {
        for (ring, times) in rings.iter_mut().zip(&mut all) {
            times.push(ring.run()?);
        }
    }
    let medians: Vec<f64> = all
        .iter_mut()
        .map(|times| median(&mut times[1..]))
        .collect();
    let [fast, fixed, invariant] = medians[..] else {
        return Err("three kinds of bits are compared".into());
    };
    println!(
        "{what:<16} planned {fast:.3} ms, in a fixed order {fixed:.3} ms, invariant {invariant:.3} \
         ms: {:.3} and {:.3} of them",
        invariant / fast,
        invariant / fixed
    );
    Ok(())
}

fn measure() -> Result<()> {
    let options = GridBenchOptions::read()?;
    let GridBenchOptions { tokens, heads, .. } = options;
    let fast = CudaKernel::new(0)?.summation(Summation::Fast);
    let fixed = CudaKernel::new(0)?;
    let kinds = [
        (&fast, Bits::Planned),
        (&fixed, Bits::Planned),
        (&fixed, Bits::Invariant),
    ];
    let mut random = Random::new(1);
    let q = options.tensor(&mut random, heads)?;
    let [k, v] = [(); 2].map(|()| options.tensor(&mut random, options.kv_heads));
    let dout = options.tensor(&mut random, heads)?;
    let (k, v) = (k?, v?);
    let dims = [1, tokens, heads, options.dim];
    for causal in [true, false] {
        let name = if causal { "causal" } else { "full" };
        let inputs = vec![
            (Role::Q, q.clone()),
            (Role::K, k.clone()),
            (Role::V, v.clone()),
        ];
        let ring = |(kernel, bits), pass, ranks, inputs: &Inputs| {
            let request = options.request(bits, causal, pass, ranks)?;
            GridBenchRing::new(kernel, request, inputs)
        };
        let all = |pass, inputs: &Inputs| -> Result<Vec<GridBenchRing<'_>>> {
            kinds
                .iter()
                .map(|&kind| ring(kind, pass, 1, inputs))
                .collect()
        };
        let mut forward = all(Pass::Forward, &inputs)?;
        in_turns(&format!("forward {name}"), &mut forward, options.times)?;
        let out = forward[2].take(Role::Out, DType::Bf16, dims)?;
        let lse = forward[2].take(Role::Lse, DType::F32, [1, tokens, heads, 1])?;
        let mut four = ring(kinds[2], Pass::Forward, 4, &inputs)?;
        four.run()?;
        let same = four.take(Role::Out, DType::Bf16, dims)?.data().bytes() == out.data().bytes();
        let planned = forward[0].take(Role::Out, DType::Bf16, dims)?;
        let off = difference(&out, &planned);
        drop((four, forward));
        let mut inputs = inputs;
        let more = [
            (Role::Out, out),
            (Role::Lse, lse),
            (Role::Dout, dout.clone()),
        ];
        inputs.extend(more);
        let pass = Pass::Backward { dlse: false };
        let mut one = ring(kinds[2], pass, 1, &inputs)?;
        let mut four = ring(kinds[2], pass, 4, &inputs)?;
        one.run()?;
        four.run()?;
        let gradients = |ring: &GridBenchRing<'_>| -> Result<Vec<Tensor>> {
            let of = |role: &Role| {
                let heads = if *role == Role::Dq {
                    heads
                } else {
                    options.kv_heads
                };
                ring.take(*role, DType::F32, [1, tokens, heads, options.dim])
            };
            GRADIENTS.iter().map(of).collect()
        };
        let bytes = |tensors: Vec<Tensor>| -> Vec<Vec<u8>> {
            let bytes = |tensor: &Tensor| tensor.data().bytes().to_vec();
            tensors.iter().map(bytes).collect()
        };
        let same_gradients = bytes(gradients(&one)?) == bytes(gradients(&four)?);
        println!(
            "{name}: four ranks have the bits of one: {same}, gradients {same_gradients}; planned \
             bits are {off:.1e} away"
        );
        drop((one, four));
        let mut backward = all(pass, &inputs)?;
        in_turns(&format!("backward {name}"), &mut backward, options.times)?;
        if !(same && same_gradients) {
            return Err("four ranks have other bits".into());
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    match measure() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("grid: {error}");
            ExitCode::FAILURE
        }
    }
}
