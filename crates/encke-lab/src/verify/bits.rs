//! Bits that do not depend on the ring: random configurations on rings of several sizes, compared
//! bit for bit with one rank.
//!
//! The decision here: on a GPU most configurations have the tiles, types and head dimensions that
//! its fastest kernels take; the others have the smallest tiles, as on the CPU.

use std::fmt;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use encke::conformance::{CallTensors, Configuration, Random, TiledSizes};
use encke::{Attention, Bits, Builder, CudaKernel, DType, Kernel, Tensor};

use crate::device::{ComputeDevice, open_gpu};

/// The rings that are compared with one rank.
const RINGS: [usize; 5] = [2, 3, 4, 8, 16];
const TYPES: [DType; 4] = [DType::F32, DType::Bf16, DType::F16, DType::F64];

/// Tensors by name.
type NamedTensors = Vec<(&'static str, Arc<Tensor>)>;

/// The device that computes, and how many tensors were compared.
pub struct BitsSuite {
    device: ComputeDevice,
    /// Opened once, and again after a configuration that failed before it returned the kernel.
    gpu: Option<CudaKernel>,
    tensors: usize,
    /// Rings with more than one rank that has tokens.
    cut: usize,
    rings: usize,
}

impl BitsSuite {
    /// Opens the device.
    pub fn new(device: ComputeDevice) -> Result<BitsSuite> {
        let gpu = match device {
            ComputeDevice::Cpu => None,
            ComputeDevice::Cuda(index) => Some(open_gpu(index)?),
        };
        Ok(BitsSuite {
            device,
            gpu,
            tensors: 0,
            cut: 0,
            rings: 0,
        })
    }

    /// Runs the configuration of a seed on every ring; the error says what differs.
    pub fn run(&mut self, seed: u64) -> Result<()> {
        let case = match self.device {
            ComputeDevice::Cpu => Configuration::tiled(seed, Random::new(seed).pick(&TYPES)),
            ComputeDevice::Cuda(_) => gpu_configuration(seed),
        };
        let alone = self.results(&case, 1)?.0;
        if self.gpu.is_some() {
            let mut planned = case.clone();
            planned.request.bits = Bits::Planned;
            check_values(&alone, &self.results(&planned, 1)?.0, &case)?;
        }
        for ranks in RINGS {
            let (ring, cut) = self.results(&case, ranks)?;
            self.rings += 1;
            self.cut += usize::from(cut);
            for ((name, one), (_, other)) in alone.iter().zip(&ring) {
                ensure!(
                    one.data().bytes() == other.data().bytes(),
                    "{name} has other bits on {ranks} ranks than on one: {:?}",
                    case.request
                );
                self.tensors += 1;
            }
        }
        Ok(())
    }

    /// out, lse, dq, dk and dv, and whether several ranks have tokens.
    fn results(&mut self, case: &Configuration, ranks: usize) -> Result<(NamedTensors, bool)> {
        let builder = builder(case, ranks);
        let ComputeDevice::Cuda(index) = self.device else {
            return results_on(&builder.build()?, case, ranks);
        };
        let gpu = self.gpu.take().map_or_else(|| open_gpu(index), Ok)?;
        let attention = builder.build_on(gpu)?;
        let results = results_on(&attention, case, ranks);
        self.gpu = attention.into_kernel();
        results.with_context(|| format!("on {ranks} ranks: {:?}", case.request))
    }
}

impl fmt::Display for BitsSuite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "  {} tensors equal bit for bit on {} rings of {RINGS:?} ranks and on one rank; {} of \
             the rings cut the sequence",
            self.tensors, self.rings, self.cut
        )
    }
}

/// Compares tensors with those of planned bits, whose kernels are tested against the reference:
/// what is shared by all rings may still be wrong.
fn check_values(got: &NamedTensors, planned: &NamedTensors, case: &Configuration) -> Result<()> {
    let allowed = match case.request.dtype {
        DType::F64 => 1e-12,
        DType::F32 => 1e-5,
        DType::F16 => 4e-3,
        DType::Bf16 => 3e-2,
    };
    for ((name, got), (_, planned)) in got.iter().zip(planned) {
        let (got, planned) = (got.to_f64(), planned.to_f64());
        let finite = planned.iter().filter(|x| x.is_finite());
        let most = finite.fold(1e-3, |most: f64, x| most.max(x.abs()));
        let off = |(x, y): (&f64, &f64)| if x == y { 0.0 } else { (x - y).abs() / most };
        let off = got.iter().zip(&planned).map(off);
        let worst = off.fold(
            0.0,
            |worst: f64, x| if x > worst || x.is_nan() { x } else { worst },
        );
        ensure!(
            worst <= allowed,
            "{name} is {worst:.1e} from that of planned bits: {:?}",
            case.request
        );
    }
    Ok(())
}

/// The configuration of a seed for a GPU.
fn gpu_configuration(seed: u64) -> Configuration {
    let mut random = Random::new(seed);
    if random.once_in(4) {
        return Configuration::tiled(seed, random.pick(&TYPES));
    }
    let (dtype, tile, dims): (_, _, &[usize]) = match random.once_in(2) {
        true => (DType::Bf16, 128, &[64, 128]),
        false => (DType::F16, 256, &[80, 192]),
    };
    let sizes = TiledSizes {
        tile,
        tokens: 10 * tile,
        dims,
    };
    let mut case = Configuration::tiled_with(seed, dtype, sizes);
    // Most calls have what Hopper's kernels take.
    if !random.once_in(4) {
        let request = &mut case.request;
        (request.softcap, request.slopes, request.dropout) = (None, None, None);
        request.shape.value_dim = request.shape.dim;
    }
    case
}

fn builder(case: &Configuration, ranks: usize) -> Builder {
    let request = &case.request;
    Attention::builder()
        .pattern(request.pattern.clone())
        .ranks(ranks)
        .softcap(request.softcap)
        .slopes(request.slopes.clone())
        .dropout(request.dropout)
        .bits(request.bits)
}

fn results_on<K: Kernel>(
    attention: &Attention<K>,
    case: &Configuration,
    ranks: usize,
) -> Result<(NamedTensors, bool)> {
    let request = &case.request;
    let tensors = CallTensors::random(&request.shape, case.seed);
    let CallTensors {
        q,
        k,
        v,
        dout,
        dlse,
    } = &tensors;
    let stored =
        |tensor: &Tensor, dtype: DType| Tensor::from_f64(dtype, tensor.dims(), &tensor.to_f64());
    let dtype = request.dtype;
    let [q, k, v] = [stored(q, dtype)?, stored(k, dtype)?, stored(v, dtype)?];
    let (dout, dlse) = (stored(dout, dtype)?, stored(dlse, dtype.sum())?);
    let forward = attention.forward(&q.view(), &k.view(), &v.view())?;
    let sharding = &forward.report.plan.request().sharding;
    let with_tokens = |rank: &usize| sharding.rows(request.shape.tokens, *rank) > 0;
    let cut = (0..ranks).filter(with_tokens).count() > 1;
    let backward = attention.backward(
        &q.view(),
        &k.view(),
        &v.view(),
        &forward.checkpoint,
        &dout.view(),
        Some(&dlse.view()),
    )?;
    let tensors = vec![
        ("out", Arc::clone(&forward.out)),
        ("lse", Arc::clone(&forward.lse)),
        ("dq", Arc::new(backward.dq)),
        ("dk", Arc::new(backward.dk)),
        ("dv", Arc::new(backward.dv)),
    ];
    Ok((tensors, cut))
}
