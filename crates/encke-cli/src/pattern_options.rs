//! The options of the attention pattern, shared by all commands that have one.
//!
//! The decision here: an option that would have no effect is refused, because a user who gives it
//! expects one. The library checks the values.

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use encke::{GroupScale, MixingGradient, Mode, OffsetRule, Pattern};
use encke_lab::number::count;

/// The attention pattern.
#[derive(Debug, Args)]
#[command(next_help_heading = "Pattern (none given: dense; for `report`, LongNet)")]
pub struct PatternOptions {
    /// Segment length of each branch, in tokens. A query attends to keys of its own segment only.
    #[arg(long, value_name = "W1,W2,...", value_delimiter = ',', value_parser = count)]
    segment_lengths: Vec<usize>,

    /// Dilation rate r of each branch: every r-th token takes part. As many as segment lengths.
    #[arg(long, value_name = "R1,R2,...", value_delimiter = ',', value_parser = count)]
    dilation_rates: Vec<usize>,

    /// How branches are assigned to heads and their results combined [default: group].
    #[arg(long, value_enum)]
    mode: Option<ModeName>,

    /// Factor of the output in group mode [default: one].
    #[arg(long, value_enum, value_name = "SCALE")]
    group_scale: Option<ScaleName>,

    /// Which tokens of a dilated segment each head takes in mix mode [default: head-mod].
    #[arg(long, value_enum, value_name = "RULE")]
    offsets: Option<OffsetName>,

    /// Which derivative mix mode computes [default: exact].
    #[arg(long, value_enum, value_name = "GRADIENT")]
    mixing_gradient: Option<GradientName>,

    /// Causal mask: a query attends only to keys at or before its own position.
    #[arg(long)]
    causal: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ModeName {
    /// Heads are cut into contiguous groups, one for each branch
    Group,
    /// Every head has all branches, under one softmax (LongNet)
    Mix,
    /// Heads as in group mode, each output divided by its sum over the sequence: only to reproduce
    /// the numbers of the package of that name
    Fkodom,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum ScaleName {
    /// 1: the output is the attention
    One,
    /// 1 / number of branches, as in some packages
    Groups,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum OffsetName {
    /// Head h begins at token h mod r of a segment (the LongNet paper)
    HeadMod,
    /// Head h begins at token floor(h / ceil(heads / r)) (torchscale)
    HeadBlock,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum GradientName {
    /// The derivative of the forward pass
    Exact,
    /// Mixing weights taken as constants, as in torchscale
    Detached,
}

impl PatternOptions {
    /// Whether no option was given, so that a command may use a default pattern.
    pub fn none_given(&self) -> bool {
        let branches = self.segment_lengths.len() + self.dilation_rates.len();
        let choices = self.mode.is_some() || self.group_scale.is_some() || self.offsets.is_some();
        branches == 0 && !choices && self.mixing_gradient.is_none() && !self.causal
    }

    /// The pattern, or which options contradict each other.
    pub fn pattern(&self) -> Result<Pattern> {
        let mode = self.mode.unwrap_or(ModeName::Group);
        self.refuse_without_effect(mode)?;
        if self.segment_lengths.is_empty() {
            return Ok(Pattern::dense().causal(self.causal));
        }
        let mode = match mode {
            ModeName::Group => Mode::Group {
                scale: match self.group_scale {
                    None | Some(ScaleName::One) => GroupScale::One,
                    Some(ScaleName::Groups) => GroupScale::Groups,
                },
            },
            ModeName::Mix => Mode::Mix {
                offsets: match self.offsets {
                    None | Some(OffsetName::HeadMod) => OffsetRule::HeadMod,
                    Some(OffsetName::HeadBlock) => OffsetRule::HeadBlock,
                },
                gradient: match self.mixing_gradient {
                    None | Some(GradientName::Exact) => MixingGradient::Exact,
                    Some(GradientName::Detached) => MixingGradient::Detached,
                },
            },
            ModeName::Fkodom => Mode::Fkodom,
        };
        let pattern = Pattern::dilated(&self.segment_lengths, &self.dilation_rates, mode)?;
        Ok(pattern.causal(self.causal))
    }

    fn refuse_without_effect(&self, mode: ModeName) -> Result<()> {
        let dense = self.segment_lengths.is_empty();
        if dense && !self.dilation_rates.is_empty() {
            bail!("--dilation-rates needs --segment-lengths, one length for each rate");
        }
        if !dense && self.dilation_rates.is_empty() {
            bail!("--segment-lengths needs --dilation-rates, one rate for each length (1 = none)");
        }
        if dense && mode != ModeName::Group {
            let name = if mode == ModeName::Mix {
                "mix"
            } else {
                "fkodom"
            };
            bail!(
                "--mode {name} needs --segment-lengths and --dilation-rates: without branches \
                 attention is dense, and there is nothing to combine"
            );
        }
        if self.group_scale.is_some() && (dense || mode != ModeName::Group) {
            bail!("--group-scale applies only to branches in group mode; leave it out");
        }
        if self.offsets.is_some() && mode != ModeName::Mix {
            bail!("--offsets applies only in mix mode; leave it out or add --mode mix");
        }
        if self.mixing_gradient.is_some() && mode != ModeName::Mix {
            bail!("--mixing-gradient applies only in mix mode; leave it out or add --mode mix");
        }
        Ok(())
    }
}
