//! Bits that do not depend on the ring: random configurations on rings of several sizes, compared
//! bit for bit with one rank.

use std::fmt;

use anyhow::{Result, ensure};
use encke::conformance::{CallTensors, Configuration, Random};
use encke::{Attention, DType, Tensor};

/// The rings that are compared with one rank.
const RINGS: [usize; 5] = [2, 3, 4, 8, 16];
const TYPES: [DType; 4] = [DType::F32, DType::Bf16, DType::F16, DType::F64];

/// The bytes of tensors, by name.
type TensorBytes = Vec<(&'static str, Vec<u8>)>;

/// How many tensors were compared.
#[derive(Debug, Default)]
pub struct BitsSuite {
    tensors: usize,
    /// Rings with more than one rank that has tokens.
    cut: usize,
    rings: usize,
}

impl BitsSuite {
    /// Runs the configuration of a seed on every ring; the error says what differs.
    pub fn run(&mut self, seed: u64) -> Result<()> {
        let dtype = Random::new(seed).pick(&TYPES);
        let case = Configuration::tiled(seed, dtype);
        let alone = results(&case, 1)?.0;
        for ranks in RINGS {
            let (ring, cut) = results(&case, ranks)?;
            self.rings += 1;
            self.cut += usize::from(cut);
            for ((name, one), (_, other)) in alone.iter().zip(&ring) {
                ensure!(
                    one == other,
                    "{name} has other bits on {ranks} ranks than on one: {:?}",
                    case.request
                );
                self.tensors += 1;
            }
        }
        Ok(())
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

/// The bytes of out, lse, dq, dk and dv, and whether several ranks have tokens.
fn results(case: &Configuration, ranks: usize) -> Result<(TensorBytes, bool)> {
    let request = &case.request;
    let attention = Attention::builder()
        .pattern(request.pattern.clone())
        .ranks(ranks)
        .softcap(request.softcap)
        .slopes(request.slopes.clone())
        .dropout(request.dropout)
        .bits(request.bits)
        .build()?;
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
    let bytes = |tensor: &Tensor| tensor.data().bytes().to_vec();
    let tensors = vec![
        ("out", bytes(&forward.out)),
        ("lse", bytes(&forward.lse)),
        ("dq", bytes(&backward.dq)),
        ("dk", bytes(&backward.dk)),
        ("dv", bytes(&backward.dv)),
    ];
    Ok((tensors, cut))
}
