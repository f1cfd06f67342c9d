//! Shared by the groups: a loss with gradients, error texts, and comparisons.

use candle_core::{DType, Device, Tensor, Var};
use encke::{MixingGradient, Mode, OffsetRule, Pattern};

use crate::plain::{distance, random};

/// A check's result; the error is a message.
pub type CheckResult<T> = Result<T, String>;

/// A check on a device. Checks run one at a time, so that printed times are not disturbed.
pub type DeviceCheck = fn(&Device) -> CheckResult<()>;

pub fn to_text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// A LongNet pattern of two branches.
pub fn longnet(segments: [usize; 2], rates: [usize; 2]) -> Pattern {
    let mode = Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Exact,
    };
    let pattern = Pattern::dilated(&segments, &rates, mode);
    pattern.expect("a valid pattern").causal(true)
}

/// A random tensor on a device.
pub fn random_on(
    seed: usize,
    dims: [usize; 4],
    dtype: DType,
    device: &Device,
) -> CheckResult<Tensor> {
    let values = random(seed, dims).to_dtype(dtype);
    values.and_then(|x| x.to_device(device)).map_err(to_text)
}

/// The output, and the gradients of q, k and v of a loss that weighs every output element
/// differently.
pub fn pass(
    qkv: &[Tensor; 3],
    run: impl Fn(&Tensor, &Tensor, &Tensor) -> candle_core::Result<Tensor>,
) -> CheckResult<[Tensor; 4]> {
    let of = |x: &Tensor| Var::from_tensor(x).map_err(to_text);
    let (q, k, v) = (of(&qkv[0])?, of(&qkv[1])?, of(&qkv[2])?);
    let out = run(&q, &k, &v).map_err(to_text)?;
    let dims: [usize; 4] = out.dims().try_into().map_err(|_| "not four dimensions")?;
    let weights = random_on(99, dims, out.dtype(), out.device())?;
    let loss = (&out * weights)
        .and_then(|x| x.sum_all())
        .map_err(to_text)?;
    let gradients = loss.backward().map_err(to_text)?;
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

/// The tensor in f64 on the CPU.
pub fn wide(x: &Tensor) -> CheckResult<Tensor> {
    let host = x.to_device(&Device::Cpu);
    host.and_then(|x| x.to_dtype(DType::F64)).map_err(to_text)
}

/// The largest relative difference; an error that names the tensor if it exceeds the tolerance.
pub fn compare(got: &[Tensor; 4], expected: &[Tensor; 4], tolerance: f64) -> CheckResult<f64> {
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

/// Fails if a single bit differs.
pub fn same_bits(got: &[Tensor; 4], expected: &[Tensor; 4]) -> CheckResult<()> {
    compare(got, expected, 0.0).map(|_| ())
}
