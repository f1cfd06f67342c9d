//! Python's options as the library's values.
//!
//! The decision here: an option that would have no effect is refused, because the caller expects
//! one. The library checks the numbers.

use std::time::Duration;

use encke::{
    Attention, Auto, Balance, Bits, Builder, CacheLimits, CheckpointPolicy, Cut, DType, Documents,
    Dropout, GroupScale, MixingGradient, Mode, OffsetRule, Padding, Pattern, Precision, Queries,
    TokenRanges, Window,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error;

/// How the tokens are divided: a name, or the first token of each rank.
#[derive(FromPyObject)]
pub(crate) enum ShardingOption {
    /// contiguous, zigzag, striped, balanced or documents.
    Word(String),
    /// The first token of each rank.
    Firsts(Vec<usize>),
    /// First and one past the last token of each range of each rank.
    Ranges(Vec<Vec<(usize, usize)>>),
}

/// How many ranks there are: a number, or "auto".
#[derive(FromPyObject)]
pub(crate) enum RanksOption {
    /// This number of ranks.
    Number(usize),
    /// auto.
    Word(String),
}

/// ALiBi slopes: the usual ones, or one for each head.
#[derive(FromPyObject)]
pub(crate) enum SlopesOption {
    /// Whether heads have the usual slopes.
    Usual(bool),
    /// The slope of each query head.
    Given(Vec<f64>),
}

/// The documents of a sequence, or those of each entry of a batch that it is packed from.
#[derive(FromPyObject)]
pub(crate) enum DocumentsOption {
    /// The length of each document.
    Lengths(Vec<usize>),
    /// The same for each entry.
    Entries(Vec<Vec<usize>>),
}

impl DocumentsOption {
    fn documents(&self) -> PyResult<Documents> {
        let documents = match self {
            DocumentsOption::Lengths(lengths) => Documents::new(lengths),
            DocumentsOption::Entries(entries) => Documents::of_entries(entries),
        };
        documents.map_err(|error| error::request(&error))
    }
}

/// The options of the attention pattern.
#[derive(FromPyObject)]
pub(crate) struct PyPatternOptions {
    #[pyo3(item)]
    segment_lengths: Option<Vec<usize>>,
    #[pyo3(item)]
    dilation_rates: Option<Vec<usize>>,
    #[pyo3(item)]
    mode: String,
    #[pyo3(item)]
    group_scale: Option<String>,
    #[pyo3(item)]
    offsets: Option<String>,
    #[pyo3(item)]
    mixing_gradient: Option<String>,
    #[pyo3(item)]
    causal: bool,
    #[pyo3(item)]
    window: Option<(Option<usize>, Option<usize>)>,
    #[pyo3(item)]
    prefix: usize,
    #[pyo3(item)]
    documents: Option<DocumentsOption>,
    #[pyo3(item)]
    query_offset: Option<usize>,
    #[pyo3(item)]
    padding: Option<String>,
}

/// The options of the ring and of the computation.
#[derive(FromPyObject)]
pub(crate) struct PyRingOptions {
    #[pyo3(item)]
    ranks: Option<RanksOption>,
    #[pyo3(item)]
    sharding: ShardingOption,
    #[pyo3(item)]
    queries: String,
    #[pyo3(item)]
    scale: Option<f64>,
    #[pyo3(item)]
    softcap: Option<f64>,
    #[pyo3(item)]
    alibi_slopes: Option<SlopesOption>,
    #[pyo3(item)]
    dropout: f64,
    #[pyo3(item)]
    seed: Option<u64>,
    #[pyo3(item)]
    precision: Option<String>,
    #[pyo3(item)]
    checkpoint: String,
    #[pyo3(item)]
    pub redundancy: usize,
    #[pyo3(item)]
    deadline: Option<f64>,
    #[pyo3(item)]
    pub deterministic: bool,
    #[pyo3(item)]
    bits: String,
    #[pyo3(item)]
    memory_per_rank: Option<usize>,
}

impl PyPatternOptions {
    /// The pattern, or an error for options that do not fit together.
    pub fn pattern(&self) -> PyResult<Pattern> {
        self.refuse_without_effect()?;
        let documents = self.documents.as_ref();
        let documents = documents.map(DocumentsOption::documents).transpose()?;
        let (left, right) = self.window.unwrap_or_default();
        let pattern = self
            .branches()?
            .causal(self.causal)
            .window(Window { left, right })
            .prefix(self.prefix)
            .documents(documents)
            .query_offset(self.query_offset)
            .padding(named(
                "padding",
                self.padding.as_deref(),
                &[("none", Padding::None), ("torchscale", Padding::Torchscale)],
            )?);
        if self.prefix > 0 && !pattern.has_bounded_window() {
            return Err(PyValueError::new_err(format!(
                "prefix={} has an effect only with a window that hides keys: without one every \
                 query sees the first tokens anyway; give window=(left, right), or leave it out",
                self.prefix
            )));
        }
        Ok(pattern)
    }

    /// The branches, without a mask.
    fn branches(&self) -> PyResult<Pattern> {
        let Some(segments) = &self.segment_lengths else {
            return Ok(Pattern::dense());
        };
        let mode = match self.mode.as_str() {
            "group" => Mode::Group {
                scale: named(
                    "group_scale",
                    self.group_scale.as_deref(),
                    &[("one", GroupScale::One), ("groups", GroupScale::Groups)],
                )?,
            },
            "mix" => Mode::Mix {
                offsets: named(
                    "offsets",
                    self.offsets.as_deref(),
                    &[
                        ("head-mod", OffsetRule::HeadMod),
                        ("head-block", OffsetRule::HeadBlock),
                    ],
                )?,
                gradient: named(
                    "mixing_gradient",
                    self.mixing_gradient.as_deref(),
                    &[
                        ("exact", MixingGradient::Exact),
                        ("detached", MixingGradient::Detached),
                    ],
                )?,
            },
            _ => Mode::Fkodom,
        };
        let rates = self.dilation_rates.as_deref().unwrap_or_default();
        Pattern::dilated(segments, rates, mode).map_err(|error| error::request(&error))
    }

    fn refuse_without_effect(&self) -> PyResult<()> {
        let mode = self.mode.as_str();
        if !["group", "mix", "fkodom"].contains(&mode) {
            return Err(unknown("mode", mode, &["group", "mix", "fkodom"]));
        }
        let dense = self.segment_lengths.is_none();
        let message = if dense && self.dilation_rates.is_some() {
            "dilation_rates needs segment_lengths, one length for each rate"
        } else if !dense && self.dilation_rates.is_none() {
            "segment_lengths needs dilation_rates, one rate for each length (1 = none)"
        } else if dense && mode != "group" {
            "this mode needs segment_lengths and dilation_rates: without branches attention is \
             dense, and there is nothing to combine"
        } else if self.group_scale.is_some() && (dense || mode != "group") {
            "group_scale has an effect only for branches in group mode; leave it out"
        } else if self.padding.is_some() && dense {
            "padding has an effect only for branches, whose segments it fills up; leave it out"
        } else if self.offsets.is_some() && mode != "mix" {
            "offsets has an effect only in mix mode; leave it out or use mode=\"mix\""
        } else if self.mixing_gradient.is_some() && mode != "mix" {
            "mixing_gradient has an effect only in mix mode; leave it out or use mode=\"mix\""
        } else {
            return Ok(());
        };
        Err(PyValueError::new_err(message))
    }
}

/// The value that lets Encke choose.
const AUTO: &str = "auto";
/// The sharding with equal work for all ranks, whose cut depends on the pattern.
const BALANCED: &str = "balanced";
const DOCUMENTS: &str = "documents";
/// What is cached for one packing of documents. The next batch mostly has another, so less is kept
/// than for a pattern that every batch has.
const PACKED_LIMITS: CacheLimits = CacheLimits {
    plans: 4,
    pools: 2,
    pool_bytes: 1 << 30,
};

impl ShardingOption {
    fn is(&self, name: &str) -> bool {
        matches!(self, ShardingOption::Word(word) if word == name)
    }

    /// The cut, if it does not depend on the pattern.
    pub fn cut(&self) -> PyResult<Cut> {
        let known = [
            ("contiguous", Cut::Contiguous),
            ("zigzag", Cut::Zigzag),
            ("striped", Cut::Striped),
        ];
        match self {
            ShardingOption::Word(text) => named("sharding", Some(text), &known),
            ShardingOption::Firsts(firsts) => Ok(Cut::Firsts(firsts.clone())),
            ShardingOption::Ranges(by_rank) => {
                let ranges = by_rank
                    .iter()
                    .map(|of| of.iter().map(|&(a, b)| a..b).collect());
                Ok(Cut::Ranges(TokenRanges::new(ranges.collect())))
            }
        }
    }
}

impl PyRingOptions {
    /// A builder with all options.
    pub fn builder(&self, pattern: Pattern) -> PyResult<Builder> {
        let balance = match &self.sharding {
            of if of.is(BALANCED) => Some(Balance::Contiguous),
            of if of.is(DOCUMENTS) => Some(Balance::Documents),
            _ => None,
        };
        let cut = match balance.is_some() || self.sharding.is(AUTO) {
            true => Cut::Contiguous,
            false => self.sharding.cut()?,
        };
        let ranks = match (&self.ranks, &cut) {
            (Some(RanksOption::Number(ranks)), _) => *ranks,
            (Some(RanksOption::Word(word)), _) if word != AUTO => {
                return Err(unknown("ranks", word, &["a number", AUTO]));
            }
            (None, Cut::Firsts(firsts)) => firsts.len(),
            _ => 1,
        };
        let queries = [
            ("sharded", Queries::Sharded),
            ("replicated", Queries::Replicated),
        ];
        let policies = [
            ("keep", CheckpointPolicy::KeepOutput),
            ("recompute", CheckpointPolicy::Recompute),
        ];
        let precision = match self.computed()? {
            None => Precision::Stored,
            Some(dtype) => Precision::Compute(dtype),
        };
        let (alibi, slopes) = match &self.alibi_slopes {
            None => (false, None),
            Some(SlopesOption::Usual(usual)) => (*usual, None),
            Some(SlopesOption::Given(slopes)) => (false, Some(slopes.as_slice().into())),
        };
        let dropout = self.dropout()?;
        let packed = pattern.document_list().is_some();
        let mut builder = Attention::builder()
            .pattern(pattern)
            .ranks(ranks)
            .sharding(cut)
            .balanced(balance)
            .softcap(self.softcap)
            .alibi(alibi)
            .slopes(slopes)
            .dropout(dropout)
            .queries(named("queries", Some(&self.queries), &queries)?)
            .checkpoint(named("checkpoint", Some(&self.checkpoint), &policies)?)
            .precision(precision)
            .bits(self.bits()?)
            .redundancy(self.redundancy);
        if let Some(scale) = self.scale {
            builder = builder.scale(scale);
        }
        if packed {
            builder = builder.keep_at_most(PACKED_LIMITS);
        }
        if let Some(deadline) = self.deadline()? {
            builder = builder.deadline(deadline);
        }
        if self.is_auto() {
            let auto = Auto::here().map_err(|error| PyValueError::new_err(error.to_string()))?;
            builder = builder.auto(Auto {
                ranks: matches!(self.ranks, Some(RanksOption::Word(_))),
                cut: self.sharding.is(AUTO),
                memory_limit: self.memory_per_rank,
                ..auto
            });
        } else if self.memory_per_rank.is_some() {
            return Err(PyValueError::new_err(
                "memory_per_rank limits the automatic choice of ranks; it needs ranks=\"auto\"",
            ));
        }
        Ok(builder)
    }

    /// What the bits of results may depend on.
    fn bits(&self) -> PyResult<Bits> {
        self.bits.parse().map_err(|error| error::request(&error))
    }

    /// Which pairs are dropped, if any.
    pub fn dropout(&self) -> PyResult<Option<Dropout>> {
        if self.dropout == 0.0 {
            return Ok(None);
        }
        let Some(seed) = self.seed else {
            return Err(PyValueError::new_err(format!(
                "dropout={} needs a seed: the backward pass drops the same pairs by it",
                self.dropout
            )));
        };
        let dropout = Dropout::new(self.dropout, seed);
        dropout.map(Some).map_err(|error| error::request(&error))
    }

    /// Whether ranks or sharding are chosen automatically.
    pub fn is_auto(&self) -> bool {
        matches!(self.ranks, Some(RanksOption::Word(_))) || self.sharding.is(AUTO)
    }

    /// The compute type, if it is not that of the inputs.
    pub fn computed(&self) -> PyResult<Option<DType>> {
        self.precision.as_deref().map(dtype).transpose()
    }

    /// How long an exchange waits, if given.
    pub fn deadline(&self) -> PyResult<Option<Duration>> {
        let Some(seconds) = self.deadline else {
            return Ok(None);
        };
        let deadline = Duration::try_from_secs_f64(seconds);
        deadline.map(Some).map_err(|_| {
            PyValueError::new_err(format!(
                "deadline is {seconds} seconds; it must be a positive number"
            ))
        })
    }

    /// Whether the backward pass recomputes the forward pass.
    pub fn recomputes(&self) -> bool {
        self.checkpoint == "recompute"
    }
}

/// A type by one of its names: f32, float32, torch.float32.
pub(crate) fn dtype(name: &str) -> PyResult<DType> {
    let short = name.strip_prefix("torch.").unwrap_or(name);
    let names = [
        ("float64", DType::F64),
        ("float32", DType::F32),
        ("bfloat16", DType::Bf16),
        ("float16", DType::F16),
    ];
    let long = names.iter().find(|(known, _)| *known == short);
    match long {
        Some((_, dtype)) => Ok(*dtype),
        None => short.parse().map_err(|error| error::request(&error)),
    }
}

/// The value with this name, which may be written with underscores; the first one by default.
fn named<T: Clone>(option: &str, given: Option<&str>, known: &[(&str, T)]) -> PyResult<T> {
    let Some(given) = given else {
        return Ok(known[0].1.clone());
    };
    let spelled = given.replace('_', "-");
    let found = known.iter().find(|(name, _)| *name == spelled);
    found.map(|(_, value)| value.clone()).ok_or_else(|| {
        let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        unknown(option, given, &names)
    })
}

fn unknown(option: &str, given: &str, known: &[&str]) -> PyErr {
    let known = known.join("\", \"");
    PyValueError::new_err(format!(
        "{option}=\"{given}\" is unknown; known: \"{known}\""
    ))
}
