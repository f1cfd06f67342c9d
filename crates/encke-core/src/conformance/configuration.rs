//! Random requests for whole rings, with input tensors: the test cases of every ring driver.

use super::random::Random;
use crate::dtype::{DType, Data};
use crate::pattern::{GroupScale, MixingGradient, Mode, OffsetRule, Pattern};
use crate::plan::rings::Rotating;
use crate::plan::{Queries, Request, Schedule};
use crate::shape::Shape;
use crate::sharding::{Cut, Sharding};
use crate::tensor::Tensor;

/// One random request, small enough for the reference, and the seed of its inputs.
#[derive(Debug, Clone)]
pub struct Configuration {
    /// The request.
    pub request: Request,
    /// The seed of its inputs.
    pub seed: u64,
}

fn pattern(random: &mut Random, heads: usize) -> Pattern {
    let causal = random.below(2) == 0;
    if random.below(4) == 0 {
        return Pattern::dense().causal(causal);
    }
    let mix = random.below(2) == 0;
    let most = if mix { 3 } else { heads.min(3) };
    let branches = 1 + random.below(most);
    let segments: Vec<usize> = (0..branches).map(|_| 1 + random.below(40)).collect();
    let dilations: Vec<usize> = (0..branches).map(|_| 1 + random.below(6)).collect();
    let mode = if mix {
        Mode::Mix {
            offsets: [OffsetRule::HeadMod, OffsetRule::HeadBlock][random.below(2)],
            gradient: MixingGradient::Exact,
        }
    } else {
        Mode::Group {
            scale: [GroupScale::One, GroupScale::Groups][random.below(2)],
        }
    };
    let pattern = Pattern::dilated(&segments, &dilations, mode);
    pattern.expect("sizes are positive").causal(causal)
}

fn cut(random: &mut Random, tokens: usize, ranks: usize) -> Cut {
    match random.below(4) {
        0 => Cut::Contiguous,
        1 => Cut::Zigzag,
        2 => Cut::Striped,
        _ => {
            let mut firsts: Vec<usize> = (1..ranks).map(|_| random.below(tokens + 1)).collect();
            firsts.push(0);
            firsts.sort_unstable();
            Cut::Firsts(firsts)
        }
    }
}

impl Configuration {
    /// The configuration of a seed: any mode with one slot per head, any cut, sharded or replicated
    /// queries.
    pub fn random(seed: u64) -> Configuration {
        let mut random = Random::new(seed);
        let kv_heads = 1 + random.below(3);
        let heads = kv_heads * (1 + random.below(3));
        let tokens = 1 + random.below(70);
        let ranks = [1, 2, 3, 4, 5, 8, 16, 32][random.below(8)];
        let dim = 1 + random.below(5);
        let shape = Shape::new(1 + random.below(2), tokens, heads, kv_heads, dim);
        let pattern = pattern(&mut random, heads);
        let sharding = Sharding::new(ranks, cut(&mut random, tokens, ranks));
        let mut request = Request::new(
            shape.expect("sizes are positive"),
            pattern,
            sharding.expect("ranks are positive"),
            DType::F64,
        );
        if random.below(3) == 0 {
            request.queries = Queries::Replicated;
        }
        // Drawn last, so that adding the schedule did not change the rest of a seed's
        // configuration.
        let width = random.pick(&[1, 1, 2, 3, usize::MAX]);
        let backward = random.pick(&[Rotating::Keys, Rotating::Queries]);
        request.schedule = Schedule { width, backward };
        Configuration { request, seed }
    }
}

/// The tensors of a call, in f64.
#[derive(Debug, Clone)]
pub struct CallTensors {
    /// `[b, n, heads, d]`.
    pub q: Tensor,
    /// `[b, n, kv_heads, d]`.
    pub k: Tensor,
    /// `[b, n, kv_heads, d]`.
    pub v: Tensor,
    /// `[b, n, heads, d]`.
    pub dout: Tensor,
    /// `[b, n, heads, 1]`.
    pub dlse: Tensor,
}

impl CallTensors {
    /// The tensors of a seed.
    pub fn random(shape: &Shape, seed: u64) -> CallTensors {
        let mut random = Random::new(seed ^ 0x5eed);
        let Shape {
            batch,
            tokens,
            heads,
            kv_heads,
            dim,
        } = *shape;
        let mut tensor = |h: usize, d: usize| {
            let dims = [batch, tokens, h, d];
            let values = (0..dims.iter().product()).map(|_| 2.0 * random.unit());
            let data = Data::F64(values.collect());
            Tensor::from_data(data, dims).expect("as many values as the shape has")
        };
        CallTensors {
            q: tensor(heads, dim),
            k: tensor(kv_heads, dim),
            v: tensor(kv_heads, dim),
            dout: tensor(heads, dim),
            dlse: tensor(heads, 1),
        }
    }
}
