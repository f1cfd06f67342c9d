//! Encke's worker of `bench/gpu_device.py`: ranks on one GPU with their inputs in its memory.
//! Reads a configuration from a line of standard input, then answers each `run R` with the mean
//! milliseconds of R consecutive calls, measured by CUDA events, and the host's milliseconds to
//! enqueue one, so that the script can alternate with rival libraries.
//!
//! A call runs all ranks as threads, hops included, without the transfer of inputs and outputs.
//! Inputs are random; the result is checked on a short sequence before anything is timed.

use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

use encke::conformance::Random;
use encke::plan::program::Role;
use encke::plan::{Pass, Plan, Request, Schedule};
use encke::{
    Attention, CudaKernel, Cut, DType, Data, GroupScale, Mode, Pattern, Shape, Sharding, Tensor,
    View, reference,
};
use encke_cuda::{Hops, Path, Summation};
use encke_ring::Rank;
use encke_ring::threads::{Endpoint, endpoints};
use encke_ring::trace::Recorder;

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Longer than any call here takes.
const DEADLINE: Duration = Duration::from_secs(60);

/// `dtype tokens heads kv_heads dim causal segment dilation ranks backward path summation hops`,
/// and the width of the schedule where it is not 1.
#[derive(Clone)]
struct GpuBenchConfig(Vec<String>);

impl GpuBenchConfig {
    fn get<T: std::str::FromStr>(&self, at: usize) -> Result<T, Error>
    where
        T::Err: std::error::Error + Send + Sync + 'static,
    {
        let value = self.0.get(at);
        Ok(value
            .ok_or("too few fields in the configuration")?
            .parse()?)
    }

    fn pattern(&self, tokens: usize) -> Result<Pattern, Error> {
        let (causal, segment, dilation): (usize, usize, usize) =
            (self.get(5)?, self.get(6)?, self.get(7)?);
        let mode = Mode::Group {
            scale: GroupScale::One,
        };
        let pattern = match segment {
            0 => Pattern::dense(),
            _ => Pattern::dilated(&[segment.min(tokens)], &[dilation], mode)?,
        };
        Ok(pattern.causal(causal == 1))
    }

    fn cut(&self) -> Result<Cut, Error> {
        let (causal, ranks): (usize, usize) = (self.get(5)?, self.get(8)?);
        Ok(match causal == 1 && ranks > 1 {
            true => Cut::Zigzag,
            false => Cut::Contiguous,
        })
    }

    fn schedule(&self) -> Result<Schedule, Error> {
        let width = match self.0.len() > 13 {
            true => self.get(13)?,
            false => 1,
        };
        Ok(Schedule::RING.with_width(width))
    }

    fn kernel(&self) -> Result<CudaKernel, Error> {
        let path = match self.get::<String>(10)?.as_str() {
            "auto" => Path::Auto,
            "hopper" => Path::Hopper,
            "mma" => Path::Mma,
            "plain" => Path::Plain,
            other => return Err(format!("unknown kernel path {other}").into()),
        };
        let summation = match self.get::<String>(11)?.as_str() {
            "fast" => Summation::Fast,
            "deterministic" => Summation::Deterministic,
            other => return Err(format!("unknown summation {other}").into()),
        };
        let hops = match self.get::<String>(12)?.as_str() {
            "pointer" => Hops::Pointer,
            "pinned" => Hops::Pinned,
            other => return Err(format!("unknown hops {other}").into()),
        };
        let kernel = CudaKernel::new(0)?;
        Ok(kernel.path(path).summation(summation).hops(hops))
    }
}

/// Ranks with their inputs in device memory.
struct GpuBenchmark {
    kernel: CudaKernel,
    ranks: Vec<Rank<CudaKernel>>,
}

