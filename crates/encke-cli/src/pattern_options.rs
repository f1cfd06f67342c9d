//! The options of the attention pattern, shared by all commands that have one.
//!
//! The decision here: an option that would have no effect is refused, because a user who gives it
//! expects one. The library checks the values.

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use encke::{
    Builder, Documents, GroupScale, MixingGradient, Mode, OffsetRule, Padding, Pattern, Window,
};
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

    /// Zeros that fill segments up and take part in the softmax, as in torchscale [default: none].
    #[arg(long, value_enum, value_name = "RULE")]
    padding: Option<PaddingName>,

    /// Causal mask: a query attends only to keys at or before its own position.
    #[arg(long)]
    causal: bool,

    /// Window: a query attends to at most so many tokens before and after its own; `all` for no
    /// limit. A sliding window of W tokens is W-1,0.
    #[arg(long, value_name = "LEFT,RIGHT", value_parser = window)]
    window: Option<Window>,

    /// Tokens at the start (of each document) that are visible outside the window, too.
    #[arg(long, value_name = "TOKENS", value_parser = count)]
    prefix: Option<usize>,

    /// Lengths of the documents that the sequence is packed from: no query attends to another
    /// document. Without lengths (`attend` only): from the tensor cu_seqlens of the file.
    #[arg(
        long,
        value_name = "N1,N2,...",
        num_args = 0..=1,
        default_missing_value = "",
        value_parser = documents
    )]
    documents: Option<DocumentSource>,

    /// Position of the first query where q has fewer tokens than k [default: the queries are those
    /// of the last tokens].
    #[arg(long, value_name = "X", value_parser = count)]
    query_offset: Option<usize>,

    /// Limits scores to this size: x becomes X tanh(x / X).
    #[arg(long, value_name = "X")]
    softcap: Option<f64>,

    /// ALiBi: subtracts slope times distance from the scores. The slope of head h of H is
    /// 2^(-8(h+1)/H), or in `attend` the tensor alibi_slopes [H], if the file has it.
    #[arg(long)]
    alibi: bool,
}

/// Where document lengths come from.
#[derive(Debug, Clone)]
enum DocumentSource {
    Lengths(Vec<usize>),
    /// The tensor `cu_seqlens` of the input.
    File,
}

/// Parses the two sides of a window.
pub fn window(text: &str) -> Result<Window, String> {
    let side = |text: &str| match text.trim() {
        "all" => Ok(None),
        number => count(number).map(Some),
    };
    let (left, right) = text
        .split_once(',')
        .ok_or("write how many tokens before and after, as in 1023,0 or 4096,all")?;
    Ok(Window {
        left: side(left)?,
        right: side(right)?,
    })
}

/// Parses document lengths.
fn documents(text: &str) -> Result<DocumentSource, String> {
    if text.is_empty() {
        return Ok(DocumentSource::File);
    }
    let lengths: Result<Vec<usize>, String> = text.split(',').map(count).collect();
    Ok(DocumentSource::Lengths(lengths?))
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

#[derive(Debug, Clone, Copy, ValueEnum)]
enum PaddingName {
    /// Where torchscale has zeros: for weights that were trained there (prov-gigapath)
    Torchscale,
}

impl PatternOptions {
    /// Whether no option was given, so that a command may use a default pattern.
    pub fn none_given(&self) -> bool {
        let branches = self.segment_lengths.len() + self.dilation_rates.len();
        let choices = self.mode.is_some()
            || self.group_scale.is_some()
            || self.offsets.is_some()
            || self.padding.is_some();
        let mask = self.causal
            || self.window.is_some()
            || self.prefix.is_some()
            || self.documents.is_some()
            || self.query_offset.is_some();
        let scores = self.softcap.is_some() || self.alibi;
        branches == 0 && !choices && self.mixing_gradient.is_none() && !mask && !scores
    }

    /// Whether document lengths are a tensor of the input.
    pub fn reads_documents(&self) -> bool {
        matches!(self.documents, Some(DocumentSource::File))
    }

    /// Whether scores have ALiBi slopes.
    pub fn has_slopes(&self) -> bool {
        self.alibi
    }

    /// The option with which the sequence can have only one length, or few.
    pub fn fixes_length(&self) -> Option<&'static str> {
        match self.mode {
            _ if self.documents.is_some() => Some("--documents"),
            Some(ModeName::Fkodom) => Some("--mode fkodom"),
            _ => None,
        }
    }

    /// The attention with this pattern; `documents` are the lengths that the input gives.
    pub fn apply(&self, builder: Builder, documents: Option<Documents>) -> Result<Builder> {
        let pattern = self.masked(documents)?;
        let builder = builder.pattern(pattern).softcap(self.softcap);
        Ok(builder.alibi(self.alibi))
    }

    /// The pattern, or which options contradict each other.
    pub fn pattern(&self) -> Result<Pattern> {
        self.masked(None)
    }

    /// The pattern with its mask; `given` are the documents of the input.
    fn masked(&self, given: Option<Documents>) -> Result<Pattern> {
        if self.prefix.is_some() && self.window.is_none() {
            bail!("--prefix needs --window: without one every token of the prefix is visible");
        }
        let documents = match &self.documents {
            None => None,
            Some(DocumentSource::Lengths(lengths)) => Some(Documents::new(lengths)?),
            Some(DocumentSource::File) => match given {
                Some(documents) => Some(documents),
                None => bail!("--documents needs lengths here, as in --documents 5k,20k,1k"),
            },
        };
        let pattern = self.branches()?.causal(self.causal);
        let pattern = pattern.window(self.window.unwrap_or(Window::ALL));
        if self.prefix.is_some() && !pattern.has_bounded_window() {
            bail!("--prefix has no effect: --window hides no token that a prefix could show");
        }
        Ok(pattern
            .prefix(self.prefix.unwrap_or(0))
            .documents(documents)
            .query_offset(self.query_offset)
            .padding(match self.padding {
                None => Padding::None,
                Some(PaddingName::Torchscale) => Padding::Torchscale,
            }))
    }

    /// The branches alone.
    fn branches(&self) -> Result<Pattern> {
        let mode = self.mode.unwrap_or(ModeName::Group);
        self.refuse_without_effect(mode)?;
        if self.segment_lengths.is_empty() {
            return Ok(Pattern::dense());
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
        let lengths = &self.segment_lengths;
        Ok(Pattern::dilated(lengths, &self.dilation_rates, mode)?)
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
        if self.padding.is_some() && dense {
            bail!("--padding applies only to branches, whose segments it fills up; leave it out");
        }
        Ok(())
    }
}
