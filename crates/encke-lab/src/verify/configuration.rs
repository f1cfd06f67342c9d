//! One random configuration, drawn from a seed: sizes, pattern, ring, and its inputs.

use std::fmt;
use std::sync::Arc;

use encke::conformance::{Random, random_mask};
use encke::{
    CheckpointPolicy, Cut, DType, Dropout, GroupScale, MixingGradient, Mode, OffsetRule, Padding,
    Pattern, Queries, Scores, Shape, alibi_slopes,
};

use crate::format;

/// Largest ring drawn.
const RANKS: usize = 32;
/// Most tokens drawn; the time of the reference grows with their square.
const TOKENS: usize = 256;

/// One random configuration.
#[derive(Debug)]
pub struct RandomConfiguration {
    /// The seed it was drawn from.
    pub seed: u64,
    /// Sizes of the tensors.
    pub shape: Shape,
    /// The attention pattern.
    pub pattern: Pattern,
    /// Ranks of the ring.
    pub ranks: usize,
    /// How tokens are cut into shards.
    pub cut: Cut,
    /// Whether queries are sharded or replicated.
    pub queries: Queries,
    /// The type of the inputs.
    pub dtype: DType,
    /// What the forward pass keeps for the backward pass.
    pub policy: CheckpointPolicy,
    /// The softmax scale, if it is not the default.
    pub scale: Option<f64>,
    /// The softcap of the scores, if any.
    pub softcap: Option<f64>,
    /// Whether scores have ALiBi slopes.
    pub alibi: bool,
    /// The sink of each head, if there are any.
    pub sinks: Option<Vec<f64>>,
    /// Which pairs are dropped, if any.
    pub dropout: Option<Dropout>,
    /// Whether the lse has a gradient.
    pub dlse: bool,
    /// Largest absolute value in q and k.
    spread: f64,
}

/// The inputs of a configuration, rounded to its type.
pub struct ReferenceInputs {
    /// `[b, nq, heads, d]`.
    pub q: Vec<f64>,
    /// `[b, n, kv_heads, d]`.
    pub k: Vec<f64>,
    /// `[b, n, kv_heads, dv]`.
    pub v: Vec<f64>,
    /// `[b, nq, heads, dv]`.
    pub dout: Vec<f64>,
    /// `[b, nq, heads]`.
    pub dlse: Option<Vec<f64>>,
}

impl RandomConfiguration {
    /// Draws the configuration of a seed; half of them have windows, documents, softcaps, slopes,
    /// sinks, dropout, fewer queries than keys or values of another width, and a third of those for
    /// which it is defined have torchscale's padding.
    pub fn new(seed: u64) -> RandomConfiguration {
        let masked = RandomConfiguration::masked(seed);
        let padded = masked.pattern.clone().padding(Padding::Torchscale);
        let defined = padded.check(&masked.shape).is_ok() && !masked.alibi;
        match defined && Random::new(seed ^ 0x9add).once_in(3) {
            true => RandomConfiguration {
                pattern: padded,
                ..masked
            },
            false => masked,
        }
    }

    /// Draws the configuration of a seed without torchscale's padding.
    fn masked(seed: u64) -> RandomConfiguration {
        let plain = RandomConfiguration::plain(seed);
        let mut random = Random::new(seed ^ 0x3a5c);
        if plain.pattern.mode() == Mode::Fkodom || random.once_in(2) {
            return plain;
        }
        let (pattern, shape) = (plain.pattern.clone(), plain.shape);
        let takes_sinks = pattern.check_sinks().is_ok();
        let pattern = random_mask(&mut random, pattern, shape.tokens);
        let (pattern, queries) = match random.once_in(4) {
            true => {
                let queries = random.size(shape.tokens);
                let offset = random.below(shape.tokens - queries + 1);
                let offset = random.once_in(2).then_some(offset);
                (pattern.query_offset(offset), queries)
            }
            false => (pattern, shape.tokens),
        };
        let value_dim = match random.once_in(4) {
            true => random.size(24),
            false => shape.dim,
        };
        let dropout = random.once_in(6).then(|| 0.8 * random.unit().abs());
        RandomConfiguration {
            pattern,
            shape: Shape {
                queries,
                value_dim,
                ..shape
            },
            dropout: dropout.and_then(|probability| Dropout::new(probability, seed).ok()),
            softcap: random.once_in(4).then(|| 0.5 + 3.0 * random.unit().abs()),
            alibi: random.once_in(4),
            sinks: (takes_sinks && random.once_in(4))
                .then(|| (0..shape.heads).map(|_| 3.0 * random.unit()).collect()),
            ..plain
        }
    }

