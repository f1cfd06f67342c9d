//! Jobs on a grid: their bits do not depend on where rows are cut into jobs between tiles.

use std::ops::Range;

use encke_core::Data;
use encke_core::dtype::Slice;
use encke_core::job::{Band, Job, JobTiles, Mask, TilePart, Window};
use encke_core::kernel::{Carry, Gradients, Kernel, SoftmaxState, Upstream};
use encke_cpu::internals::{Emulated, Hardware};
use encke_cpu::{CpuKernel, InstructionSet};
use half::{bf16, f16};

use super::kernel::{TestedElement, TileKernel, available};
use super::{TileKernelInputs, job};

const TILE: usize = 64;

fn part(whole: &Job, queries: Range<usize>, keys: Range<usize>, part: TilePart) -> Job {
    let mut job = whole.of_queries(queries.clone());
    job.k.offset += keys.start * job.k.row;
    job.keys = keys.len();
    if let Some(Mask::Band(band)) = &mut job.mask {
        band.key += keys.start * band.key_step;
    }
    job.tiles = Some(JobTiles {
        tile: TILE,
        query: queries.start,
        key: keys.start,
        part,
    });
    job
}

/// The jobs of a ring that is cut at these rows, in its order.
fn jobs(whole: &Job, cuts: &[usize]) -> Vec<Job> {
    let shards: Vec<Range<usize>> = cuts.windows(2).map(|cut| cut[0]..cut[1]).collect();
    let ranks = shards.len();
    let mut jobs = Vec::new();
    for distance in 0..=ranks {
        for (rank, queries) in shards.iter().enumerate() {
            let owner = (rank + 2 * ranks - distance) % ranks;
            let which = match distance {
                0 => TilePart::UpToOwn,
                _ if owner == rank => TilePart::AfterOwn,
                _ => TilePart::All,
            };
            let job = part(whole, queries.clone(), shards[owner].clone(), which);
            jobs.extend((job.pairs() > 0).then_some(job));
        }
    }
    jobs
}

/// out, lse, dq, dk and dv.
fn results<N: TestedElement, K>(kernel: &K, whole: &Job, cuts: &[usize]) -> [Data; 5]
where
    K: for<'a> Kernel<Buffer = Data, Input<'a> = Slice<'a>>,
{
    let inputs = TileKernelInputs::new::<N>(whole, 5);
    let [q, k, v, dout] = [&inputs.q, &inputs.k, &inputs.v, &inputs.dout].map(Data::as_slice);
    let cells = whole.queries * whole.heads;
    let (rows, key_rows) = (cells * whole.dim, k.len());
    let mut carry = Carry {
        acc: Data::F32(vec![0.0; rows]),
        m: Data::F32(vec![f32::NEG_INFINITY; cells]),
        l: Data::F32(vec![0.0; cells]),
    };
    let jobs = jobs(whole, cuts);
    for job in &jobs {
        let state = SoftmaxState::Accumulate {
            carry: &mut carry,
            starts: false,
        };
        kernel.attend(job, q, k, v, state).unwrap();
    }
    let mut out = Data::F32(vec![0.0; rows]);
    let [mut lse, mut delta] = [(); 2].map(|()| Data::F32(vec![0.0; cells]));
    let finished = kernel.finish(cells, whole.dim, whole.gain, &carry, &mut out, &mut lse);
    finished.unwrap();
    let given = kernel.input(&out);
    kernel
        .delta(cells, whole.dim, given, dout, None, &mut delta)
        .unwrap();
    let mut dq = Data::F32(vec![0.0; rows]);
    let [mut dk, mut dv] = [(); 2].map(|()| Data::F32(vec![0.0; key_rows]));
    for step in jobs.iter().flat_map(Job::tile_steps) {
        let upstream = Upstream {
            dout,
            lse: lse.as_slice(),
            delta: delta.as_slice(),
        };
        let gradients = Gradients {
            dq: &mut dq,
            dk: &mut dk,
            dv: &mut dv,
        };
        kernel
            .backward(&step, q, k, v, upstream, gradients)
            .unwrap();
    }
    [out, lse, dq, dk, dv]
}

fn same_for_all_cuts<N: TestedElement, K>(kernel: &K)
where
    K: for<'a> Kernel<Buffer = Data, Input<'a> = Slice<'a>>,
{
    let band = |window| Band {
        window,
        ..Band::causal((0, 1), (0, 1))
    };
    let sliding = Window {
        left: Some(90),
        right: Some(70),
    };
    for mask in [None, Some(Window::CAUSAL), Some(sliding)] {
        for dim in [24, 80] {
            let whole = job(300, 300, 4, dim, mask.map(band));
            let expected = results::<N, K>(kernel, &whole, &[0, 300]);
            for cuts in [&[0, 128, 300][..], &[0, 64, 128, 256, 300]] {
                let got = results::<N, K>(kernel, &whole, cuts);
                let bits = |data: &[Data; 5]| data.each_ref().map(|data| data.bytes().to_vec());
                assert!(bits(&got) == bits(&expected), "{mask:?}, {dim}, {cuts:?}");
            }
        }
    }
}

#[test]
fn emulated_tiles_have_the_same_bits_for_all_cuts() {
    if available::<Emulated>() {
        same_for_all_cuts::<bf16, _>(&TileKernel::<Emulated, bf16>::new());
        same_for_all_cuts::<f16, _>(&TileKernel::<Emulated, f16>::new());
        same_for_all_cuts::<f32, _>(&TileKernel::<Emulated, f32>::new());
    }
}

#[test]
fn hardware_tiles_have_the_same_bits_for_all_cuts() {
    if available::<Hardware>() {
        let kernel = CpuKernel::with(InstructionSet::Amx).unwrap();
        same_for_all_cuts::<bf16, _>(&kernel);
        same_for_all_cuts::<f16, _>(&kernel);
        same_for_all_cuts::<f32, _>(&kernel);
    }
}
