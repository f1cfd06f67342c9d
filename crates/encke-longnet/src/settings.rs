//! What a model is and how it is trained, as a checkpoint and a record remember it.

use anyhow::Result;
use encke::{MixingGradient, Mode, OffsetRule, Pattern};
use serde::{Deserialize, Serialize};

use crate::model::Sizes;

/// Everything that a loss depends on, the text apart. The ring is not among it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// The model.
    pub sizes: Sizes,
    /// Tokens of a sequence.
    pub tokens: usize,
    /// Segment lengths of the branches; none where attention is dense.
    pub segment_lengths: Vec<usize>,
    /// Dilation rates of the branches.
    pub dilation_rates: Vec<usize>,
    /// The highest rate.
    pub rate: f64,
    /// Steps of the whole schedule.
    pub steps: usize,
    /// Where randomness begins.
    pub seed: u64,
}

impl Settings {
    /// LongNet's branches for a length: an eighth of it undilated, then four times as long and sparse
    /// until all of it is spanned.
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

    /// Which token sees which.
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
    use super::Settings;

    #[test]
    fn branches_end_with_the_whole_sequence() {
        let (segments, dilations) = Settings::longnet(16384);
        assert_eq!(segments, [1024, 4096, 16384]);
        assert_eq!(dilations, [1, 4, 16]);
        let (segments, dilations) = Settings::longnet(100);
        assert_eq!(segments, [6, 24, 96, 100]);
        assert_eq!(dilations, [1, 4, 16, 64]);
    }
}
