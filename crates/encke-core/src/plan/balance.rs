//! Shards by speed: cuts a sequence so that ranks of different speed finish together.
//!
//! The decision here: the cut balances work, not rows. The number of pairs of all queries before a
//! token has a closed form for every lane, so causal masks, segments and dilation are accounted for
//! exactly, and a cut of a billion tokens is found by bisection.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use super::work::PatternWork;
use crate::error::{Error, Result};
use crate::pattern::Pattern;
use crate::shape::Shape;
use crate::sharding::{Cut, TokenRanges};

/// One contiguous shard per rank, with a share of the pattern's work proportional to the rank's
/// speed. A rank of speed 0 gets no tokens.
pub fn by_speed(pattern: &Pattern, shape: &Shape, speeds: &[f64]) -> Result<Cut> {
    for (rank, &speed) in speeds.iter().enumerate() {
        if !(speed >= 0.0 && speed.is_finite()) {
            return Err(Error::Speed { rank, speed });
        }
    }
    let all: f64 = speeds.iter().sum();
    if all <= 0.0 {
        return Err(Error::Speed {
            rank: 0,
            speed: speeds.first().copied().unwrap_or(0.0),
        });
    }
    let lanes = pattern.lanes(shape);
    let pairs = PatternWork::new(pattern, &lanes, shape);
    // A row without keys still costs something.
    let work = |token: usize| pairs.before(token) + token as u128;
    let total = work(shape.tokens) as f64;
    let (mut before, mut firsts) = (0.0, Vec::with_capacity(speeds.len()));
    for &speed in speeds {
        let wanted = total * (before / all);
        firsts.push(match before {
            0.0 => 0,
            _ => first_token(shape.tokens, |token| work(token) as f64 >= wanted),
        });
        before += speed;
    }
    // Trailing ranks of speed 0 must not get the tokens that rounding leaves over.
    for rank in (0..speeds.len()).rev() {
        if speeds[rank] > 0.0 {
            break;
        }
        firsts[rank] = shape.tokens;
    }
    Ok(Cut::Firsts(firsts))
}

/// Tokens of the grid on which [`even`] cuts long shards: a multiple of every kernel's tile.
const GRID: usize = 64;

/// One contiguous shard per rank, each with about the same work, whatever the mask, the documents
/// and the dilation. Shards of at least 16 times the grid are cut on it.
pub fn even(pattern: &Pattern, shape: &Shape, ranks: usize) -> Result<Cut> {
    let Cut::Firsts(mut firsts) = by_speed(pattern, shape, &vec![1.0; ranks])? else {
        return Ok(Cut::Contiguous);
    };
    if shape.tokens / ranks >= 16 * GRID {
        for first in &mut firsts {
            *first = (*first + GRID / 2) / GRID * GRID;
        }
    }
    Ok(Cut::Firsts(firsts))
}

/// A cut that follows from the pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Balance {
    /// Contiguous shards with equal work ([`even`]).
    Contiguous,
    /// Long documents are cut in zigzag, short ones stay whole ([`by_document`]).
    Documents,
}

impl Balance {
    /// The cut of a pattern.
    pub fn cut(self, pattern: &Pattern, shape: &Shape, ranks: usize) -> Result<Cut> {
        match self {
            Balance::Contiguous => even(pattern, shape, ranks),
            Balance::Documents => by_document(pattern, shape, ranks),
        }
    }
}

/// The largest share of a rank's work that one document gives it, unless all ranks share the
/// document.
const SHARE: f64 = 1.0 / 64.0;

