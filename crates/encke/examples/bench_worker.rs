//! One contestant of `bench/cpu.py`: reads a configuration from a line of standard input, then
//! answers each further `run` with the seconds of one call, so that the script can take turns with
//! its rival. `peak DTYPE` answers with the GFLOP/s that registers alone do in the same minute, `times`
//! with where the milliseconds of one call went.

use std::io::{BufRead, Write};
use std::time::Instant;

use encke::conformance::Random;
use encke::{
    Activity, Attention, Cut, DType, Data, GroupScale, Mode, Pattern, Shape, Tensor, View,
    reference,
};
use encke_cpu::{InstructionSet, peak};

type Failure = Box<dyn std::error::Error>;

/// A configuration: `dtype batch tokens heads dim causal segment dilation ranks backward`.
struct Contest {
    attention: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    backward: bool,
}

fn field<T: std::str::FromStr>(words: &[&str], at: usize) -> Result<T, Failure>
where
    T::Err: std::error::Error + 'static,
{
    let word = words.get(at).ok_or("too few words in the configuration")?;
    Ok(word.parse()?)
}

fn attention(words: &[&str], tokens: usize, ranks: usize) -> Result<Attention, Failure> {
    let causal: usize = field(words, 5)?;
    let (segment, dilation): (usize, usize) = (field(words, 6)?, field(words, 7)?);
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

impl Contest {
    fn new(words: &[&str]) -> Result<Contest, Failure> {
        let dtype: DType = field(words, 0)?;
        let dims: [usize; 4] = [
            field(words, 1)?,
            field(words, 2)?,
            field(words, 3)?,
            field(words, 4)?,
        ];
        let ranks = field(words, 8)?;
        check(words, dtype, dims, ranks)?;
        let mut random = Random::new(7);
        let mut tensor = || tensor(&mut random, dtype, dims);
        Ok(Contest {
            attention: attention(words, dims[1], ranks)?,
            q: tensor()?,
            k: tensor()?,
            v: tensor()?,
            dout: tensor()?,
            backward: field::<usize>(words, 9)? == 1,
        })
    }

    /// Milliseconds of one forward pass by activity, summed over ranks, and as a whole.
    fn times(&self) -> Result<String, Failure> {
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

    fn run(&self) -> Result<f64, Failure> {
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

fn tensor(random: &mut Random, dtype: DType, dims: [usize; 4]) -> Result<Tensor, Failure> {
    let count: usize = dims.iter().product();
    let values: Vec<f64> = (0..count).map(|_| 1.7 * random.unit()).collect();
    Ok(Tensor::from_data(Data::from_f64(dtype, &values), dims)?)
}

/// The answer first: the same settings on a short sequence against the reference.
fn check(words: &[&str], dtype: DType, dims: [usize; 4], ranks: usize) -> Result<(), Failure> {
    let [_, tokens, _, dim] = dims;
    let dims = [1, tokens.min(257), 2, dim];
    let shape = Shape::new(1, dims[1], 2, 2, dim)?;
    let attention = attention(words, dims[1], ranks)?;
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

/// Resident size of this process, now or at most so far, in KiB.
fn resident_kib(which: &str) -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with(which));
    let words = line.and_then(|line| line.split_whitespace().nth(1));
    words.unwrap_or("0").to_string()
}

fn main() -> Result<(), Failure> {
    let mut contest: Option<Contest> = None;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = match (&words[..], &contest) {
            (["peak", dtype], _) => peak(InstructionSet::chosen()?, dtype.parse()?).to_string(),
            (["resident"], _) => resident_kib("VmRSS"),
            (["forget"], _) => {
                // The system counts the largest resident size anew from here.
                std::fs::write("/proc/self/clear_refs", "5")?;
                "forgotten".to_string()
            }
            (["memory"], _) => resident_kib("VmHWM"),
            (["times"], Some(contest)) => contest.times()?,
            (["run"], Some(contest)) => contest.run()?.to_string(),
            _ => {
                contest = Some(Contest::new(&words)?);
                "ready".to_string()
            }
        };
        println!("{answer}");
        std::io::stdout().flush()?;
    }
    Ok(())
}
