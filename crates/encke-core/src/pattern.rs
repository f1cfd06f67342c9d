//! Which query sees which key.
//!
//! A pattern is a list of branches (segment length, dilation rate), a rule that assigns branches to
//! heads, and a mask: causal, window, prefix, documents, each optional. [`Pattern::multiplicity`]
//! is the definition (spec sections 5 and 9); [`Pattern::lanes`] is the same set of pairs in the
//! planner's form: one lane for each (branch, offset) with its heads.
//!
//! Heads write their results into *slots*. If all branches of a head share one softmax (dense,
//! group, mix), a slot is a head. If branches stay separate until the end (detached mixing
//! gradients, fkodom), each (branch, head) has a slot of its own, and `mixing` combines them.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::documents::Documents;
use crate::error::{Error, Result, check_steps};
use crate::mask::Window;
use crate::padding::Padding;
use crate::rows::Rows;
use crate::shape::Shape;

/// Steps of a plan for one head of a branch, whose rows it lists with their addresses.
const HEAD_STEPS: usize = 64;

/// One branch: attention inside segments of `segment` tokens, every `dilation`-th token of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Branch {
    /// Tokens of a segment, counted on global positions.
    pub segment: usize,
    /// Distance between the tokens that are selected.
    pub dilation: usize,
}

/// The constant factor of group mode's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupScale {
    /// One: the output is the attention.
    One,
    /// One over the number of branches, as in some packages.
    Groups,
}

/// How mix mode chooses the phase of each head within a dilated segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OffsetRule {
    /// Head `h` has offset `h mod r` (the LongNet paper).
    HeadMod,
    /// Head `h` has offset `floor(h / ceil(H / r))` (torchscale).
    HeadBlock,
}

/// Which derivative mix mode's backward pass computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MixingGradient {
    /// The derivative of the forward pass.
    Exact,
    /// The mixing weights treated as constants, as in torchscale.
    Detached,
}

/// How branches are assigned to heads and how their results are combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "mode")]
pub enum Mode {
    /// Heads are divided into contiguous groups, one per branch.
    Group {
        /// Factor of the output.
        scale: GroupScale,
    },
    /// Every head has all branches, under one softmax.
    Mix {
        /// The phase of each head.
        offsets: OffsetRule,
        /// Which derivative is computed.
        gradient: MixingGradient,
    },
    /// Bug-for-bug compatibility with the fkodom package; see `mixing`.
    Fkodom,
}

impl Mode {
    /// The mode's name as the command line spells it.
    pub fn name(&self) -> &'static str {
        match self {
            Mode::Group { .. } => "group",
            Mode::Mix { .. } => "mix",
            Mode::Fkodom => "fkodom",
        }
    }
}

/// Which query sees which key.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Pattern {
    branches: Vec<Branch>,
    mode: Mode,
    causal: bool,
    window: Window,
    prefix: usize,
    documents: Option<Documents>,
    query_offset: Option<usize>,
    #[serde(default, skip_serializing_if = "Padding::is_none")]
    padding: Padding,
}

/// One head of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LaneHead {
    /// The query head.
    pub head: usize,
    /// The key head it reads.
    pub kv_head: usize,
    /// The slot its result goes to.
    pub slot: usize,
    /// Its slot among the deltas of branches ([`Pattern::delta_slots`]).
    pub delta_slot: usize,
}

/// One (branch, offset) and its heads: all heads of a lane have the same index sets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Lane {
    /// The branch it came from.
    pub branch: usize,
    /// Segment length, at most the length of the sequence.
    pub segment: usize,
    /// Dilation rate.
    pub dilation: usize,
    /// Phase within the segment.
    pub offset: usize,
    /// The heads, in ascending order.
    pub heads: Vec<LaneHead>,
    /// The distinct key heads they read, in ascending order.
    pub kv_heads: Vec<usize>,
}

impl Pattern {
    /// Dense attention: every query sees every key.
    pub fn dense() -> Pattern {
        Pattern {
            branches: vec![Branch {
                segment: usize::MAX,
                dilation: 1,
            }],
            mode: Mode::Group {
                scale: GroupScale::One,
            },
            causal: false,
            window: Window::ALL,
            prefix: 0,
            documents: None,
            query_offset: None,
            padding: Padding::None,
        }
    }