/// Long documents are cut in zigzag: into 2k chunks, of which the a-th of k ranks gets chunks a and
/// 2k−1−a. k is the number of ranks for which the share of each is small, so that a plan has few
/// pairs of ranks; a short document goes whole to one. The longest come first, each to the ranks
/// with the least work. So ranks have about as many tokens as pairs, and a short document sends
/// nothing. Without documents this is zigzag.
pub fn by_document(pattern: &Pattern, shape: &Shape, ranks: usize) -> Result<Cut> {
    let Some(documents) = pattern.document_list() else {
        return Ok(Cut::Zigzag);
    };
    let lanes = pattern.lanes(shape);
    let pairs = PatternWork::new(pattern, &lanes, shape);
    let work = |document: &Range<usize>| {
        let own = pairs.before(document.end) - pairs.before(document.start);
        own + document.len() as u128
    };
    let most = (pairs.all() as f64 + shape.tokens as f64) / ranks as f64 * SHARE;
    let mut every: Vec<(u128, Range<usize>)> =
        documents.ranges().map(|of| (work(&of), of)).collect();
    every.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.start.cmp(&b.1.start)));
    let mut shards = vec![Vec::new(); ranks];
    let mut loads: BinaryHeap<Reverse<(u128, usize)>> =
        (0..ranks).map(|rank| Reverse((0, rank))).collect();
    for (own, document) in every {
        let wanted = (own as f64 / most).ceil() as usize;
        let sharing = wanted.min(document.len() / 2).clamp(1, ranks);
        let least = (0..sharing).filter_map(|_| loads.pop());
        let mut owners: Vec<(usize, u128)> = least.map(|Reverse((load, at))| (at, load)).collect();
        // Neighbouring chunks are on neighbouring ranks.
        owners.sort_unstable();
        for (at, &(rank, load)) in owners.iter().enumerate() {
            shards[rank].extend(zigzag_chunks(&document, at, sharing));
            loads.push(Reverse((load + own / sharing as u128, rank)));
        }
    }
    Ok(Cut::Ranges(TokenRanges::new(shards)))
}

/// The tokens that the `at`-th of `sharing` ranks has of a document.
fn zigzag_chunks(document: &Range<usize>, at: usize, sharing: usize) -> [Range<usize>; 2] {
    let chunks = 2 * sharing;
    let grid = match document.len() / chunks >= 16 * GRID {
        true => GRID,
        false => 1,
    };
    let cut = |chunk: usize| match chunk == chunks {
        true => document.end,
        false => document.start + document.len() * chunk / chunks / grid * grid,
    };
    let last = chunks - 1 - at;
    [cut(at)..cut(at + 1), cut(last)..cut(last + 1)]
}

