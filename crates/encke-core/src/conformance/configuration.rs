//! Random requests for whole rings, with input tensors: the test cases of every ring driver.

use super::random::Random;
use crate::documents::Documents;
use crate::dropout::Dropout;
use crate::dtype::{DType, Data};
use crate::mask::Window;
use crate::pattern::{GroupScale, MixingGradient, Mode, OffsetRule, Pattern};
use crate::plan::rings::Rotating;
use crate::plan::{Queries, Request, Schedule};
use crate::shape::Shape;
use crate::sharding::{Cut, Sharding, TokenRanges};
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

/// Ranges of random lengths, each on a random rank.
fn ranges(random: &mut Random, tokens: usize, ranks: usize) -> Cut {
    let mut shards = vec![Vec::new(); ranks];
    let mut start = 0;
    while start < tokens {
        let end = tokens.min(start + 1 + random.below(12));
        shards[random.below(ranks)].push(start..end);
        start = end;
    }
    Cut::Ranges(TokenRanges::new(shards))
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

/// A random pattern for `shape`, with a mask in most cases.
pub fn random_pattern(seed: u64, shape: &Shape) -> Pattern {
    let mut random = Random::new(seed);
    let pattern = pattern(&mut random, shape.heads);
    random_mask(&mut random, pattern, shape.tokens)
}

/// The pattern with a random window, prefix and documents, each in half of the cases.
pub fn random_mask(random: &mut Random, pattern: Pattern, tokens: usize) -> Pattern {
    let limit = |random: &mut Random| (!random.once_in(3)).then(|| random.below(tokens + 2));
    let window = match random.once_in(2) {
        true => Window {
            left: limit(random),
            right: limit(random),
        },
        false => Window::ALL,
    };
    let prefix = if random.once_in(2) {
        random.below(9)
    } else {
        0
    };
    let documents = random.once_in(2).then(|| {
        let (mut lengths, mut left) = (Vec::new(), tokens);
        while left > 0 {
            let most = random.pick(&[1, 4, 16, 64]);
            lengths.push((1 + random.below(most)).min(left));
            left -= lengths[lengths.len() - 1];
        }
        Documents::new(&lengths).expect("there is a token")
    });
    let pattern = pattern.window(window).prefix(prefix);
    pattern.documents(documents)
}

impl Configuration {
    /// The configuration of a seed, half of them with a mask.
    pub fn any(seed: u64) -> Configuration {
        match Random::new(seed).once_in(2) {
            true => Configuration::masked(seed),
            false => Configuration::random(seed),
        }
    }

    /// The configuration of a seed with a random mask, and in some cases a softcap, slopes, fewer
    /// queries than keys, values of another width and dropout.
    pub fn masked(seed: u64) -> Configuration {
        let mut configuration = Configuration::random(seed);
        let mut random = Random::new(!seed);
        let request = &mut configuration.request;
        let pattern = request.pattern.clone();
        request.pattern = random_mask(&mut random, pattern, request.shape.tokens);
        request.softcap = random.once_in(4).then(|| 0.5 + 3.0 * random.unit().abs());
        request.slopes = (random.once_in(4)).then(|| {
            let heads = 0..request.shape.heads;
            heads.map(|_| 0.3 * random.unit()).collect()
        });
        if random.once_in(4) {
            let (tokens, ranks) = (request.shape.tokens, request.sharding.ranks());
            let sharding = Sharding::new(ranks, ranges(&mut random, tokens, ranks));
            request.sharding = sharding.expect("as many lists as ranks");
        }
        request.dropout = random.once_in(4).then(|| {
            let dropout = Dropout::new(random.unit().abs() * 0.9, seed);
            dropout.expect("a probability below 1")
        });
        if random.once_in(3) {
            let tokens = request.shape.tokens;
            let queries = 1 + random.below(tokens);
            let shape = request.shape.with_queries(queries);
            request.shape = shape.expect("at least one query");
            if random.once_in(2) {
                let offset = random.below(tokens - queries + 1);
                request.pattern = request.pattern.clone().query_offset(Some(offset));
            }
        }
        if random.once_in(3) {
            let shape = request.shape.with_value_dim(1 + random.below(6));
            request.shape = shape.expect("at least one element");
        }
        configuration
    }

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
        request.schedule = Schedule {
            width,
            backward,
            ..Schedule::RING
        };
        Configuration { request, seed }
    }

    /// This configuration with heads divided among as many ranks as its key heads and its ring
    /// allow, sharded queries, and neither stripes nor dropout.
    pub fn with_heads_divided(mut self) -> Configuration {
        let request = &mut self.request;
        let (ranks, most) = (request.sharding.ranks(), request.shape.kv_heads);
        let group = (1..=most).rev().find(|group| ranks.is_multiple_of(*group));
        if let Cut::Striped = request.sharding.cut() {
            request.sharding = Sharding::contiguous(ranks).expect("ranks are positive");
        }
        request.queries = Queries::Sharded;
        request.redundancy = 0;
        request.dropout = None;
        let schedule = request.schedule.with_width(1);
        request.schedule = schedule.with_heads(group.unwrap_or(1));
        self
    }

    /// This configuration with sharded queries and a schedule of two levels, in nodes of 2 to 5
    /// ranks.
    pub fn in_nodes(mut self) -> Configuration {
        let mut random = Random::new(self.seed ^ 0x0dd5);
        let request = &mut self.request;
        request.queries = Queries::Sharded;
        request.redundancy = 0;
        request.schedule = request
            .schedule
            .with_width(1)
            .with_node(2 + random.below(4));
        self
    }
}

/// The tensors of a call, in f64.
#[derive(Debug, Clone)]
pub struct CallTensors {
    /// `[b, queries, heads, d]`.
    pub q: Tensor,
    /// `[b, n, kv_heads, d]`.
    pub k: Tensor,
    /// `[b, n, kv_heads, value_dim]`.
    pub v: Tensor,
    /// `[b, queries, heads, value_dim]`.
    pub dout: Tensor,
    /// `[b, queries, heads, 1]`.
    pub dlse: Tensor,
}

impl CallTensors {
    /// The tensors of a seed.
    pub fn random(shape: &Shape, seed: u64) -> CallTensors {
        let mut random = Random::new(seed ^ 0x5eed);
        let Shape {
            batch,
            tokens,
            queries,
            heads,
            kv_heads,
            dim,
            value_dim,
        } = *shape;
        let mut tensor = |n: usize, h: usize, d: usize| {
            let dims = [batch, n, h, d];
            let values = (0..dims.iter().product()).map(|_| 2.0 * random.unit());
            let data = Data::F64(values.collect());
            Tensor::from_data(data, dims).expect("as many values as the shape has")
        };
        CallTensors {
            q: tensor(queries, heads, dim),
            k: tensor(tokens, kv_heads, dim),
            v: tensor(tokens, kv_heads, value_dim),
            dout: tensor(queries, heads, value_dim),
            dlse: tensor(queries, heads, 1),
        }
    }
}
