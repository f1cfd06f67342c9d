//! Few queries over very many keys: split and merged, against the kernels that do neither.

use encke_core::DType;
use encke_core::job::{Band, Job, Mask, Operand};
use encke_core::kernel::{Kernel, SoftmaxState};
use encke_core::memory::Memory;
use encke_core::plan::Pass;
use encke_core::sharding::Run;
use encke_cuda::{Buffer, CudaKernel, Path, generated_rows};

use crate::tally::GpuTally;

const KEYS: usize = 128 * 1024;
const HEADS: usize = 32;
const KEY_HEADS: usize = 8;
const DIM: usize = 128;

pub fn run(tally: &mut GpuTally, open: impl Fn() -> encke_cuda::Result<CudaKernel>) {
    let shapes = [1, 4, 8, 16, 64].map(|queries| [(queries, false), (queries, true)]);
    let checks = shapes.into_iter().flatten().map(|(queries, causal)| {
        let checked = check(&open, &job(queries, causal));
        checked.map_err(|what| format!("{queries} queries, causal {causal}: {what}"))
    });
    tally.group("few queries over 128k keys", checks);
}

/// Queries at the end of the keys.
fn job(queries: usize, causal: bool) -> Job {
    let operand = |row: usize, heads: Vec<usize>| Operand {
        offset: 0,
        batch: 0,
        segment: 0,
        row,
        heads: heads.into(),
    };
    let each = |width: usize| (0..HEADS).map(|head| head * width).collect();
    let shared = (0..HEADS).map(|head| head * KEY_HEADS / HEADS * DIM);
    Job {
        batch: 1,
        segments: 1,
        queries,
        keys: KEYS,
        heads: HEADS,
        dim: DIM,
        value_dim: DIM,
        q: operand(HEADS * DIM, each(DIM)),
        k: operand(KEY_HEADS * DIM, shared.collect()),
        cells: operand(HEADS, each(1)),
        delta: None,
        dq: None,
        mask: causal.then(|| Mask::Band(Band::causal((KEYS - queries, 1), (0, 1)))),
        transform: None,
        dropout: None,
        scale: (DIM as f64).powf(-0.5),
        gain: 1.0,
        tiles: None,
    }
}

/// Rows that the generator makes from a seed.
fn rows(kernel: &CudaKernel, seed: u64, rows: usize, heads: usize) -> Result<Buffer, String> {
    let made = kernel.allocate(DType::Bf16, rows * heads * DIM);
    let mut buffer = made.map_err(|error| error.to_string())?;
    let keys: Vec<u64> = (0..heads as u64).map(|head| seed + head).collect();
    let tokens = Run {
        first: 0,
        stride: 1,
        count: rows,
    };
    let filled = generated_rows::generate(kernel, tokens, &keys, DIM, (&mut buffer, 0));
    filled.map_err(|error| error.to_string())?;
    Ok(buffer)
}

/// out and lse.
fn attend(
    kernel: &CudaKernel,
    job: &Job,
    [q, k, v]: [&Buffer; 3],
) -> Result<[Vec<f64>; 2], String> {
    let attended = || -> encke_core::kernel::Result<[Vec<f64>; 2]> {
        let cells = job.queries * HEADS;
        let mut out = kernel.allocate(DType::Bf16, cells * DIM)?;
        let mut lse = kernel.allocate(DType::F32, cells)?;
        let state = SoftmaxState::Finish {
            carry: None,
            out: &mut out,
            lse: &mut lse,
        };
        kernel.attend(job, q, k, v, state)?;
        let [out, lse] = [kernel.move_to_host(out)?, kernel.move_to_host(lse)?];
        Ok([out.to_f64(), lse.to_f64()])
    };
    attended().map_err(|error| error.to_string())
}

fn check(open: impl Fn() -> encke_cuda::Result<CudaKernel>, job: &Job) -> Result<(), String> {
    let open = |path| open().map(|kernel| kernel.path(path));
    let [split, plain] = [open(Path::Auto), open(Path::Plain)];
    let (split, plain) = split
        .and_then(|split| Ok((split, plain?)))
        .map_err(|e| e.to_string())?;
    let inputs = |kernel: &CudaKernel| -> Result<[Buffer; 3], String> {
        let of_keys = |seed| rows(kernel, seed, KEYS, KEY_HEADS);
        Ok([
            rows(kernel, 1, job.queries, HEADS)?,
            of_keys(100)?,
            of_keys(200)?,
        ])
    };
    let expected = attend(&plain, job, inputs(&plain)?.each_ref())?;
    drop(plain);

    let inputs = inputs(&split)?;
    let [out, lse] = attend(&split, job, inputs.each_ref())?;
    let again = attend(&split, job, inputs.each_ref())?;
    if again != [out.clone(), lse.clone()] {
        return Err("a second call has other bits".into());
    }
    let (mut off, mut size) = (0.0, 0.0);
    for (x, y) in out.iter().zip(&expected[0]) {
        (off, size) = (off + (x - y) * (x - y), size + y * y);
    }
    let distance = (off / size).sqrt();
    let lse_off = lse.iter().zip(&expected[1]).map(|(x, y)| (x - y).abs());
    let lse_off = lse_off.fold(0.0, |worst: f64, x| if x <= worst { worst } else { x });
    // Written so that a NaN fails.
    if !(distance < 1e-2 && lse_off < 1e-4) {
        return Err(format!(
            "out is off by {distance:.2e}, lse by {lse_off:.2e}"
        ));
    }

    // Planned is allocated. The peak includes out and lse, which are freed by now.
    let planned = split.workspace_bytes(job, Pass::Forward, DType::Bf16);
    let results = job.queries * HEADS * (2 * DIM + 4);
    let (now, peak) = split.device().allocated_bytes();
    match (planned, peak - now) {
        (0, _) => Err("the keys were not split".into()),
        (planned, found) if found != planned + results => Err(format!(
            "planned {planned} bytes of workspace, allocated {}",
            found as i64 - results as i64
        )),
        _ => Ok(()),
    }
}