/// The first token for which a monotone predicate holds.
fn first_token(tokens: usize, is: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, tokens);
    while low < high {
        let middle = low + (high - low) / 2;
        match is(middle) {
            true => high = middle,
            false => low = middle + 1,
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{GRID, by_document, by_speed, even};
    use crate::conformance::Random;
    use crate::mask::Window;
    use crate::pattern::Pattern;
    use crate::plan::{Plan, Request};
    use crate::shape::Shape;
    use crate::sharding::{Cut, Sharding};
    use crate::{DType, Documents};

    fn firsts(pattern: &Pattern, tokens: usize, speeds: &[f64]) -> Vec<usize> {
        let shape = Shape::new(1, tokens, 4, 2, 8).unwrap();
        match by_speed(pattern, &shape, speeds).unwrap() {
            Cut::Firsts(firsts) => firsts,
            cut => panic!("{cut:?}"),
        }
    }

    #[test]
    fn rows_are_proportional_to_speed() {
        assert_eq!(
            firsts(&Pattern::dense(), 700, &[2.0, 2.0, 1.0, 2.0]),
            [0, 200, 400, 500]
        );
        // Under a causal mask the first half of the work is the first 1/sqrt(2) of the rows.
        let causal = Pattern::dense().causal(true);
        assert_eq!(firsts(&causal, 10_000, &[1.0, 1.0]), [0, 7071]);
    }

    /// Documents of log-normal length, mean 2048 and sigma 1.2, up to `tokens`.
    fn log_normal(tokens: usize) -> Vec<usize> {
        let mut random = Random::new(25);
        let (mut lengths, mut left) = (Vec::new(), tokens);
        while left > 0 {
            // The sum of 12 uniform numbers is close to normal, with variance 12 / 3 on (-1, 1).
            let normal = (0..12).map(|_| random.unit()).sum::<f64>() / 2.0;
            let (sigma, mean) = (1.2f64, 2048f64);
            let length = (mean.ln() - sigma * sigma / 2.0 + sigma * normal).exp();
            lengths.push((length.ceil() as usize).clamp(1, left));
            left -= lengths[lengths.len() - 1];
        }
        lengths
    }

    #[test]
    fn packed_documents_are_cut_evenly_on_a_grid() {
        let tokens = 1 << 20;
        let documents = Documents::new(&log_normal(tokens)).unwrap();
        let window = Window {
            left: Some(4095),
            right: None,
        };
        let causal = Pattern::dense().causal(true);
        let packed = causal.clone().documents(Some(documents));
        let shape = Shape::new(1, tokens, 8, 8, 64).unwrap();
        for pattern in [packed.clone(), packed.window(window), causal] {
            let cut = even(&pattern, &shape, 8).unwrap();
            let Cut::Firsts(firsts) = &cut else {
                panic!("{cut:?}")
            };
            assert!(firsts.iter().all(|first| first.is_multiple_of(GRID)));
            let sharding = Sharding::new(8, cut).unwrap();
            let plan = Plan::new(Request::new(shape, pattern, sharding, DType::F32)).unwrap();
            let pairs: Vec<u128> = (0..8)
                .map(|rank| plan.rank(rank).unwrap().pairs())
                .collect();
            let mean = pairs.iter().sum::<u128>() as f64 / 8.0;
            let most = *pairs.iter().max().unwrap() as f64;
            assert!(most <= 1.03 * mean, "{:.4} of the mean", most / mean);
        }
    }

    #[test]
    fn short_documents_stay_whole_and_ranks_have_as_many_tokens_as_pairs() {
        let tokens = 1 << 20;
        let mut lengths = log_normal(tokens - 300_000);
        lengths.insert(lengths.len() / 2, 300_000);
        let documents = Documents::new(&lengths).unwrap();
        let pattern = Pattern::dense()
            .causal(true)
            .documents(Some(documents.clone()));
        let shape = Shape::new(1, tokens, 8, 8, 64).unwrap();
        let cut = by_document(&pattern, &shape, 8).unwrap();
        let sharding = Sharding::new(8, cut).unwrap();
        sharding.check(tokens).unwrap();
        let plan = Plan::new(Request::new(shape, pattern, sharding, DType::F32)).unwrap();
        // Only long documents are shared.
        let parcels = plan.rings().iter().flat_map(|ring| ring.parcels.iter());
        let sections = parcels.flatten().flat_map(|parcel| &parcel.sections);
        let shared: BTreeSet<usize> = sections.map(|section| section.segments.length).collect();
        assert!(shared.contains(&300_000));
        assert!(shared.first() > Some(&10_000), "{shared:?}");
        let explained = plan.explain().unwrap();
        let imbalance = explained.imbalance().unwrap();
        assert!(imbalance <= 1.03, "{imbalance:.4} of the mean's pairs");
        let rows = (0..8).map(|rank| plan.shards().rows(rank));
        let most = rows.max().unwrap() as f64 / (tokens / 8) as f64;
        assert!(most <= 1.1, "{most:.4} of the mean's tokens");
    }

    /// Long documents are many where all are of similar length; few ranks share each of them.
    #[test]
    fn few_pairs_of_ranks_share_documents() {
        let (documents, ranks) = (10_000, 64);
        let lengths: Vec<usize> = (0..documents).map(|i| 1 + i * 7919 % 401).collect();
        let tokens = lengths.iter().sum();
        let packed = Documents::new(&lengths).unwrap();
        let pattern = Pattern::dense()
            .causal(true)
            .documents(Some(packed.clone()));
        let shape = Shape::new(1, tokens, 1, 1, 8).unwrap();
        let cut = by_document(&pattern, &shape, ranks).unwrap();
        let Cut::Ranges(shards) = &cut else {
            panic!("{cut:?}")
        };
        let mut sharing = vec![BTreeSet::new(); documents];
        for rank in 0..ranks {
            for range in shards.of(rank) {
                // Adjacent ranges are joined.
                let mut token = range.start;
                while token < range.end {
                    let of = packed.of(token);
                    let at = packed.ranges().position(|other| other == of).unwrap();
                    sharing[at].insert(rank);
                    token = of.end;
                }
            }
        }
        let pairs: usize = sharing.iter().map(|of| of.len() * of.len()).sum();
        assert!(pairs <= documents + 128 * ranks * ranks, "{pairs} pairs");
        assert!(sharing.iter().any(|of| of.len() > 1));
        let sharding = Sharding::new(ranks, cut).unwrap();
        sharding.check(tokens).unwrap();
        let plan = Plan::new(Request::new(shape, pattern, sharding, DType::F32)).unwrap();
        let imbalance = plan.explain().unwrap().imbalance().unwrap();
        assert!(imbalance <= 1.03, "{imbalance:.4} of the mean's pairs");
    }

    #[test]
    fn a_rank_of_speed_zero_gets_no_tokens() {
        assert_eq!(firsts(&Pattern::dense(), 10, &[0.0, 1.0, 0.0]), [0, 0, 10]);
        assert_eq!(firsts(&Pattern::dense(), 10, &[1.0, 0.0, 1.0]), [0, 5, 5]);
        let shape = Shape::new(1, 8, 1, 1, 1).unwrap();
        for speeds in [&[0.0, 0.0][..], &[1.0, f64::NAN], &[-1.0], &[]] {
            assert!(by_speed(&Pattern::dense(), &shape, speeds).is_err());
        }
    }
}
