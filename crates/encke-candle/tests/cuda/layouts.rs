//! Tensors that are not contiguous, and whose memory a call reads.

use candle_core::{DType, Device, Tensor};
use encke::Pattern;
use encke_candle::{Attention, attention};

use crate::graph::{Told, compare, numbers, pass, told, wide};
use crate::numbers::tolerance;
use crate::plain;
use crate::tally::Tally;

pub fn run(tally: &mut Tally, device: &Device) {
    let types = [DType::F32, DType::BF16, DType::F16];
    let all = types
        .into_iter()
        .flat_map(|dtype| [1, 2].map(|ranks| (dtype, ranks)));
    let checks = all.map(|(dtype, ranks)| {
        let told = check(dtype, ranks, device);
        told.map_err(|what| format!("{dtype:?} on {ranks} ranks: {what}"))
    });
    tally.group("strided tensors", checks);
}

fn check(dtype: DType, ranks: usize, device: &Device) -> Told<()> {
    let (b, n, h, d) = (2, 48, 3, 40);
    let pattern = Pattern::dense().causal(true);
    let settings = encke::Attention::builder().pattern(pattern.clone());
    let attend = Attention::new(settings.ranks(ranks)).map_err(told)?;
    let expect = |name: &str, qkv: [Tensor; 3], lent: Option<usize>| -> Told<()> {
        let what = |what: String| format!("{name}: {what}");
        // A variable is contiguous, so gradients are asked of what the views are made from.
        let out = attention(&qkv[0], &qkv[1], &qkv[2], &attend);
        let out = out.map_err(told).map_err(what)?;
        let host = [wide(&qkv[0])?, wide(&qkv[1])?, wide(&qkv[2])?];
        let right = plain::attention(&host[0], &host[1], &host[2], &pattern).map_err(told)?;
        let (got, right) = (
            [(); 4].map(|()| out.clone()),
            [(); 4].map(|()| right.clone()),
        );
        compare(&got, &right, tolerance(dtype)).map_err(what)?;
        let report = attend.reports().forward.ok_or("no report")?;
        let bytes: usize = report.memory.iter().map(|memory| memory.lent_bytes).sum();
        match lent {
            Some(wanted) if wanted != bytes => Err(what(format!(
                "{bytes} bytes were read in place, not {wanted}"
            ))),
            _ => Ok(()),
        }
    };
    let make = |seed, dims| numbers(seed, dims, dtype, device);
    let turned = |seed| make(seed, [b, h, n, d])?.transpose(1, 2).map_err(told);
    let bytes = |batch: usize| Some(3 * batch * n * h * d * dtype.size_in_bytes());

    let whole = [
        make(1, [1, n, h, d])?,
        make(2, [1, n, h, d])?,
        make(3, [1, n, h, d])?,
    ];
    expect("contiguous", whole, bytes(1))?;
    expect("heads first", [turned(1)?, turned(2)?, turned(3)?], Some(0))?;
    let fused = make(4, [b, n, 3 * h, d])?;
    let part = |at: usize| fused.narrow(2, at * h, h).map_err(told);
    expect(
        "one projection for all three",
        [part(0)?, part(1)?, part(2)?],
        Some(0),
    )?;
    let end = make(5, [1, n + 5, h, d])?.narrow(1, 5, n).map_err(told)?;
    let end = [(); 3].map(|()| end.clone());
    expect("the end of a longer sequence", end, bytes(1))?;
    // Begins at an address that vectors cannot be read from.
    let odd = make(9, [1, 1, 1, n * h * d + 1])?.flatten_all();
    let odd = odd.and_then(|x| x.narrow(0, 1, n * h * d)?.reshape((1, n, h, d)));
    let odd = [(); 3].map(|()| odd.as_ref().map(Tensor::clone).map_err(told));
    let [q, k, v] = odd;
    expect("an odd address", [q?, k?, v?], Some(0))?;
    let one = make(6, [b, n, 1, d])?;
    let all = one.broadcast_as((b, n, h, d)).map_err(told)?;
    expect("one head for all", [turned(7)?, all.clone(), all], None)?;
    let columns = make(8, [b, n, d, h])?.transpose(2, 3).map_err(told)?;
    expect("columns", [(); 3].map(|()| columns.clone()), None)?;
    gradients(dtype, &attend, &pattern, device)
}

/// Gradients through views, and a gradient that arrives strided.
fn gradients(dtype: DType, attend: &Attention, pattern: &Pattern, device: &Device) -> Told<()> {
    let dims = [2, 3, 32, 64];
    let qkv = [
        numbers(11, dims, dtype, device)?,
        numbers(12, dims, dtype, device)?,
        numbers(13, dims, dtype, device)?,
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