impl GpuBenchmark {
    fn new(config: &GpuBenchConfig) -> Result<GpuBenchmark, Error> {
        let kernel = config.kernel()?;
        let kernel = check(config, kernel)?;
        let dtype: DType = config.get(0)?;
        let shape = Shape::new(
            1,
            config.get(1)?,
            config.get(2)?,
            config.get(3)?,
            config.get(4)?,
        )?;
        let sharding = Sharding::new(config.get(8)?, config.cut()?)?;
        let mut request = Request::new(shape, config.pattern(shape.tokens)?, sharding, dtype);
        request.schedule = config.schedule()?;
        let rows = [1, shape.tokens, shape.heads, shape.dim];
        let kv_rows = [1, shape.tokens, shape.kv_heads, shape.dim];
        let mut inputs = vec![
            (Role::Q, random_tensor(1, dtype, rows)?),
            (Role::K, random_tensor(2, dtype, kv_rows)?),
            (Role::V, random_tensor(3, dtype, kv_rows)?),
        ];
        if config.get::<usize>(9)? == 1 {
            // The real output of the forward pass, so that the recomputed weights are a softmax's.
            let mut forward = GpuBenchmark::load_ranks(&kernel, &request, &inputs)?;
            GpuBenchmark::call(&kernel, &mut forward)?;
            let cells = [1, shape.tokens, shape.heads, 1];
            for (role, kind, dims) in [(Role::Out, dtype, rows), (Role::Lse, dtype.sum(), cells)] {
                let mut tensor = Tensor::zeros(kind, dims);
                for rank in &forward {
                    rank.store(&kernel, role, &mut tensor)?;
                }
                inputs.push((role, tensor));
            }
            inputs.push((Role::Dout, random_tensor(4, dtype, rows)?));
            request.pass = Pass::Backward { dlse: false };
        }
        let ranks = GpuBenchmark::load_ranks(&kernel, &request, &inputs)?;
        Ok(GpuBenchmark { kernel, ranks })
    }

    fn load_ranks(
        kernel: &CudaKernel,
        request: &Request,
        inputs: &[(Role, Tensor)],
    ) -> Result<Vec<Rank<CudaKernel>>, Error> {
        let plan = Plan::new(request.clone())?;
        let mut ranks = Vec::new();
        for number in 0..plan.ranks() {
            let mut rank = Rank::new(kernel, plan.rank(number)?)?;
            for (role, tensor) in inputs {
                rank.load(kernel, *role, &tensor.view())?;
            }
            ranks.push(rank);
        }
        Ok(ranks)
    }

    /// Runs all ranks. On return everything is enqueued, not necessarily computed.
    fn call(kernel: &CudaKernel, ranks: &mut [Rank<CudaKernel>]) -> Result<(), Error> {
        let run = |rank: &mut Rank<CudaKernel>, mut endpoint: Endpoint<_>| {
            let mut recorder = Recorder::new(rank.plan().rank, Instant::now());
            let ended = rank.run(kernel, &mut endpoint, &mut recorder);
            if let Err(error) = &ended {
                endpoint.group().fail(recorder.rank(), error.to_string());
            }
            ended
        };
        let ends = endpoints(ranks.len(), DEADLINE);
        if let [rank] = ranks {
            return Ok(ends.into_iter().try_for_each(|end| run(rank, end))?);
        }
        std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for (rank, endpoint) in ranks.iter_mut().zip(ends) {
                threads.push(scope.spawn(move || run(rank, endpoint)));
            }
            for thread in threads {
                thread.join().map_err(|_| "a rank panicked")??;
            }
            Ok(())
        })
    }

    /// Mean milliseconds of a call on the GPU, and of its enqueueing on the host.
    fn run(&mut self, repeats: usize) -> Result<(f64, f64), Error> {
        let device = self.kernel.device();
        let begin = device.instant()?;
        let host = Instant::now();
        for _ in 0..repeats {
            GpuBenchmark::call(&self.kernel, &mut self.ranks)?;
        }
        let host = 1000.0 * host.elapsed().as_secs_f64();
        let all = device.instant()?.since(&begin)?;
        Ok((all / repeats as f64, host / repeats as f64))
    }
}

/// A random tensor, the same for the same seed, generated on all cores.
fn random_tensor(seed: u64, dtype: DType, dims: [usize; 4]) -> Result<Tensor, Error> {
    let row = dims[2] * dims[3];
    let rows = dims[0] * dims[1];
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let each = rows.div_ceil(threads).max(1);
    let mut tensor = Tensor::zeros(dtype, dims);
    let bytes = tensor.data_mut().bytes_mut();
    std::thread::scope(|scope| {
        for (i, part) in bytes.chunks_mut(each * row * dtype.bytes()).enumerate() {
            scope.spawn(move || {
                let mut random = Random::new(seed * 1000 + i as u64);
                let values: Vec<f64> = (0..part.len() / dtype.bytes())
                    .map(|_| 1.7 * random.unit())
                    .collect();
                part.copy_from_slice(Data::from_f64(dtype, &values).bytes());
            });
        }
    });
    Ok(tensor)
}

