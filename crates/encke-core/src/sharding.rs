//! Which rank owns which tokens.
//!
//! The decision here: every kind of sharding is at most two affine runs of tokens per rank, and the
//! code that uses a sharding sees only the runs. Any sizes are legal, empty shards included.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::rows::congruence;

/// Ranks of the largest ring.
pub const MOST_RANKS: usize = 1 << 20;

/// How the tokens are cut.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cut {
    /// One contiguous shard per rank, as even as the length allows.
    Contiguous,
    /// One contiguous shard per rank, starting at these tokens.
    Firsts(Vec<usize>),
    /// 2p chunks on p ranks; rank a owns chunks a and 2p-1-a, which balances causal attention.
    Zigzag,
    /// Rank a owns tokens a, a + p, a + 2p, …
    Striped,
}

/// Which rank owns which tokens.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Sharding {
    ranks: usize,
    cut: Cut,
}

/// Tokens `first, first + stride, …`, `count` of them. A sharding returns no empty runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Run {
    /// The first token.
    pub first: usize,
    /// The distance between tokens.
    pub stride: usize,
    /// How many tokens.
    pub count: usize,
}

impl Run {
    /// The tokens, in ascending order.
    pub fn tokens(self) -> impl Iterator<Item = usize> {
        (0..self.count).map(move |i| self.first + i * self.stride)
    }

    /// One past the last token.
    pub fn end(&self) -> usize {
        self.first + (self.count - 1) * self.stride + 1
    }

    /// The part with tokens in `range`; None if it is empty.
    pub fn within(&self, range: &Range<usize>) -> Option<Run> {
        let before = |token: usize| {
            let rows = token.saturating_sub(self.first).div_ceil(self.stride);
            rows.min(self.count)
        };
        let (start, end) = (before(range.start), before(range.end));
        (start < end).then(|| Run {
            first: self.first + start * self.stride,
            stride: self.stride,
            count: end - start,
        })
    }

    /// The intersection of two runs, which is a run again; None if it is empty.
    pub fn intersect(&self, other: &Run) -> Option<Run> {
        let (solution, stride) = congruence(self.first, self.stride, other.first, other.stride)?;
        let low = self.first.max(other.first);
        let first = solution + stride * low.saturating_sub(solution).div_ceil(stride);
        let end = self.end().min(other.end());
        (first < end).then(|| Run {
            first,
            stride,
            count: (end - first).div_ceil(stride),
        })
    }
}

impl Sharding {
    /// A sharding over `ranks` ranks.
    pub fn new(ranks: usize, cut: Cut) -> Result<Sharding> {
        if ranks == 0 {
            return Err(Error::Zero {
                what: "the number of ranks",
            });
        }
        if ranks > MOST_RANKS {
            let most = MOST_RANKS;
            return Err(Error::TooManyRanks { ranks, most });
        }
        if let Cut::Firsts(firsts) = &cut
            && firsts.len() != ranks
        {
            return Err(Error::PartitionRanks {
                firsts: firsts.len(),
                ranks,
            });
        }
        Ok(Sharding { ranks, cut })
    }

    /// A contiguous sharding, as even as the length allows.
    pub fn contiguous(ranks: usize) -> Result<Sharding> {
        Sharding::new(ranks, Cut::Contiguous)
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// How the tokens are cut.
    pub fn cut(&self) -> &Cut {
        &self.cut
    }

    /// An error if an explicit partition does not fit `tokens`.
    pub fn check(&self, tokens: usize) -> Result<()> {
        let Cut::Firsts(firsts) = &self.cut else {
            return Ok(());
        };
        let mut previous = 0;
        for (rank, &first) in firsts.iter().enumerate() {
            if (rank == 0 && first != 0) || first < previous || first > tokens {
                return Err(Error::Partition {
                    rank,
                    first,
                    tokens,
                });
            }
            previous = first;
        }
        Ok(())
    }

    /// The tokens of `rank`: at most two runs, none of them empty. The rows of a shard are in this
    /// order.
    pub fn runs(&self, tokens: usize, rank: usize) -> Vec<Run> {
        let p = self.ranks;
        let chunk = |chunks: usize, i: usize| {
            let start = |i: usize| i * (tokens / chunks) + i.min(tokens % chunks);
            (start(i), start(i + 1))
        };
        let chunks: Vec<(usize, usize)> = match &self.cut {
            Cut::Contiguous => vec![chunk(p, rank)],
            Cut::Zigzag => vec![chunk(2 * p, rank), chunk(2 * p, 2 * p - 1 - rank)],
            Cut::Firsts(firsts) => {
                let end = firsts.get(rank + 1).copied().unwrap_or(tokens);
                vec![(firsts[rank], end)]
            }
            Cut::Striped => {
                let count = tokens.saturating_sub(rank).div_ceil(p);
                let run = Run {
                    first: rank,
                    stride: p,
                    count,
                };
                return (count > 0).then_some(run).into_iter().collect();
            }
        };
        chunks
            .into_iter()
            .filter(|(start, end)| start < end)
            .map(|(start, end)| Run {
                first: start,
                stride: 1,
                count: end - start,
            })
            .collect()
    }

    /// The number of tokens that `rank` owns.
    pub fn rows(&self, tokens: usize, rank: usize) -> usize {
        self.runs(tokens, rank).iter().map(|run| run.count).sum()
    }
}
