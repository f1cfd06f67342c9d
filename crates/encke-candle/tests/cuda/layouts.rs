//! Tensors that are not contiguous, and which of them are read in place.

use candle_core::{DType, Device, Tensor};
use encke::Pattern;
use encke_candle::{Attention, attention};

use crate::accuracy::tolerance;
use crate::graph::{CheckResult, compare, pass, random_on, to_text, wide};
use crate::plain;
use crate::tally::Tally;

pub fn run(tally: &mut Tally, device: &Device) {
    let types = [DType::F32, DType::BF16, DType::F16];
    let all = types
        .into_iter()
        .flat_map(|dtype| [1, 2].map(|ranks| (dtype, ranks)));
    let checks = all.map(|(dtype, ranks)| {
        let result = check(dtype, ranks, device);
        result.map_err(|what| format!("{dtype:?} on {ranks} ranks: {what}"))
    });
    tally.group("strided tensors", checks);
}

fn check(dtype: DType, ranks: usize, device: &Device) -> CheckResult<()> {
    let (b, n, h, d) = (2, 48, 3, 40);
    let pattern = Pattern::dense().causal(true);
    let settings = encke::Attention::builder().pattern(pattern.clone());
    let attend = Attention::new(settings.ranks(ranks)).map_err(to_text)?;
    let expect = |name: &str, qkv: [Tensor; 3], borrowed: Option<usize>| -> CheckResult<()> {
        let what = |what: String| format!("{name}: {what}");
        // A Var is contiguous, so gradients through views are checked in `gradients`.
        let out = attention(&qkv[0], &qkv[1], &qkv[2], &attend);
        let out = out.map_err(to_text).map_err(what)?;
        let host = [wide(&qkv[0])?, wide(&qkv[1])?, wide(&qkv[2])?];
        let right = plain::attention(&host[0], &host[1], &host[2], &pattern).map_err(to_text)?;
        let (got, right) = (
            [(); 4].map(|()| out.clone()),
            [(); 4].map(|()| right.clone()),
        );
        compare(&got, &right, tolerance(dtype)).map_err(what)?;
        let report = attend.reports().forward.ok_or("no report")?;
        let bytes: usize = report
            .memory
            .iter()
            .map(|memory| memory.borrowed_bytes)
            .sum();
        match borrowed {
            Some(expected) if expected != bytes => Err(what(format!(
                "{bytes} bytes were read in place, not {expected}"
            ))),
            _ => Ok(()),
        }
    };
    let make = |seed, dims| random_on(seed, dims, dtype, device);
    let turned = |seed| make(seed, [b, h, n, d])?.transpose(1, 2).map_err(to_text);
    let bytes = |batch: usize| Some(3 * batch * n * h * d * dtype.size_in_bytes());

    let whole = [
        make(1, [1, n, h, d])?,
        make(2, [1, n, h, d])?,
        make(3, [1, n, h, d])?,
    ];
    expect("contiguous", whole, bytes(1))?;
    expect("heads first", [turned(1)?, turned(2)?, turned(3)?], Some(0))?;
    let fused = make(4, [b, n, 3 * h, d])?;
    let part = |at: usize| fused.narrow(2, at * h, h).map_err(to_text);
    expect(
        "one projection for all three",
        [part(0)?, part(1)?, part(2)?],
        Some(0),
    )?;
    let end = make(5, [1, n + 5, h, d])?
        .narrow(1, 5, n)
        .map_err(to_text)?;
    let end = [(); 3].map(|()| end.clone());
    expect("the end of a longer sequence", end, bytes(1))?;
    // Starts at an address that is not aligned for vector loads.
    let odd = make(9, [1, 1, 1, n * h * d + 1])?.flatten_all();
    let odd = odd.and_then(|x| x.narrow(0, 1, n * h * d)?.reshape((1, n, h, d)));
    let odd = [(); 3].map(|()| odd.as_ref().map(Tensor::clone).map_err(to_text));
    let [q, k, v] = odd;
    expect("an odd address", [q?, k?, v?], Some(0))?;
    let one = make(6, [b, n, 1, d])?;
    let all = one.broadcast_as((b, n, h, d)).map_err(to_text)?;
    expect("one head for all", [turned(7)?, all.clone(), all], None)?;
    let columns = make(8, [b, n, d, h])?.transpose(2, 3).map_err(to_text)?;
    expect("columns", [(); 3].map(|()| columns.clone()), None)?;
    gradients(dtype, &attend, &pattern, device)
}

/// Gradients through views, with a strided incoming gradient.
fn gradients(
    dtype: DType,
    attend: &Attention,
    pattern: &Pattern,
    device: &Device,
) -> CheckResult<()> {
    let dims = [2, 3, 32, 64];
    let qkv = [
        random_on(11, dims, dtype, device)?,
        random_on(12, dims, dtype, device)?,
        random_on(13, dims, dtype, device)?,
    ];
    let host = [wide(&qkv[0])?, wide(&qkv[1])?, wide(&qkv[2])?];
    type Run<'a> = &'a dyn Fn(&Tensor, &Tensor, &Tensor) -> candle_core::Result<Tensor>;
    let turned = |run: Run<'_>, qkv: &[Tensor; 3]| {
        pass(qkv, |q, k, v| {
            let (q, k, v) = (q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?);
            run(&q, &k, &v)?.transpose(1, 2)
        })
    };
    let got = turned(&|q, k, v| attention(q, k, v, attend), &qkv)?;
    let right = turned(&|q, k, v| plain::attention(q, k, v, pattern), &host)?;
    let compared = compare(&got, &right, tolerance(dtype));
    compared
        .map(|_| ())
        .map_err(|what| format!("through transposes: {what}"))
}
