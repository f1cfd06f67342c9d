//! Model and training settings, as stored in checkpoints and records.

use anyhow::{Result, bail};
use encke::{Bits, MixingGradient, Mode, OffsetRule, Pattern, Shape};
use encke_core::bits::TileGrid;
use encke_core::sharding::{Cut, Sharding};
use serde::{Deserialize, Serialize};

use crate::model::ModelConfig;

/// Everything that the losses depend on, beside the text. The ring is not part of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainingConfig {
    /// The model.
    pub sizes: ModelConfig,
    /// Tokens of a sequence.
    pub tokens: usize,
    /// Segment lengths of the branches; empty for dense attention.
    pub segment_lengths: Vec<usize>,
    /// Dilation rates of the branches.
    pub dilation_rates: Vec<usize>,
    /// The peak learning rate.
    pub rate: f64,
    /// Steps of the whole schedule.
    pub steps: usize,
    /// Seed of weights and sequences.
    pub seed: u64,
    /// What the bits of the losses depend on, as the command spells it.
    #[serde(default = "planned", skip_serializing_if = "is_planned")]
    pub bits: String,
}

fn planned() -> String {
    Bits::Planned.to_string()
}

fn is_planned(bits: &String) -> bool {
    *bits == planned()
}

impl TrainingConfig {
    /// LongNet's branches for a length: a sixteenth of it (at most 1024 tokens) undilated, then
    /// four times as long and as sparse each, until one spans the sequence.
    pub fn longnet(tokens: usize) -> (Vec<usize>, Vec<usize>) {
        let (mut segments, mut dilations) = (Vec::new(), Vec::new());
        let (mut segment, mut dilation) = ((tokens / 16).clamp(1, 1024), 1);
        while segment < tokens {
            segments.push(segment);
            dilations.push(dilation);
            (segment, dilation) = (4 * segment, 4 * dilation);
        }
        segments.push(tokens);
        dilations.push(dilation);
        (segments, dilations)
    }

    /// What the bits of the losses depend on.
    pub fn bits(&self) -> Result<Bits> {
        Ok(self.bits.parse().map_err(encke::Error::from)?)
    }

    /// How a ring cuts the rows: in zigzag, which balances causal attention, or where bits must not
    /// depend on the ring, contiguously and between tiles.
    pub fn cut(&self, ranks: usize) -> Result<Cut> {
        let Some(tile) = self.bits()?.tile() else {
            return Ok(Cut::Zigzag);
        };
        let (pattern, sizes) = (self.pattern()?, self.sizes);
        let shape = Shape::new(1, self.tokens, sizes.heads, sizes.kv_heads, sizes.head_dim);
        let shape = shape.map_err(encke::Error::from)?;
        let grid = TileGrid::new(&pattern, &shape, tile);
        let sharding = grid.and_then(|grid| grid.contiguous(ranks));
        let sharding = sharding.map_err(encke::Error::from)?;
        let whole = |first: &usize| first.is_multiple_of(tile) || *first == self.tokens;
        match sharding.cut() {
            Cut::Firsts(firsts) if firsts.iter().all(whole) => Ok(sharding.cut().clone()),
            _ => bail!(
                "--bits {} has blocks of {tile} rows, and the segments of this pattern are no \
                 multiples of them; use other --segment-lengths, or one rank",
                self.bits
            ),
        }
    }

    /// The blocks whose gradients are summed in order: how many each rank of a ring has, and their
    /// rows. Without a grid a rank's rows are one block.
    pub fn blocks(&self, sharding: Option<&Sharding>) -> Result<RowBlocks> {
        let ranks = sharding.map_or(1, Sharding::ranks);
        let rows = |rank| sharding.map_or(self.tokens, |of| of.rows(self.tokens, rank));
        let size = self.bits()?.tile().unwrap_or(usize::MAX);
        let count = |rank| rows(rank).div_ceil(size).max(1);
        Ok(RowBlocks {
            size,
            counts: (0..ranks).map(count).collect(),
        })
    }

    /// The attention pattern.
    pub fn pattern(&self) -> Result<Pattern> {
        if self.segment_lengths.is_empty() {
            return Ok(Pattern::dense().causal(true));
        }
        let mode = Mode::Mix {
            offsets: OffsetRule::HeadMod,
            gradient: MixingGradient::Exact,
        };
        let pattern = Pattern::dilated(&self.segment_lengths, &self.dilation_rates, mode);
        Ok(pattern.map_err(encke::Error::from)?.causal(true))
    }
}

/// Blocks of rows whose gradients are summed in order.
#[derive(Debug, Clone)]
pub struct RowBlocks {
    /// Rows of a block; the last one may be shorter.
    pub size: usize,
    /// How many blocks each rank has.
    pub counts: Vec<usize>,
}

#[cfg(test)]
mod tests {
    use super::TrainingConfig;

    #[test]
    fn branches_end_with_the_whole_sequence() {
        let (segments, dilations) = TrainingConfig::longnet(16384);
        assert_eq!(segments, [1024, 4096, 16384]);
        assert_eq!(dilations, [1, 4, 16]);
        let (segments, dilations) = TrainingConfig::longnet(100);
        assert_eq!(segments, [6, 24, 96, 100]);
        assert_eq!(dilations, [1, 4, 16, 64]);
    }
}
