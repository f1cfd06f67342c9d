//! Model and training settings, as stored in checkpoints and records.

use anyhow::Result;
use encke::{MixingGradient, Mode, OffsetRule, Pattern};
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
