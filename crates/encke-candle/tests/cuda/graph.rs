//! What the groups share: a loss with gradients, words of errors, and how far results are apart.

use candle_core::{DType, Device, Tensor, Var};
use encke::{MixingGradient, Mode, OffsetRule, Pattern};

use crate::plain::{distance, random};

/// An outcome of a check, with words.
pub type Told<T> = Result<T, String>;

/// A check on a device. Groups run theirs one by one, so that the times they print are theirs.
pub type Check = fn(&Device) -> Told<()>;

/// An error in its words.
pub fn told(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// A LongNet pattern of two branches.
pub fn longnet(segments: [usize; 2], rates: [usize; 2]) -> Pattern {
    let mode = Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Exact,
    };
    let pattern = Pattern::dilated(&segments, &rates, mode);
    pattern.expect("a pattern that is one").causal(true)
}

/// Seeded numbers of a type on a device.
pub fn numbers(seed: usize, dims: [usize; 4], dtype: DType, device: &Device) -> Told<Tensor> {
    let numbers = random(seed, dims).to_dtype(dtype);
    numbers.and_then(|x| x.to_device(device)).map_err(told)
}

/// The output and the gradients of q, k and v of a loss that uses every number of the output
/// differently.
pub fn pass(
    qkv: &[Tensor; 3],
    run: impl Fn(&Tensor, &Tensor, &Tensor) -> candle_core::Result<Tensor>,
) -> Told<[Tensor; 4]> {
    let of = |x: &Tensor| Var::from_tensor(x).map_err(told);
    let (q, k, v) = (of(&qkv[0])?, of(&qkv[1])?, of(&qkv[2])?);
    let out = run(&q, &k, &v).map_err(told)?;
    let dims: [usize; 4] = out.dims().try_into().map_err(|_| "not four dimensions")?;
    let weights = numbers(99, dims, out.dtype(), out.device())?;
    let loss = (&out * weights).and_then(|x| x.sum_all()).map_err(told)?;
    let gradients = loss.backward().map_err(told)?;
    let gradient = |x: &Var, name: &str| {
        let found = gradients.get(x).cloned();
        found.ok_or_else(|| format!("{name} has no gradient"))
    };
    Ok([
        out.clone(),
        gradient(&q, "q")?,
        gradient(&k, "k")?,
        gradient(&v, "v")?,
    ])
}

/// The same numbers in f64 on the CPU.
pub fn wide(x: &Tensor) -> Told<Tensor> {
    let host = x.to_device(&Device::Cpu);
    host.and_then(|x| x.to_dtype(DType::F64)).map_err(told)
}

/// How far results are from what is expected; fails above a tolerance, naming the tensor.
pub fn compare(got: &[Tensor; 4], expected: &[Tensor; 4], tolerance: f64) -> Told<f64> {
    let mut furthest: f64 = 0.0;
    for (name, (got, expected)) in ["out", "dq", "dk", "dv"]
        .into_iter()
        .zip(got.iter().zip(expected))
    {
        if got.dims() != expected.dims() {
            return Err(format!("{name} is {:?}", got.dims()));
        }
        let apart = distance(&wide(got)?, &wide(expected)?);
        if apart > tolerance {
            return Err(format!(
                "{name} is {apart:.1e} apart, more than {tolerance:.0e}"
            ));
        }
        furthest = furthest.max(apart);
    }
    Ok(furthest)
}

/// Refuses a single other bit.
pub fn same_bits(got: &[Tensor; 4], expected: &[Tensor; 4]) -> Told<()> {
    compare(got, expected, 0.0).map(|_| ())
}
