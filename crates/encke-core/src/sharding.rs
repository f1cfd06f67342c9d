//! Which rank owns which tokens.
//!
//! The decision here: every kind of sharding is a few affine runs of tokens per rank, and the code
//! that uses a sharding sees only the runs. Any sizes are legal, empty shards included.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::congruence::congruence;
use crate::error::{Error, Result};

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
    /// Each rank owns these ranges.
    Ranges(TokenRanges),
}

/// Ranges of tokens of each rank, in ascending order.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "Vec<Vec<[usize; 2]>>", into = "Vec<Vec<[usize; 2]>>")]
pub struct TokenRanges {
    /// First and one past the last token of each range, by rank.
    by_rank: Arc<[Vec<[usize; 2]>]>,
}

impl TokenRanges {
    /// The ranges of each rank. Empty ones are left out, and adjacent ones joined.
    pub fn new(by_rank: Vec<Vec<Range<usize>>>) -> TokenRanges {
        let joined = by_rank.into_iter().map(|mut ranges| {
            ranges.retain(|range| !range.is_empty());
            ranges.sort_by_key(|range| range.start);
            let mut joined: Vec<[usize; 2]> = Vec::new();
            for Range { start, end } in ranges {
                match joined.last_mut() {
                    Some(last) if last[1] == start => last[1] = end,
                    _ => joined.push([start, end]),
                }
            }
            joined
        });
        TokenRanges {
            by_rank: joined.collect(),
        }
    }

    /// The ranges of one rank.
    pub fn of(&self, rank: usize) -> impl Iterator<Item = Range<usize>> {
        self.by_rank[rank].iter().map(|&[start, end]| start..end)
    }

    /// An error unless every one of `tokens` tokens is in one range.
    fn check(&self, tokens: usize) -> Result<()> {
        let ranges = self.by_rank.iter().enumerate();
        let mut all: Vec<([usize; 2], usize)> = ranges
            .flat_map(|(rank, ranges)| ranges.iter().map(move |range| (*range, rank)))
            .collect();
        all.sort_unstable();
        let mut end = 0;
        for ([first, last], rank) in all {
            if first != end {
                return Err(Error::Partition {
                    rank,
                    first,
                    tokens,
                });
            }
            end = last;
        }
        match end == tokens {
            true => Ok(()),
            false => Err(Error::Partition {
                rank: self.by_rank.len() - 1,
                first: end,
                tokens,
            }),
        }
    }
}

impl From<Vec<Vec<[usize; 2]>>> for TokenRanges {
    fn from(by_rank: Vec<Vec<[usize; 2]>>) -> TokenRanges {
        let range = |&[start, end]: &[usize; 2]| start..end;
        let ranges = by_rank.iter().map(|of| of.iter().map(range).collect());
        TokenRanges::new(ranges.collect())
    }
}

impl From<TokenRanges> for Vec<Vec<[usize; 2]>> {
    fn from(ranges: TokenRanges) -> Vec<Vec<[usize; 2]>> {
        ranges.by_rank.to_vec()
    }
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
    /// The first `count` tokens.
    pub const fn leading(count: usize) -> Run {
        Run {
            first: 0,
            stride: 1,
            count,
        }
    }

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
        if let Cut::Ranges(ranges) = &cut
            && ranges.by_rank.len() != ranks
        {
            let firsts = ranges.by_rank.len();
            return Err(Error::PartitionRanks { firsts, ranks });
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
        let firsts = match &self.cut {
            Cut::Firsts(firsts) => firsts,
            Cut::Ranges(ranges) => return ranges.check(tokens),
            Cut::Contiguous | Cut::Zigzag | Cut::Striped => return Ok(()),
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

    /// The tokens of `rank`: runs in ascending order, none of them empty. The rows of a shard are
    /// in this order.
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
            Cut::Ranges(ranges) => ranges.of(rank).map(|of| (of.start, of.end)).collect(),
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

    /// The queries of `rank` where these `positions` have a query, by index of the query.
    pub fn query_runs(&self, tokens: usize, rank: usize, positions: &Range<usize>) -> Vec<Run> {
        let index = |run: Run| Run {
            first: run.first - positions.start,
            ..run
        };
        let runs = self.runs(tokens, rank).into_iter();
        let runs = runs.filter_map(|run| run.within(positions));
        runs.map(index).collect()
    }

    /// The number of tokens that `rank` owns.
    pub fn rows(&self, tokens: usize, rank: usize) -> usize {
        self.runs(tokens, rank).iter().map(|run| run.count).sum()
    }
}