    /// A dilated pattern from paired lists, as the published packages take them.
    pub fn dilated(
        segment_lengths: &[usize],
        dilation_rates: &[usize],
        mode: Mode,
    ) -> Result<Pattern> {
        if segment_lengths.len() != dilation_rates.len() {
            return Err(Error::BranchCount {
                segments: segment_lengths.len(),
                dilations: dilation_rates.len(),
            });
        }
        if segment_lengths.is_empty() {
            return Err(Error::Zero {
                what: "the number of branches",
            });
        }
        for (what, sizes) in [
            ("a segment length", segment_lengths),
            ("a dilation rate", dilation_rates),
        ] {
            if sizes.contains(&0) {
                return Err(Error::Zero { what });
            }
        }
        let branches = segment_lengths
            .iter()
            .zip(dilation_rates)
            .map(|(&segment, &dilation)| Branch { segment, dilation })
            .collect();
        Ok(Pattern {
            branches,
            mode,
            ..Pattern::dense()
        })
    }

    /// Sets whether each query sees only keys at or before its own position.
    pub fn causal(mut self, causal: bool) -> Pattern {
        self.causal = causal;
        self
    }

    /// Sets how far each query sees before and after its own position.
    pub fn window(mut self, window: Window) -> Pattern {
        self.window = window;
        self
    }

    /// Sets how many tokens at the start of each document are visible outside the window, too.
    pub fn prefix(mut self, tokens: usize) -> Pattern {
        self.prefix = tokens;
        self
    }

    /// Sets the documents: a query sees only keys of its own one, and segments, offsets and
    /// prefixes start anew in each. None for one document of the whole sequence.
    pub fn documents(mut self, documents: Option<Documents>) -> Pattern {
        self.documents = documents;
        self
    }

    /// Sets the position of the first query where there are fewer queries than tokens; None for the
    /// last tokens.
    pub fn query_offset(mut self, offset: Option<usize>) -> Pattern {
        self.query_offset = offset;
        self
    }

    /// Sets what stands in the places of a segment that have no token.
    pub fn padding(mut self, padding: Padding) -> Pattern {
        self.padding = padding;
        self
    }

    /// What stands in the places of a segment that have no token.
    pub fn padding_rule(&self) -> Padding {
        self.padding
    }

    /// The position of the first query, if one was set.
    pub fn offset_of_queries(&self) -> Option<usize> {
        self.query_offset
    }

    /// The position of the first query.
    pub fn first_query(&self, shape: &Shape) -> usize {
        self.query_offset
            .unwrap_or(shape.tokens.saturating_sub(shape.queries))
    }

    /// Whether queries see only keys at or before their own position.
    pub fn is_causal(&self) -> bool {
        self.causal
    }

    /// How far a query sees: the window and the causal mask together.
    pub fn effective_window(&self) -> Window {
        self.window.and(self.prefix_window())
    }

    /// How far a query sees keys of the prefix: the causal mask alone.
    pub fn prefix_window(&self) -> Window {
        match self.causal {
            true => Window::CAUSAL,
            false => Window::ALL,
        }
    }

    /// Tokens at the start of each document that are visible outside the window, too; 0 where the
    /// window hides nothing that the prefix would show.
    pub fn effective_prefix(&self) -> usize {
        match self.has_bounded_window() {
            true => self.prefix,
            false => 0,
        }
    }

    /// The documents; None if the sequence is one.
    pub fn document_list(&self) -> Option<&Documents> {
        self.documents.as_ref()
    }

    /// The tokens of the document of `token` in a sequence of `tokens`.
    pub fn document_of(&self, token: usize, tokens: usize) -> Range<usize> {
        match &self.documents {
            Some(documents) => documents.of(token),
            None => 0..tokens,
        }
    }

    /// The entry of a padded batch that `token` was packed from, and the first token of that entry.
    pub fn entry_of(&self, token: usize) -> (usize, usize) {
        let documents = self.documents.as_ref();
        documents.map_or((0, 0), |documents| documents.entry_of(token))
    }

    /// Whether queries see only keys near their own position (and those of the prefix).
    pub fn has_bounded_window(&self) -> bool {
        self.effective_window() != self.prefix_window()
    }

    /// How far queries see these keys of a segment, of which `prefix` positions belong to the
    /// document's prefix; the keys are all inside or all outside of it.
    pub(crate) fn window_of(&self, keys: &Rows, prefix: usize) -> Window {
        match keys.last_position() < prefix {
            true => self.prefix_window(),
            false => self.effective_window(),
        }
    }

    /// Whether the mask is at most causal.
    pub fn has_plain_mask(&self) -> bool {
        self.documents.is_none() && !self.has_bounded_window()
    }

