//! The options of `encke report`, and what they ask for.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use encke::{Builder, DType, MixingGradient, Mode, OffsetRule, Pattern, Shape};

use crate::number::count;
use crate::pattern_options::PatternOptions;
use crate::ring_options::RingOptions;
use crate::shape_options::{ShapeOptions, usual};

/// A rank is a thread here, and a page with more rows than this is no picture.
const MOST_RANKS: usize = 256;
/// The largest ring unless one is given.
const RANKS: usize = 32;
/// The ring that is seen from close up unless one is given.
const SHOWN: usize = 8;

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  encke report out.html
      A LongNet pattern on rings of 1, 2, 4 ... 32 ranks; it takes a few seconds.
  encke report dense.html --tokens 4k --causal --sharding zigzag --grad
      Dense causal attention, forward and backward, cut so that work is even.
  encke report group.html --segment-lengths 256,1024,4096 --dilation-rates 1,4,16 --heads 6
      A branch for each group of heads: each group has a picture of its own.
  encke report out.html --show 16 --trace ring.json
      A ring of 16 from close up, and its timeline for https://ui.perfetto.dev.

The page holds everything it shows and loads nothing. It follows the reader's choice of a light or
a dark screen, and prints. Without pattern options the pattern is LongNet's, causal, in mix mode:
segments of 1024, 4096, 16384 ... tokens with dilations 1, 4, 16 ... up to the whole sequence; a
sequence of less than 16k tokens begins with a sixteenth of itself.

Numbers may be written 65536, 65_536, 64k, 1M or 1e9; k, M and G count by 1024.";

/// A page that shows what a configuration holds, sends and takes.
#[derive(Debug, Args)]
#[command(
    mut_arg("tokens", usual("16k")),
    mut_arg("heads", usual("4")),
    mut_arg("dim", usual("64"))
)]
pub struct Options {
    /// Where to write the page. A file that is there is replaced, in one step, at the end.
    #[arg(value_name = "OUT.html")]
    pub output: PathBuf,

    #[command(flatten)]
    sizes: ShapeOptions,

    #[command(flatten)]
    pattern: PatternOptions,

    #[command(flatten)]
    ring: RingOptions,

    /// What is run and shown.
    #[command(flatten)]
    pub view: ViewOptions,
}

/// What is run and shown.
#[derive(Debug, Args)]
#[command(next_help_heading = "What is run and shown")]
pub struct ViewOptions {
    /// Also run the backward pass.
    #[arg(long)]
    pub grad: bool,

    /// The ring whose timeline and bytes are shown; --ranks is the largest ring that is run
    /// [default: 8, or the largest].
    #[arg(long, value_name = "P", value_parser = count)]
    show: Option<usize>,

    /// Where random numbers begin.
    #[arg(long, value_name = "SEED", default_value = "2024")]
    pub seed: u64,

    /// Also write the timeline of that ring as trace-event JSON, for Perfetto or chrome://tracing.
    #[arg(long, value_name = "T.json")]
    pub trace: Option<PathBuf>,
}

/// What is run: everything but the number of ranks, and the numbers of ranks.
#[derive(Debug)]
pub struct Work {
    /// Sizes.
    pub shape: Shape,
    /// The type of the tensors.
    pub dtype: DType,
    /// All other settings.
    pub builder: Builder,
    /// The ring sizes, rising.
    pub rings: Vec<usize>,
    /// The one that is seen from close up.
    pub shown: usize,
}

impl Options {
    /// What the options ask for, or which of them cannot be met.
    pub fn work(&self) -> Result<Work> {
        let (shape, dtype) = (self.sizes.shape()?, self.sizes.dtype());
        let pattern = match self.pattern.none_given() {
            true => longnet(shape.tokens)?,
            false => self.pattern.pattern()?,
        };
        let builder = encke::Attention::builder().pattern(pattern);
        let builder = self
            .ring
            .apply(builder, MOST_RANKS, "each is a row of the page")?;
        if self.ring.gives_first_tokens() {
            bail!(
                "--sharding with first tokens fits one ring, and a report runs several; use \
                 contiguous, zigzag or striped"
            );
        }
        if self.ring.leaves_open() {
            bail!(
                "auto decides for one ring, and a report runs several; use `encke plan --explain`, \
                 and name the cut here"
            );
        }
        if self.ring.survives() {
            bail!(
                "--redundancy needs other ranks, and a report begins with a ring of one; see \
                 `encke profile --redundancy`"
            );
        }
        let largest = self.ring.ranks().unwrap_or(RANKS);
        let rings = rings(largest);
        let shown = self.view.show.unwrap_or(SHOWN.min(largest));
        if !rings.contains(&shown) {
            let names: Vec<String> = rings.iter().map(usize::to_string).collect();
            bail!(
                "--show {shown} is none of the rings that are run: {}",
                names.join(", ")
            );
        }
        Ok(Work {
            shape,
            dtype,
            builder,
            rings,
            shown,
        })
    }
}

/// Powers of two up to the largest ring, and the largest ring.
fn rings(largest: usize) -> Vec<usize> {
    let powers = (0..usize::BITS).map(|power| 1 << power);
    let mut rings: Vec<usize> = powers.take_while(|ranks| *ranks < largest).collect();
    rings.push(largest);
    rings
}

/// Segment length of the first branch, where the sequence has sixteen of them.
const SEGMENT: usize = 1024;

/// LongNet's pattern: segments and dilations grow together, up to the whole sequence. The first
/// segments are long enough for arithmetic to be what takes the time, and a large ring cuts them.
fn longnet(tokens: usize) -> Result<Pattern> {
    let mode = Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Exact,
    };
    let first = (tokens / 16).next_power_of_two().clamp(16, SEGMENT);
    let (mut segments, mut dilations) = (vec![first], vec![1]);
    while segments[segments.len() - 1] < tokens {
        segments.push(segments[segments.len() - 1].saturating_mul(4));
        dilations.push(dilations[dilations.len() - 1] * 4);
    }
    Ok(Pattern::dilated(&segments, &dilations, mode)?.causal(true))
}

#[cfg(test)]
mod tests {
    use super::{longnet, rings};

    #[test]
    fn rings_double_up_to_the_largest() {
        assert_eq!(rings(32), [1, 2, 4, 8, 16, 32]);
        assert_eq!(rings(6), [1, 2, 4, 6]);
        assert_eq!(rings(1), [1]);
    }

    #[test]
    fn the_last_segment_is_the_whole_sequence() {
        for tokens in [1, 32, 33, 1000, 16384, 1 << 40] {
            let pattern = longnet(tokens).unwrap();
            let segments = pattern.branches().iter().map(|branch| branch.segment);
            assert!(segments.max() >= Some(tokens));
        }
        let usual: Vec<(usize, usize)> = longnet(16384)
            .unwrap()
            .branches()
            .iter()
            .map(|branch| (branch.segment, branch.dilation))
            .collect();
        assert_eq!(usual, [(1024, 1), (4096, 4), (16384, 16)]);
    }
}
