//! Encke's worker of `bench/cpu.py`: reads a configuration from a line of standard input, then
//! answers each `run` with the seconds of one call, so that the script can alternate with a rival
//! library. `peak DTYPE` answers with the peak GFLOP/s of register arithmetic at that moment,
//! `times` with the milliseconds of one call by activity.

use std::io::{BufRead, Write};
use std::time::Instant;

use encke::conformance::Random;
use encke::{
    Activity, Attention, Cut, DType, Data, GroupScale, Mode, Pattern, Shape, Tensor, View,
    reference,
};
use encke_cpu::{InstructionSet, peak};

type Error = Box<dyn std::error::Error>;

/// A configuration and its inputs. The line on standard input is
/// `dtype batch tokens heads dim causal segment dilation ranks backward`.
struct CpuBenchmark {
    attention: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    backward: bool,
}

fn field<T: std::str::FromStr>(fields: &[&str], at: usize) -> Result<T, Error>
where
    T::Err: std::error::Error + 'static,
{
    let value = fields
        .get(at)
        .ok_or("too few fields in the configuration")?;
    Ok(value.parse()?)
}

fn attention(fields: &[&str], tokens: usize, ranks: usize) -> Result<Attention, Error> {
    let causal: usize = field(fields, 5)?;
    let (segment, dilation): (usize, usize) = (field(fields, 6)?, field(fields, 7)?);
    let mode = Mode::Group {
        scale: GroupScale::One,
    };
    let pattern = match segment {
        0 => Pattern::dense(),
        _ => Pattern::dilated(&[segment.min(tokens)], &[dilation], mode)?,
    };
    let cut = if ranks > 1 {
        Cut::Zigzag
    } else {
        Cut::Contiguous
    };
    let builder = Attention::builder().pattern(pattern.causal(causal == 1));
    Ok(builder.ranks(ranks).sharding(cut).build()?)
}

impl CpuBenchmark {
    fn new(fields: &[&str]) -> Result<CpuBenchmark, Error> {
        let dtype: DType = field(fields, 0)?;
        let dims: [usize; 4] = [
            field(fields, 1)?,
            field(fields, 2)?,
            field(fields, 3)?,
            field(fields, 4)?,
        ];
        let ranks = field(fields, 8)?;
        check(fields, dtype, dims, ranks)?;
        let mut random = Random::new(7);
        let mut tensor = || tensor(&mut random, dtype, dims);
        Ok(CpuBenchmark {
            attention: attention(fields, dims[1], ranks)?,
            q: tensor()?,
            k: tensor()?,
            v: tensor()?,
            dout: tensor()?,
            backward: field::<usize>(fields, 9)? == 1,
        })
    }

    /// Milliseconds of one forward pass by activity, summed over ranks, and in total.
    fn times(&self) -> Result<String, Error> {
        let [q, k, v]: [View<'_>; 3] = [&self.q, &self.k, &self.v].map(Tensor::view);
        let begin = Instant::now();
        let forward = self.attention.forward(&q, &k, &v)?;
        let whole = begin.elapsed().as_secs_f64() * 1e3;
        let activities = [
            Activity::Load,
            Activity::Prepare,
            Activity::Compute,
            Activity::Wait,
        ];
        let times = activities.map(|activity| {
            let total = forward.report.trace.total(activity).as_secs_f64() * 1e3;
            format!("{} {total:.2}", activity.name())
        });
        Ok(format!("{} of {whole:.2}", times.join(" ")))
    }

    fn run(&self) -> Result<f64, Error> {
        let [q, k, v, dout]: [View<'_>; 4] =
            [&self.q, &self.k, &self.v, &self.dout].map(Tensor::view);
        let begin = Instant::now();
        let forward = self.attention.forward(&q, &k, &v)?;
        if self.backward {
            let checkpoint = &forward.checkpoint;
            let gradients = self
                .attention
                .backward(&q, &k, &v, checkpoint, &dout, None)?;
            std::hint::black_box(&gradients.dq);
        }
        std::hint::black_box(&forward.out);
        Ok(begin.elapsed().as_secs_f64())
    }
}

fn tensor(random: &mut Random, dtype: DType, dims: [usize; 4]) -> Result<Tensor, Error> {
    let count: usize = dims.iter().product();
    let values: Vec<f64> = (0..count).map(|_| 1.7 * random.unit()).collect();
    Ok(Tensor::from_data(Data::from_f64(dtype, &values), dims)?)
}

/// Checks the same settings on a short sequence against the f64 reference before anything is timed.
fn check(fields: &[&str], dtype: DType, dims: [usize; 4], ranks: usize) -> Result<(), Error> {
    let [_, tokens, _, dim] = dims;
    let dims = [1, tokens.min(257), 2, dim];
    let shape = Shape::new(1, dims[1], 2, 2, dim)?;
    let attention = attention(fields, dims[1], ranks)?;
    let mut random = Random::new(3);
    let mut tensor = || tensor(&mut random, dtype, dims);
    let (q, k, v) = (tensor()?, tensor()?, tensor()?);
    let got = attention.forward(&q.view(), &k.view(), &v.view())?;
    let scale = shape.default_scale();
    let [q, k, v] = [&q, &k, &v].map(Tensor::to_f64);
    let expected = reference::forward(&shape, attention.pattern(), scale, &q, &k, &v)?;
    let pairs = got.out.to_f64().into_iter().zip(expected.out);
    let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    if worst > 16.0 * dtype.epsilon() {
        return Err(format!("the answer is off by {worst:e}; not worth timing").into());
    }
    Ok(())
}

/// A field of /proc/self/status in KiB: VmRSS is the resident size now, VmHWM its peak.
fn resident_kib(which: &str) -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with(which));
    let value = line.and_then(|line| line.split_whitespace().nth(1));
    value.unwrap_or("0").to_string()
}

fn main() -> Result<(), Error> {
    let mut benchmark: Option<CpuBenchmark> = None;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let fields: Vec<&str> = line.split_whitespace().collect();
        let answer = match (&fields[..], &benchmark) {
            (["peak", dtype], _) => peak(InstructionSet::from_env()?, dtype.parse()?).to_string(),
            (["resident"], _) => resident_kib("VmRSS"),
            (["forget"], _) => {
                // Resets VmHWM, the peak resident size.
                std::fs::write("/proc/self/clear_refs", "5")?;
                "forgotten".to_string()
            }
            (["memory"], _) => resident_kib("VmHWM"),
            (["times"], Some(benchmark)) => benchmark.times()?,
            (["run"], Some(benchmark)) => benchmark.run()?.to_string(),
            _ => {
                benchmark = Some(CpuBenchmark::new(&fields)?);
                "ready".to_string()
            }
        };
        println!("{answer}");
        std::io::stdout().flush()?;
    }
    Ok(())
}