    /// Draws the configuration of a seed without any of these.
    fn plain(seed: u64) -> RandomConfiguration {
        let mut random = Random::new(seed);
        let kv_heads = random.size(4);
        let mode = mode(&mut random);
        let pattern_heads = kv_heads * random.size(3);
        let drawn = random.size(TOKENS);
        let (pattern, tokens) = pattern(&mut random, mode, pattern_heads, drawn);
        let batch = 1 + usize::from(random.once_in(3));
        let dim = random.pick(&[1, 2, 3, 4, 8, 16, 20]);
        let shape = Shape::new(batch, tokens, pattern_heads, kv_heads, dim);
        let shape = shape.expect("the key heads divide the heads");
        let ranks = random.size(RANKS);
        let fkodom = pattern.mode() == Mode::Fkodom;
        RandomConfiguration {
            seed,
            shape,
            ranks,
            cut: cut(&mut random, ranks, tokens),
            queries: random.pick(&[Queries::Sharded, Queries::Sharded, Queries::Replicated]),
            dtype: match random.pick(&[DType::F64, DType::F64, DType::F32, DType::Bf16, DType::F16])
            {
                _ if fkodom => DType::F64,
                dtype => dtype,
            },
            policy: match random.once_in(4) {
                true => CheckpointPolicy::Recompute,
                false => CheckpointPolicy::KeepOutput,
            },
            scale: random.once_in(4).then(|| 0.05 + random.unit().abs()),
            softcap: None,
            alibi: false,
            sinks: None,
            dropout: None,
            dlse: random.once_in(3) && !fkodom,
            spread: random.pick(&[0.0, 1.0, 1.0, 3.0]),
            pattern,
        }
    }

    /// The configuration of a seed on a ring of another size, with a cut of that size.
    #[cfg(feature = "mpi")]
    pub fn with_ranks(seed: u64, ranks: usize) -> RandomConfiguration {
        let case = RandomConfiguration::new(seed);
        let mut random = Random::new(seed ^ 0xc07);
        RandomConfiguration {
            ranks,
            cut: cut(&mut random, ranks, case.shape.tokens),
            // Processes take no sinks.
            sinks: None,
            ..case
        }
    }

    /// The softmax scale.
    pub fn scale(&self) -> f64 {
        self.scale.unwrap_or_else(|| self.shape.default_scale())
    }

    /// How scores are computed.
    pub fn scores(&self) -> Scores {
        Scores {
            scale: self.scale(),
            softcap: self.softcap,
            slopes: self.alibi.then(|| alibi_slopes(self.shape.heads)),
            sinks: self.sinks.as_deref().map(Arc::from),
            dropout: self.dropout,
        }
    }

    /// The inputs of the configuration; they depend on its seed alone.
    pub fn inputs(&self) -> ReferenceInputs {
        let Shape {
            batch,
            tokens,
            queries,
            heads,
            kv_heads,
            dim,
            value_dim,
        } = self.shape;
        let mut random = Random::new(!self.seed);
        let mut draw = |count: usize, value: &dyn Fn(f64) -> f64| -> Vec<f64> {
            let values = (0..count).map(|_| self.dtype.round(value(random.unit())));
            values.collect()
        };
        let (rows, kv_rows) = (batch * queries * heads, batch * tokens * kv_heads);
        let wide = |x: f64| self.spread * x;
        let value = |x: f64| match self.pattern.mode() {
            Mode::Fkodom => 1.0 + 0.5 * x, // fkodom divides by sums of values
            _ => x,
        };
        ReferenceInputs {
            q: draw(rows * dim, &wide),
            k: draw(kv_rows * dim, &wide),
            v: draw(kv_rows * value_dim, &value),
            dout: draw(rows * value_dim, &|x| x),
            dlse: self.dlse.then(|| draw(rows, &|x| x)),
        }
    }
}

