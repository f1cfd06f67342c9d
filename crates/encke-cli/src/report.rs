//! `encke report`: options of the page. What is measured and drawn is [`encke_lab::report`]'s.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use encke::Pattern;
use encke_lab::number::{count, repeats};
use encke_lab::output::OutputFile;
use encke_lab::report::{ReportSettings, document, measure};
use encke_lab::terminal::{Paint, note};
use encke_lab::{Verdict, longnet};

use crate::pattern_options::PatternOptions;
use crate::ring_options::RingOptions;
use crate::shape_options::{ShapeOptions, default};

/// Each rank is a thread, and a row of the timeline.
const MOST_RANKS: usize = 256;
/// The largest ring unless one is given.
const RANKS: usize = 32;
/// The ring whose timeline and traffic are shown unless one is given.
const SHOWN: usize = 8;

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  encke report out.html
      A LongNet pattern on rings of 1, 2, 4 ... 32 ranks; a few seconds.
  encke report dense.html --tokens 4k --causal --sharding zigzag --grad
      Dense causal attention, forward and backward, with equal work for every rank.
  encke report group.html --segment-lengths 256,1024,4096 --dilation-rates 1,4,16 --heads 6
      A branch for each group of heads, each with a picture of its own.
  encke report out.html --show 16 --trace ring.json
      Timeline and traffic of a ring of 16, and its trace for https://ui.perfetto.dev.

The page contains everything it shows and loads nothing. It follows the reader's choice of a light
or dark colour scheme, and can be printed. Without pattern options the pattern is LongNet's, causal,
in mix mode: segments of 1024, 4096, 16384 ... tokens with dilations 1, 4, 16 ... up to the whole
sequence; for a sequence of less than 16k tokens the first segment is a sixteenth of it.

Numbers may be written 65536, 65_536, 64k, 1M or 1e9; k, M and G are powers of 1024.";

/// Writes memory, traffic and times of a configuration as an HTML page.
#[derive(Debug, Args)]
#[command(
    mut_arg("tokens", default("16k")),
    mut_arg("heads", default("4")),
    mut_arg("dim", default("64"))
)]
pub struct Options {
    /// Where to write the page. An existing file is replaced, atomically, at the end.
    #[arg(value_name = "OUT.html")]
    output: PathBuf,

    #[command(flatten)]
    sizes: ShapeOptions,

    #[command(flatten)]
    pattern: PatternOptions,

    #[command(flatten)]
    ring: RingOptions,

    /// Also run the backward pass.
    #[arg(long, help_heading = HEADING)]
    grad: bool,

    /// The ring whose timeline and bytes are shown; --ranks is the largest ring that runs
    /// [default: 8, or the largest].
    #[arg(long, value_name = "P", value_parser = count, help_heading = HEADING)]
    show: Option<usize>,

    /// How often each ring runs, and the kernel that predicts it; medians are shown.
    #[arg(
        long,
        value_name = "TIMES",
        value_parser = repeats,
        default_value = "3",
        help_heading = HEADING
    )]
    repeats: usize,

    /// Seed of the tensors.
    #[arg(long, value_name = "SEED", default_value = "2024", help_heading = HEADING)]
    seed: u64,

    /// Also write the timeline of that ring as trace-event JSON, for Perfetto or chrome://tracing.
    #[arg(long, value_name = "T.json", help_heading = HEADING)]
    trace: Option<PathBuf>,
}

const HEADING: &str = "Measurement and output";

/// Runs the command.
pub fn run(options: &Options) -> Result<Verdict> {
    let settings = options.settings()?;
    let mut output = OutputFile::create(&options.output, &[])?;
    let others = [("the page", options.output.as_path())];
    let trace_file = OutputFile::create_optional(options.trace.as_deref(), &others)?;
    let (findings, trace) = measure(&settings)?;
    let document = document(&findings)?;
    output.write(|to| to.write_all(document.as_bytes()))?;
    if let Some(mut file) = trace_file {
        file.write(|to| trace.write(to))?;
        file.keep()?;
    }
    output.keep()?;
    let wrote = Paint::stderr().bold("wrote");
    for path in [Some(&options.output), options.trace.as_ref()]
        .into_iter()
        .flatten()
    {
        note(&format!("{wrote} {}", path.display()));
    }
    Ok(Verdict::Fine)
}

impl Options {
    /// The settings, or which option is wrong.
    fn settings(&self) -> Result<ReportSettings> {
        let (shape, dtype) = (self.sizes.shape()?, self.sizes.dtype());
        if shape.queries != shape.tokens {
            bail!(
                "the report draws a query for every key; leave --query-tokens out, or use plan \
                 --draw"
            );
        }
        let builder = encke::Attention::builder();
        let builder = match self.pattern.none_given() {
            true => builder.pattern(longnet(shape.tokens)?),
            false => self.pattern.apply(builder, None)?,
        };
        let builder = self
            .ring
            .apply(builder, MOST_RANKS, "each is a row of the page")?;
        if self.ring.gives_first_tokens() {
            bail!(
                "--sharding with first tokens fits one ring, and a report runs several; use \
                 contiguous, zigzag or striped"
            );
        }
        if self.ring.any_auto() {
            bail!(
                "auto chooses one ring, and a report runs several; use `encke plan --explain`, and \
                 name the cut here"
            );
        }
        if self.ring.survives() {
            bail!(
                "--redundancy needs other ranks, and a report starts with a ring of one; see \
                 `encke profile --redundancy`"
            );
        }
        if self.repeats == 0 {
            bail!("--repeats 0 measures nothing; give 1 or more");
        }
        let largest = self.ring.ranks().unwrap_or(RANKS);
        let rings = rings(largest);
        let shown = self.show.unwrap_or(SHOWN.min(largest));
        if !rings.contains(&shown) {
            let names: Vec<String> = rings.iter().map(usize::to_string).collect();
            bail!(
                "--show {shown} is none of the rings that run: {}",
                names.join(", ")
            );
        }
        Ok(ReportSettings {
            shape,
            dtype,
            builder,
            rings,
            shown,
            grad: self.grad,
            repeats: self.repeats,
            seed: self.seed,
        })
    }
}

/// Powers of two below the largest ring, and the largest ring.
fn rings(largest: usize) -> Vec<usize> {
    let powers = (0..usize::BITS).map(|power| 1 << power);
    let mut rings: Vec<usize> = powers.take_while(|ranks| *ranks < largest).collect();
    rings.push(largest);
    rings
}

/// Segment length of the first branch for sequences of at least 16 such segments.
const SEGMENT: usize = 1024;

/// LongNet's pattern up to the whole sequence. The first segments are long enough for arithmetic to
/// dominate the time, and short enough for a large ring to cut them.
fn longnet(tokens: usize) -> Result<Pattern> {
    let first = (tokens / 16).next_power_of_two().clamp(16, SEGMENT);
    let (segment_lengths, dilation_rates) = longnet::branches(tokens, first, 4);
    longnet::pattern(&segment_lengths, &dilation_rates)
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
        let branches: Vec<(usize, usize)> = longnet(16384)
            .unwrap()
            .branches()
            .iter()
            .map(|branch| (branch.segment, branch.dilation))
            .collect();
        assert_eq!(branches, [(1024, 1), (4096, 4), (16384, 16)]);
    }
}