/// Checks the same settings on a short sequence against the f64 reference before anything is timed.
fn check(config: &GpuBenchConfig, kernel: CudaKernel) -> Result<CudaKernel, Error> {
    let dtype: DType = config.get(0)?;
    let tokens = config.get::<usize>(1)?.min(600);
    let shape = Shape::new(1, tokens, 2, 1, config.get(4)?)?;
    let builder = Attention::builder()
        .pattern(config.pattern(tokens)?)
        .schedule(config.schedule()?);
    let attention = builder
        .ranks(config.get(8)?)
        .sharding(config.cut()?)
        .build_on(kernel)?;
    let q = random_tensor(1, dtype, [1, tokens, 2, shape.dim])?;
    let k = random_tensor(2, dtype, [1, tokens, 1, shape.dim])?;
    let v = random_tensor(3, dtype, [1, tokens, 1, shape.dim])?;
    let dout = random_tensor(4, dtype, [1, tokens, 2, shape.dim])?;
    let [q, k, v, dout] = [&q, &k, &v, &dout].map(Tensor::view);
    let got = attention.forward(&q, &k, &v)?;
    let wide = |x: &View<'_>| x.to_f64();
    let scale = shape.default_scale();
    let (wq, wk, wv) = (wide(&q), wide(&k), wide(&v));
    let expected = reference::forward(&shape, attention.pattern(), scale, &wq, &wk, &wv)?;
    near("out", &got.out.to_f64(), &expected.out, dtype)?;
    if config.get::<usize>(9)? == 1 {
        let got = attention.backward(&q, &k, &v, &got.checkpoint, &dout, None)?;
        let pattern = attention.pattern();
        let expected =
            reference::backward(&shape, pattern, scale, &wq, &wk, &wv, &wide(&dout), None)?;
        near("dq", &got.dq.to_f64(), &expected.dq, dtype)?;
        near("dk", &got.dk.to_f64(), &expected.dk, dtype)?;
        near("dv", &got.dv.to_f64(), &expected.dv, dtype)?;
    }
    let kernel = attention.into_kernel();
    kernel.ok_or_else(|| "the attention is still in use".into())
}

fn near(what: &str, got: &[f64], expected: &[f64], dtype: DType) -> Result<(), Error> {
    let size = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    let pairs = got.iter().zip(expected);
    let worst = pairs.fold(0.0f64, |most, (a, b)| {
        if (a - b).is_nan() {
            f64::INFINITY
        } else {
            most.max((a - b).abs())
        }
    });
    if worst > 4.0 * dtype.epsilon() * size.max(1.0) {
        return Err(format!("{what} is off by {worst:e} of {size:e}; not worth timing").into());
    }
    Ok(())
}

fn answer(line: &str, benchmark: &mut Option<GpuBenchmark>) -> Result<String, Error> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    match fields.as_slice() {
        ["run", repeats] => match benchmark {
            Some(benchmark) => {
                let (call, host) = benchmark.run(repeats.parse()?)?;
                Ok(format!("{call} {host}"))
            }
            None => Err("run before a configuration".into()),
        },
        ["end"] => {
            *benchmark = None;
            Ok("ended".into())
        }
        _ => {
            *benchmark = None; // frees its memory first
            let config = GpuBenchConfig(fields.iter().map(|field| field.to_string()).collect());
            *benchmark = Some(GpuBenchmark::new(&config)?);
            Ok("ready".into())
        }
    }
}

fn main() -> Result<(), Error> {
    let mut benchmark = None;
    for line in std::io::stdin().lock().lines() {
        let reply = match answer(&line?, &mut benchmark) {
            Ok(reply) => reply,
            Err(error) => format!("error: {}", error.to_string().replace('\n', " ")),
        };
        println!("{reply}");
        std::io::stdout().flush()?;
    }
    Ok(())
}