    /// The mask in words, each part after a comma; empty if there is none.
    pub fn mask_text(&self) -> String {
        let mut text = String::new();
        if self.causal {
            text += ", causal";
        }
        let side = |limit: Option<usize>| limit.map_or("all".to_string(), |by| by.to_string());
        if self.window != Window::ALL {
            let Window { left, right } = self.window;
            text += &format!(", window {},{}", side(left), side(right));
        }
        if self.prefix > 0 {
            text += &format!(", prefix {}", self.prefix);
        }
        if let Some(documents) = &self.documents {
            text += &match documents.count() {
                1 => ", 1 document".to_string(),
                count => format!(", {count} documents"),
            };
        }
        if self.padding == Padding::Torchscale {
            text += ", torchscale's padding";
        }
        text
    }

    /// Whether the query at position `x` sees the key at position `j` of the same document, which
    /// begins at position `first` (spec section 9).
    pub fn sees(&self, first: usize, x: usize, j: usize) -> bool {
        let within = |window: Window| window.reach(x, x).contains(&j);
        within(self.effective_window()) || j < first + self.prefix && within(self.prefix_window())
    }

    /// The branches.
    pub fn branches(&self) -> &[Branch] {
        &self.branches
    }

    /// How branches are assigned to heads.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// An error if this pattern does not support `shape`.
    pub fn check(&self, shape: &Shape) -> Result<()> {
        let branches = self.branches.len();
        let grouped = !matches!(self.mode, Mode::Mix { .. });
        let branches_of_a_head = if grouped { 1 } else { branches };
        check_steps(&[
            (HEAD_STEPS, "steps for a head"),
            (shape.heads, "heads"),
            (branches_of_a_head, "branches"),
        ])?;
        if grouped && branches > shape.heads {
            return Err(Error::MoreBranchesThanHeads {
                branches,
                heads: shape.heads,
            });
        }
        let (offset, queries) = (self.first_query(shape), shape.queries);
        if offset > shape.tokens - queries {
            let tokens = shape.tokens;
            return Err(Error::QueryOffset {
                offset,
                queries,
                tokens,
            });
        }
        if matches!(self.mode, Mode::Fkodom) && queries < shape.tokens {
            return Err(Error::NotInMode {
                what: "a call with fewer queries than tokens",
                mode: self.mode.name(),
                hint: "its rows are divided by sums over the whole sequence: use group mode",
            });
        }
        if let Some(documents) = &self.documents {
            let (got, tokens) = (documents.tokens(), shape.tokens);
            if got != tokens {
                return Err(Error::DocumentTokens { got, tokens });
            }
            if matches!(self.mode, Mode::Fkodom) {
                return Err(Error::NotInMode {
                    what: "a packed sequence of documents",
                    mode: self.mode.name(),
                    hint: "its rows are divided by sums over the whole sequence: use group mode, \
                           or a call for each document",
                });
            }
        }
        if matches!(self.mode, Mode::Fkodom) {
            for branch in &self.branches {
                if !shape.tokens.is_multiple_of(branch.segment) {
                    return Err(Error::FkodomLength {
                        tokens: shape.tokens,
                        segment: branch.segment,
                    });
                }
            }
        }
        self.check_padding(shape)
    }

    /// An error if the mode's output is not a softmax with this lse, so that the lse has no
    /// gradient.
    pub(crate) fn check_dlse(&self) -> Result<()> {
        match self.mode {
            Mode::Fkodom => Err(Error::NotInMode {
                what: "a gradient of the lse",
                mode: self.mode.name(),
                hint: "its output is not a softmax of its lse: leave the gradient out, or use \
                       group mode",
            }),
            _ => Ok(()),
        }
    }

    /// An error if sinks are not defined: where branches are normalized on their own.
    pub fn check_sinks(&self) -> Result<()> {
        match self.splits_slots() {
            false => Ok(()),
            true => Err(Error::Excludes {
                one: "sinks",
                other: "branches with a softmax of their own (detached mixing, fkodom)",
                reason: "a sink belongs to one softmax; use exact mixing gradients",
            }),
        }
    }

    /// Whether branches have slots of their own (see the module documentation).
    pub fn splits_slots(&self) -> bool {
        match self.mode {
            Mode::Group { .. } => false,
            Mode::Mix { gradient, .. } => gradient == MixingGradient::Detached,
            Mode::Fkodom => true,
        }
    }

    /// Factor of the output after the softmax.
    pub fn gain(&self) -> f64 {
        match self.mode {
            Mode::Group {
                scale: GroupScale::Groups,
            } => 1.0 / self.branches.len() as f64,
            _ => 1.0,
        }
    }

    /// The heads of `branch`.
    fn head_range(&self, branch: usize, heads: usize) -> Range<usize> {
        let groups = self.branches.len();
        let share = heads / groups + usize::from(branch < heads % groups);
        match self.mode {
            Mode::Group { .. } => {
                let first = branch * (heads / groups) + branch.min(heads % groups);
                first..first + share
            }
            // The fkodom package starts branch i at i times its own share. If the branches do not
            // divide the heads, shares overlap and heads at the end can be left out.
            Mode::Fkodom => branch * share..((branch + 1) * share).min(heads),
            Mode::Mix { .. } => 0..heads,
        }
    }