fn mode(random: &mut Random) -> Option<Mode> {
    let offsets = random.pick(&[OffsetRule::HeadMod, OffsetRule::HeadBlock]);
    let scale = random.pick(&[GroupScale::One, GroupScale::Groups]);
    let mix = |gradient| Mode::Mix { offsets, gradient };
    match random.below(8) {
        0 => None,
        1..=2 => Some(Mode::Group { scale }),
        3..=4 => Some(mix(MixingGradient::Exact)),
        5..=6 => Some(mix(MixingGradient::Detached)),
        _ => Some(Mode::Fkodom),
    }
}

/// Draws a pattern that is valid for the heads; returns the number of tokens valid for it too.
fn pattern(
    random: &mut Random,
    mode: Option<Mode>,
    heads: usize,
    tokens: usize,
) -> (Pattern, usize) {
    let causal = random.once_in(2);
    let Some(mode) = mode else {
        return (Pattern::dense().causal(causal), tokens);
    };
    let most = match mode {
        Mode::Mix { .. } => 4,
        _ => heads.min(4),
    };
    let branches = 1 + random.below(most);
    let mut segments: Vec<usize> = (0..branches).map(|_| random.size(tokens + 8)).collect();
    let mut tokens = tokens;
    if mode == Mode::Fkodom {
        // The sequence must be a multiple of every segment: draw segments that divide one another.
        let base = random.size(12);
        segments = (0..branches).map(|i| base << i).collect();
        tokens = (base << (branches - 1)) * (1 + random.below(2));
    }
    let dilations: Vec<usize> = segments
        .iter()
        .map(|&w| random.size(w.min(9) + 1))
        .collect();
    // There are as many rates as lengths and none is zero, so this cannot fail.
    let drawn = Pattern::dilated(&segments, &dilations, mode).unwrap_or_else(|_| Pattern::dense());
    (drawn.causal(causal), tokens)
}

fn cut(random: &mut Random, ranks: usize, tokens: usize) -> Cut {
    match random.below(5) {
        0 => Cut::Contiguous,
        1 => Cut::Zigzag,
        2 => Cut::Striped,
        _ => {
            let mut firsts: Vec<usize> = (0..ranks).map(|_| random.below(tokens + 1)).collect();
            firsts[0] = 0;
            firsts.sort_unstable();
            Cut::Firsts(firsts)
        }
    }
}

impl fmt::Display for RandomConfiguration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape {
            batch,
            tokens,
            heads,
            kv_heads,
            dim,
            ..
        } = self.shape;
        write!(
            f,
            "seed {}: {}; [{batch}, {tokens}, {heads} over {kv_heads}, {dim}] {}; {} ranks ({}), \
             queries {}, checkpoint {}",
            self.seed,
            format::pattern(&self.pattern),
            self.dtype,
            self.ranks,
            format::cut(&self.cut),
            format::queries(self.queries),
            match self.policy {
                CheckpointPolicy::KeepOutput => "keep-output",
                CheckpointPolicy::Recompute => "recompute",
                CheckpointPolicy::Offload => "offload",
            },
        )?;
        if let Some(scale) = self.scale {
            write!(f, ", scale {scale:.3}")?;
        }
        if let Some(softcap) = self.softcap {
            write!(f, ", softcap {softcap:.3}")?;
        }
        if self.alibi {
            write!(f, ", alibi")?;
        }
        if self.sinks.is_some() {
            write!(f, ", with sinks")?;
        }
        if let Some(dropout) = &self.dropout {
            write!(f, ", dropout {:.3}", 1.0 - 1.0 / dropout.gain())?;
        }
        if self.shape.queries < tokens {
            let first = self.pattern.first_query(&self.shape);
            write!(f, ", {} queries from {first} on", self.shape.queries)?;
        }
        if self.shape.value_dim != dim {
            write!(f, ", value dim {}", self.shape.value_dim)?;
        }
        if self.dlse {
            write!(f, ", with dlse")?;
        }
        Ok(())
    }
}
