//! Random requests whose bits must not depend on the ring: several tiles of every kind of pattern
//! and mask, on one rank. [`Request::on_ranks`](crate::plan::Request::on_ranks) makes rings of
//! them.

use super::configuration::{Configuration, random_mask};
use super::random::Random;
use crate::bits::Bits;
use crate::dropout::Dropout;
use crate::dtype::DType;
use crate::pattern::{GroupScale, MixingGradient, Mode, OffsetRule, Pattern};
use crate::plan::Request;
use crate::shape::Shape;
use crate::sharding::Sharding;

/// The sizes of drawn requests.
#[derive(Debug, Clone, Copy)]
pub struct TiledSizes {
    /// Rows of a tile.
    pub tile: usize,
    /// Most tokens.
    pub tokens: usize,
    /// Head dimensions.
    pub dims: &'static [usize],
}

impl TiledSizes {
    /// The smallest tiles.
    pub const SMALL: TiledSizes = TiledSizes {
        tile: Bits::SMALLEST_TILE,
        tokens: 700,
        dims: &[4, 8, 17, 32, 80],
    };
}

impl Configuration {
    /// The configuration of a seed on tiles of 32 rows.
    pub fn tiled(seed: u64, dtype: DType) -> Configuration {
        Configuration::tiled_with(seed, dtype, TiledSizes::SMALL)
    }

    /// The configuration of a seed with these sizes.
    pub fn tiled_with(seed: u64, dtype: DType, sizes: TiledSizes) -> Configuration {
        let mut random = Random::new(seed ^ 0x711e5);
        let kv_heads = 1 + random.below(2);
        let heads = kv_heads * (1 + random.below(3));
        let tokens = 1 + random.below(sizes.tokens);
        let dim = random.pick(sizes.dims);
        let shape = Shape::new(1 + random.below(2), tokens, heads, kv_heads, dim);
        let mut shape = shape.expect("sizes are positive");
        let mut pattern = tiled_pattern(&mut random, heads, tokens, sizes.tile);
        if random.once_in(2) {
            let prefix = random.below(tokens);
            pattern = random_mask(&mut random, pattern, tokens);
            if random.once_in(2) {
                pattern = pattern.prefix(prefix);
            }
        }
        if random.once_in(4) {
            let queries = 1 + random.below(tokens);
            shape = shape.with_queries(queries).expect("at least one query");
        }
        if random.once_in(4) {
            let value_dim = 1 + random.below(20);
            shape = shape.with_value_dim(value_dim).expect("at least one");
        }
        let sharding = Sharding::contiguous(1).expect("one rank");
        let mut request = Request {
            bits: Bits::InvariantTiles(sizes.tile),
            ..Request::new(shape, pattern, sharding, dtype)
        };
        request.softcap = random.once_in(5).then(|| 0.5 + 3.0 * random.unit().abs());
        request.slopes = random.once_in(5).then(|| {
            let slopes = (0..heads).map(|_| 0.05 * random.unit());
            slopes.collect()
        });
        request.dropout = random.once_in(5).then(|| {
            let dropout = Dropout::new(random.unit().abs() * 0.9, seed);
            dropout.expect("a probability below 1")
        });
        Configuration { request, seed }
    }
}

fn tiled_pattern(random: &mut Random, heads: usize, tokens: usize, tile: usize) -> Pattern {
    let causal = random.once_in(2);
    if random.once_in(3) {
        return Pattern::dense().causal(causal);
    }
    let mix = random.once_in(2);
    let most = if mix { 3 } else { heads.min(3) };
    let branches = 1 + random.below(most);
    // Half of the segments are multiples of a tile's tokens: others leave rings few places to cut.
    let dilations: Vec<usize> = (0..branches).map(|_| 1 + random.below(4)).collect();
    let segments: Vec<usize> = dilations
        .iter()
        .map(|dilation| match random.once_in(2) {
            true => tile * dilation * (1 + random.below(tokens / tile + 1)),
            false => 1 + random.below(tokens),
        })
        .collect();
    let mode = match mix {
        true => Mode::Mix {
            offsets: random.pick(&[OffsetRule::HeadMod, OffsetRule::HeadBlock]),
            gradient: MixingGradient::Exact,
        },
        false => Mode::Group {
            scale: random.pick(&[GroupScale::One, GroupScale::Groups]),
        },
    };
    let pattern = Pattern::dilated(&segments, &dilations, mode);
    pattern.expect("sizes are positive").causal(causal)
}