    /// The phase of a head in the segments of `branch`.
    fn offset(&self, branch: usize, heads: usize, head: usize) -> usize {
        let dilation = self.branches[branch].dilation;
        match self.mode {
            Mode::Group { .. } | Mode::Fkodom => branch % dilation,
            Mode::Mix { offsets, .. } => match offsets {
                OffsetRule::HeadMod => head % dilation,
                OffsetRule::HeadBlock => head / heads.div_ceil(dilation),
            },
        }
    }

    /// (head, offset) of every head of `branch`, in ascending order of heads.
    pub fn heads_of(&self, branch: usize, heads: usize) -> Vec<(usize, usize)> {
        let range = self.head_range(branch, heads);
        range
            .map(|head| (head, self.offset(branch, heads, head)))
            .collect()
    }

    /// In how many branches of `head` the query at position `q` sees the key at position `k`.
    pub fn multiplicity(&self, shape: &Shape, head: usize, q: usize, k: usize) -> usize {
        let document = self.document_of(q, shape.tokens);
        if !document.contains(&k) || !self.sees(document.start, q, k) {
            return 0;
        }
        let (q, k) = (q - document.start, k - document.start);
        (0..self.branches.len())
            .filter(|&branch| self.head_range(branch, shape.heads).contains(&head))
            .filter(|&branch| {
                let offset = self.offset(branch, shape.heads, head);
                let Branch { segment, dilation } = self.branches[branch];
                let touches = |t: usize| (t % segment) % dilation == offset;
                q / segment == k / segment && touches(q) && touches(k)
            })
            .count()
    }

    /// The head of each slot.
    pub fn slots(&self, heads: usize) -> Vec<usize> {
        if !self.splits_slots() {
            return (0..heads).collect();
        }
        (0..self.branches.len())
            .flat_map(|branch| self.heads_of(branch, heads))
            .map(|(head, _)| head)
            .collect()
    }

    /// For each branch, (head, slot) of its heads: where a backward pass that is given the delta of
    /// each branch ([`Pass::BackwardByBranch`]) reads it. Heads of a branch that select different
    /// tokens share a slot: a branch has as many as heads of one offset.
    ///
    /// [`Pass::BackwardByBranch`]: crate::plan::Pass::BackwardByBranch
    pub fn delta_slots(&self, heads: usize) -> Vec<Vec<(usize, usize)>> {
        let mut first = 0;
        let slots_of = |branch: usize| {
            let mut taken: BTreeMap<usize, usize> = BTreeMap::new();
            let of_heads = self.heads_of(branch, heads).into_iter();
            let of_heads = of_heads.map(|(head, offset)| {
                let of_offset = taken.entry(offset).or_default();
                *of_offset += 1;
                (head, first + *of_offset - 1)
            });
            let of_heads = of_heads.collect();
            first += taken.values().max().copied().unwrap_or(0);
            of_heads
        };
        (0..self.branches.len()).map(slots_of).collect()
    }

    /// The pattern resolved for `shape`: its lanes, ordered by branch and offset.
    pub fn lanes(&self, shape: &Shape) -> Vec<Lane> {
        let mut lanes: Vec<Lane> = Vec::new();
        let mut slots = 0;
        let delta_slots = self.delta_slots(shape.heads);
        for (branch, &Branch { segment, dilation }) in self.branches.iter().enumerate() {
            let segment = segment.min(shape.tokens);
            let mut of_branch: BTreeMap<usize, Lane> = BTreeMap::new();
            let heads = self.heads_of(branch, shape.heads).into_iter();
            for ((head, offset), (_, delta_slot)) in heads.zip(&delta_slots[branch]) {
                let slot = if self.splits_slots() { slots } else { head };
                slots += 1;
                if offset >= segment {
                    continue; // no token of such a short segment has that phase
                }
                let lane = of_branch.entry(offset).or_insert_with(|| Lane {
                    branch,
                    segment,
                    // A stride beyond the segment selects the same single token.
                    dilation: dilation.min(segment),
                    offset,
                    heads: Vec::new(),
                    kv_heads: Vec::new(),
                });
                let kv_head = shape.kv_head(head);
                lane.heads.push(LaneHead {
                    head,
                    kv_head,
                    slot,
                    delta_slot: *delta_slot,
                });
                if lane.kv_heads.last() != Some(&kv_head) {
                    lane.kv_heads.push(kv_head);
                }
            }
            lanes.extend(of_branch.into_values());
        }
        lanes
    }
}
