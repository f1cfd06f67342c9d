//! LongNet's pattern: branches whose segment lengths and dilation rates grow by the same factor, up
//! to the whole sequence, mixed under one softmax.

use anyhow::Result;
use encke::{MixingGradient, Mode, OffsetRule, Pattern};

/// The mode of LongNet's paper, with the derivative of its forward pass.
pub const MODE: Mode = Mode::Mix {
    offsets: OffsetRule::HeadMod,
    gradient: MixingGradient::Exact,
};

/// Segment lengths and dilation rates of each branch: `segment` and 1, then `growth` times as much
/// from branch to branch, until a segment holds all tokens.
pub fn branches(tokens: usize, segment: usize, growth: usize) -> (Vec<usize>, Vec<usize>) {
    let (mut segments, mut rates) = (vec![segment], vec![1]);
    let (mut segment, mut rate) = (segment, 1usize);
    while segment < tokens && segment > 0 && growth > 1 {
        segment = segment.saturating_mul(growth);
        rate = rate.saturating_mul(growth);
        segments.push(segment);
        rates.push(rate);
    }
    (segments, rates)
}

/// The causal pattern with these branches, without another mask.
pub fn pattern(segment_lengths: &[usize], dilation_rates: &[usize]) -> Result<Pattern> {
    Ok(Pattern::dilated(segment_lengths, dilation_rates, MODE)?.causal(true))
}
