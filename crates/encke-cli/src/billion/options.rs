//! The options of `encke billion`, and the settings they amount to.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use encke::plan::Request;
use encke::{DType, MixingGradient, Mode, OffsetRule, Pattern, Shape, Sharding};
use serde::{Deserialize, Serialize};

use crate::device_option::{Device, DeviceOption};
use crate::number::count;

/// Tokens of a rank on the CPU unless the number of ranks is given.
const SHARE: usize = 1 << 20;

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  encke billion --tokens 16M
      A sixty-fourth of it: seconds to minutes.
  encke billion --record billion.json
      2^30 tokens in 1024 ranks, one after another, and a record of the run.
  encke billion --record billion.json
      The same command again after Ctrl-C or a crash: it goes on after the last finished rank.
  encke billion --device cuda --record billion.json
      On a GPU: 8 heads, bf16, in as few ranks as fit into its memory; rows are made and summed up
      on the GPU.
  encke billion --tokens 16M --ranks 7
      Other ranks, other cuts: the same checksum within its tolerance.
  mpirun -n 4 encke billion --tokens 64M
      Ranks are dealt out to the processes; each goes on from a state of its own.

The pattern is LongNet's in mix mode: segments of 1024 tokens with every token, of 4096 with every
fourth, and so on, up to the whole sequence; all of them under one softmax, causal. Every pair of it
is computed. Inputs come from a generator that makes any row on demand. The output is summed up in
a checksum; the sampled rows are computed again in f64 straight from the generator.

Exit codes: 0 success, 1 a sampled row was wrong, 2 bad input or any other error.";

/// A generated sequence of any length, attended one rank after another.
#[derive(Debug, Args)]
pub struct Options {
    /// Tokens of the sequence.
    #[arg(long, value_name = "N", value_parser = count, default_value = "1G")]
    tokens: usize,

    #[command(flatten)]
    pub device: DeviceOption,

    /// How many ranks share them; one is in memory at a time [default: one for each 1M tokens; on a
    /// GPU the first power of two with which a rank fits into seven eighths of its memory].
    #[arg(long, value_name = "P", value_parser = count)]
    ranks: Option<usize>,

    /// Type of the tensors: f64, f32, bf16 or f16 [default: f32; bf16 on a GPU].
    #[arg(long, value_name = "TYPE")]
    dtype: Option<DType>,

    /// Heads [default: 1; 8 on a GPU].
    #[arg(long, value_name = "H", value_parser = count)]
    heads: Option<usize>,

    /// Numbers per head and token.
    #[arg(long, value_name = "D", value_parser = count, default_value = "64")]
    dim: usize,

    /// Segment length of the first branch, which has every token.
    #[arg(long, value_name = "W", value_parser = count, default_value = "1024")]
    segment: usize,

    /// By how much segment length and dilation rate grow from branch to branch.
    #[arg(long, value_name = "G", value_parser = count, default_value = "4")]
    growth: usize,

    /// Random rows to compute again in f64 and compare; 64 more for each branch are among those it
    /// touches.
    #[arg(long, value_name = "ROWS", value_parser = count, default_value = "4096")]
    samples: usize,

    /// Another seed makes another sequence.
    #[arg(long, value_name = "SEED", default_value = "0")]
    seed: u64,

    /// Where to note what is done, to go on after an interruption. Removed at the end.
    #[arg(long, value_name = "FILE", default_value = "encke-billion.state.json")]
    pub state: PathBuf,

    /// Begin at the first rank even if there is a state.
    #[arg(long)]
    pub fresh: bool,

    /// Write what was found as JSON, with the machine and the command.
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
}

/// What decides the numbers: a state may be continued only with the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    pub device: Device,
    pub tokens: usize,
    pub ranks: usize,
    pub dtype: DType,
    pub heads: usize,
    pub dim: usize,
    pub segment_lengths: Vec<usize>,
    pub dilation_rates: Vec<usize>,
    pub samples: usize,
    pub seed: u64,
}

impl Options {
    /// The settings, or which number is wrong. Where no number of ranks was given, `choose` finds one
    /// for what the other settings ask for.
    pub fn settings(&self, choose: impl FnOnce(&Settings) -> Result<usize>) -> Result<Settings> {
        if self.growth < 2 {
            anyhow::bail!(
                "--growth {} never reaches the whole sequence; use 2 or more",
                self.growth
            );
        }
        let mut rates = vec![1usize];
        let mut segments = vec![self.segment];
        while let (Some(&segment), Some(&rate)) = (segments.last(), rates.last())
            && segment < self.tokens
            && segment > 0
        {
            segments.push(segment.saturating_mul(self.growth));
            rates.push(rate.saturating_mul(self.growth));
        }
        let device = self.device.device;
        let (dtype, heads) = match device {
            Device::Cpu => (DType::F32, 1),
            Device::Cuda(_) => (DType::Bf16, 8),
        };
        let settings = Settings {
            device,
            tokens: self.tokens,
            ranks: self.ranks.unwrap_or(1),
            dtype: self.dtype.unwrap_or(dtype),
            heads: self.heads.unwrap_or(heads),
            dim: self.dim,
            segment_lengths: segments,
            dilation_rates: rates,
            samples: self.samples,
            seed: self.seed,
        };
        let ranks = match self.ranks {
            Some(ranks) => ranks,
            None => choose(&settings)?,
        };
        Ok(Settings { ranks, ..settings })
    }
}

impl Settings {
    /// How many ranks it takes on the CPU.
    pub fn cpu_ranks(&self) -> usize {
        self.tokens.div_ceil(SHARE)
    }

    /// The forward pass they ask for.
    pub fn request(&self) -> Result<Request> {
        let mode = Mode::Mix {
            offsets: OffsetRule::HeadMod,
            gradient: MixingGradient::Exact,
        };
        let pattern = Pattern::dilated(&self.segment_lengths, &self.dilation_rates, mode)?;
        let shape = Shape::new(1, self.tokens, self.heads, self.heads, self.dim)?;
        let sharding = Sharding::contiguous(self.ranks)?;
        Ok(Request::new(
            shape,
            pattern.causal(true),
            sharding,
            self.dtype,
        ))
    }
}
