//! Phantom keys: zeros that fill a segment up in the packages that pad (spec section 10).
//!
//! Torchscale fills the last segment of a sequence, and every segment that its rate does not
//! divide, with rows of zeros. They take part in the softmax, with score 0 and value 0, and models
//! that were trained there have learned with them.
//!
//! The decision here: a phantom has no key and no value, so a query needs only their number.

use crate::error::{Error, Result};
use crate::pattern::{Branch, Mode, Pattern};
use crate::shape::Shape;

/// The phantom keys of each slot of a pattern.
pub(crate) struct Phantoms<'a> {
    pattern: &'a Pattern,
    tokens: usize,
    /// The branches of each slot, with the offset of its head.
    branches: Vec<Vec<(Branch, usize)>>,
}

impl<'a> Phantoms<'a> {
    /// None if no query has a phantom key. Under a causal mask they come after every query.
    pub fn new(pattern: &'a Pattern, shape: &Shape) -> Option<Phantoms<'a>> {
        if pattern.padding_rule().is_none() || pattern.is_causal() {
            return None;
        }
        let mut branches = match pattern.splits_slots() {
            true => Vec::new(),
            false => vec![Vec::new(); shape.heads],
        };
        for (index, &branch) in pattern.branches().iter().enumerate() {
            for (head, offset) in pattern.heads_of(index, shape.heads) {
                match pattern.splits_slots() {
                    true => branches.push(vec![(branch, offset)]),
                    false => branches[head].push((branch, offset)),
                }
            }
        }
        Some(Phantoms {
            pattern,
            tokens: shape.tokens,
            branches,
        })
    }

    /// The phantom keys that the query at position `x` sees in `slot`.
    pub fn of(&self, slot: usize, x: usize) -> usize {
        let document = self.pattern.document_of(x, self.tokens);
        let (length, x) = (document.len(), x - document.start);
        let of_branch = |&(branch, offset): &(Branch, usize)| {
            let segment = branch.segment.min(length);
            let within = x % segment;
            if within % branch.dilation != offset {
                return 0;
            }
            let filled = segment.min(length - (x - within));
            let tokens = (filled - offset).div_ceil(branch.dilation);
            segment.div_ceil(branch.dilation) - tokens
        };
        self.branches[slot].iter().map(of_branch).sum()
    }
}

impl Pattern {
    /// An error if a phantom key, which has no position, would need one for its slope.
    pub(crate) fn check_slopes(&self, slopes: bool) -> Result<()> {
        match slopes && !self.padding_rule().is_none() {
            false => Ok(()),
            true => Err(Error::Excludes {
                one: "torchscale's padding",
                other: "slopes",
                reason: "a zero that fills a segment up has no distance to a query; leave one of \
                         them out",
            }),
        }
    }

    /// An error if torchscale's padding is not defined here, or if torchscale writes rows to places
    /// that are not theirs: where a rate does not divide segments of which there are several.
    pub(crate) fn check_padding(&self, shape: &Shape) -> Result<()> {
        if self.padding_rule().is_none() {
            return Ok(());
        }
        if self.mode() == Mode::Fkodom {
            return Err(Error::NotInMode {
                what: "torchscale's padding",
                mode: self.mode().name(),
                hint: "use mix mode, as torchscale does",
            });
        }
        if self.has_bounded_window() {
            return Err(Error::Excludes {
                one: "torchscale's padding",
                other: "a window",
                reason: "torchscale has none, so it is not defined which zeros a query sees; leave \
                         one of them out",
            });
        }
        let check = |length: usize| {
            let misplaced = |branch: &&Branch| {
                length > branch.segment && !branch.segment.is_multiple_of(branch.dilation)
            };
            match self.branches().iter().find(misplaced) {
                None => Ok(()),
                Some(&Branch { segment, dilation }) => Err(Error::MisplacedRows {
                    segment,
                    dilation,
                    tokens: length,
                }),
            }
        };
        match self.document_list() {
            None => check(shape.tokens),
            Some(documents) => documents.lengths().try_for_each(check),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::padding::Padding;
    use crate::pattern::{MixingGradient, OffsetRule};

    fn pattern(segments: &[usize], rates: &[usize]) -> Pattern {
        let mode = Mode::Mix {
            offsets: OffsetRule::HeadBlock,
            gradient: MixingGradient::Exact,
        };
        let pattern = Pattern::dilated(segments, rates, mode).unwrap();
        pattern.padding(Padding::Torchscale)
    }

    #[test]
    fn the_last_segment_is_filled_with_phantoms() {
        // 13 tokens in segments of 8 with rate 2: the last segment has tokens 8 to 12.
        let (pattern, shape) = (pattern(&[8], &[2]), Shape::new(1, 13, 2, 2, 4).unwrap());
        let phantoms = Phantoms::new(&pattern, &shape).unwrap();
        let counts = |slot: usize| (0..13).map(|x| phantoms.of(slot, x)).collect::<Vec<_>>();
        assert_eq!(counts(0), [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 1]);
        assert_eq!(counts(1), [0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 2, 0]);
        let causal = pattern.causal(true);
        assert!(Phantoms::new(&causal, &shape).is_none());
    }

    #[test]
    fn a_segment_as_long_as_the_sequence_is_filled_to_a_multiple_of_the_rate() {
        let (pattern, shape) = (pattern(&[64], &[4]), Shape::new(1, 9, 4, 4, 4).unwrap());
        let phantoms = Phantoms::new(&pattern, &shape).unwrap();
        let count = |slot: usize| phantoms.of(slot, slot);
        assert_eq!([0, 1, 2, 3].map(count), [0, 1, 1, 1]);
    }

    #[test]
    fn rows_that_torchscale_misplaces_are_refused() {
        let check = |segment, rate, tokens| {
            let shape = Shape::new(1, tokens, 2, 2, 4).unwrap();
            pattern(&[4, segment], &[1, rate]).check(&shape)
        };
        assert!(check(10, 4, 10).is_ok());
        assert!(check(12, 4, 13).is_ok());
        let text = check(10, 4, 11).unwrap_err().to_string();
        assert!(["10", "4", "11"].iter().all(|number| text.contains(number)));
    }
}
