//! Which query sees which key, as cells: the whole sequence from afar, its beginning from close up.
//!
//! The decision here: nothing is sampled. From close up, a cell is one (query, key) pair and its
//! number is the pattern's own multiplicity; from afar, a cell is the exact count of the pairs in
//! it, which an index set that is a congruence gives without visiting them.

use std::collections::BTreeMap;
use std::ops::Range;

use encke::plan::Plan;
use encke::{Pattern, Shape};

/// Tokens seen from close up.
const CLOSE: usize = 64;
/// Cells along an edge of the whole.
const CELLS: usize = 96;
/// Kinds of heads seen from close up.
const KINDS: usize = 3;

/// The pattern as numbers in cells.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Picture {
    /// The whole sequence, all heads together; nothing where close up is already everything.
    pub whole: Option<Whole>,
    /// The first tokens, for each kind of head.
    pub close: Vec<Close>,
    /// Kinds of heads that are not shown.
    pub more_kinds: usize,
}

/// The whole sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Whole {
    /// Tokens of the sequence.
    pub tokens: usize,
    /// Cells along an edge.
    pub side: usize,
    /// Of each cell, the share of its (head, query, key) that are seen; pairs that several
    /// branches see count as often.
    pub shares: Vec<f64>,
}

/// The first tokens, as heads of one kind see them.
#[derive(Debug, Clone, PartialEq)]
pub struct Close {
    /// The heads.
    pub heads: Vec<usize>,
    /// Tokens along an edge.
    pub tokens: usize,
    /// Of each (query, key), in how many branches the one sees the other.
    pub multiplicity: Vec<usize>,
}

impl Picture {
    /// The picture of a plan's pattern.
    pub fn new(plan: &Plan) -> Picture {
        let request = plan.request();
        let (shape, pattern) = (&request.shape, &request.pattern);
        let kinds = kinds(plan);
        let close = kinds
            .iter()
            .take(KINDS)
            .map(|heads| Close::new(pattern, shape, heads));
        Picture {
            close: close.collect(),
            whole: (shape.tokens > CLOSE).then(|| Whole::new(plan)),
            more_kinds: kinds.len().saturating_sub(KINDS),
        }
    }

    /// The largest multiplicity from close up.
    pub fn most(&self) -> usize {
        let cells = self.close.iter().flat_map(|close| &close.multiplicity);
        cells.copied().max().unwrap_or(0)
    }
}

/// Heads that see the same keys, in the order of their first head.
fn kinds(plan: &Plan) -> Vec<Vec<usize>> {
    let mut seen: Vec<Vec<(usize, usize)>> = vec![Vec::new(); plan.request().shape.heads];
    for lane in plan.lanes() {
        for head in &lane.heads {
            seen[head.head].push((lane.branch, lane.offset));
        }
    }
    let mut kinds: BTreeMap<&[(usize, usize)], Vec<usize>> = BTreeMap::new();
    for (head, branches) in seen.iter().enumerate() {
        kinds.entry(branches).or_default().push(head);
    }
    let mut kinds: Vec<Vec<usize>> = kinds.into_values().collect();
    kinds.sort();
    kinds
}

impl Close {
    fn new(pattern: &Pattern, shape: &Shape, heads: &[usize]) -> Close {
        let tokens = shape.tokens.min(CLOSE);
        let head = heads[0];
        let pairs = (0..tokens * tokens).map(|pair| (pair / tokens, pair % tokens));
        Close {
            heads: heads.to_vec(),
            tokens,
            multiplicity: pairs
                .map(|(q, k)| pattern.multiplicity(shape, head, q, k))
                .collect(),
        }
    }
}

impl Whole {
    fn new(plan: &Plan) -> Whole {
        let request = plan.request();
        let (tokens, heads) = (request.shape.tokens, request.shape.heads);
        let side = tokens.min(CELLS);
        let edge = |cell: usize| (cell as u128 * tokens as u128 / side as u128) as usize;
        let causal = request.pattern.is_causal();
        let shares = (0..side * side).map(|cell| {
            let (row, column) = (cell / side, cell % side);
            let queries = edge(row)..edge(row + 1);
            let keys = edge(column)..edge(column + 1);
            let all = (queries.len() * keys.len() * heads) as f64;
            let seen = plan.lanes().iter().map(|lane| {
                let set = IndexSet {
                    segment: lane.segment,
                    dilation: lane.dilation,
                    offset: lane.offset,
                };
                set.pairs(queries.clone(), keys.clone(), causal) * lane.heads.len() as u128
            });
            seen.sum::<u128>() as f64 / all
        });
        Whole {
            tokens,
            side,
            shares: shares.collect(),
        }
    }
}

/// The tokens that take part in one lane.
#[derive(Debug, Clone, Copy)]
struct IndexSet {
    segment: usize,
    dilation: usize,
    offset: usize,
}

impl IndexSet {
    /// Pairs of a query and a key that share a segment and take part.
    fn pairs(&self, queries: Range<usize>, keys: Range<usize>, causal: bool) -> u128 {
        if causal && keys.start >= queries.end {
            return 0;
        }
        let first = queries.start.max(keys.start) / self.segment;
        let last = (queries.end.min(keys.end) - 1) / self.segment;
        let pairs = (first..=last).map(|segment| {
            let (start, end) = (
                segment * self.segment,
                (segment + 1).saturating_mul(self.segment),
            );
            let within = |range: &Range<usize>| range.start.max(start)..range.end.min(end);
            let (queries, keys) = (within(&queries), within(&keys));
            let taking_part = |range: &Range<usize>| self.rows(range, start);
            if queries.is_empty() || keys.is_empty() {
                0
            } else if !causal || keys.end <= queries.start + 1 {
                taking_part(&queries) as u128 * taking_part(&keys) as u128
            } else {
                let each = queries.filter(|query| (query - start) % self.dilation == self.offset);
                let seen =
                    each.map(|query| self.rows(&(keys.start..keys.end.min(query + 1)), start));
                seen.map(|count| count as u128).sum()
            }
        });
        pairs.sum()
    }

    /// How many tokens of a range inside the segment that begins at `start` take part.
    fn rows(&self, range: &Range<usize>, start: usize) -> usize {
        let below = |end: usize| {
            (end - start)
                .saturating_sub(self.offset)
                .div_ceil(self.dilation)
        };
        if range.is_empty() {
            return 0;
        }
        below(range.end) - below(range.start)
    }
}

#[cfg(test)]
mod tests {
    use super::{CLOSE, Picture};
    use encke::conformance::Random;
    use encke::{
        Attention, DType, GroupScale, MixingGradient, Mode, OffsetRule, Pass, Pattern, Shape,
    };

    fn picture(shape: Shape, pattern: &Pattern) -> Picture {
        let attention = Attention::builder()
            .pattern(pattern.clone())
            .build()
            .unwrap();
        Picture::new(&attention.plan(shape, DType::F32, Pass::Forward).unwrap())
    }

    /// The counts from afar are those of the pattern's own definition, for any pattern.
    #[test]
    fn the_whole_counts_what_the_pattern_says() {
        let mut random = Random::new(5);
        for _ in 0..12 {
            let tokens = CLOSE + 1 + random.below(90);
            let heads = 1 + random.below(3);
            let shape = Shape::new(1, tokens, heads, 1, 4).unwrap();
            let mode = Mode::Mix {
                offsets: OffsetRule::HeadMod,
                gradient: MixingGradient::Exact,
            };
            let (segments, dilations) = (
                [random.size(tokens), random.size(2 * tokens)],
                [random.size(9), random.size(9)],
            );
            let pattern = Pattern::dilated(&segments, &dilations, mode).unwrap();
            let pattern = pattern.causal(random.once_in(2));
            let whole = picture(shape, &pattern).whole.unwrap();
            let edge = |cell: usize| cell * tokens / whole.side;
            for cell in 0..whole.side * whole.side {
                let (row, column) = (cell / whole.side, cell % whole.side);
                let (queries, keys) = (edge(row)..edge(row + 1), edge(column)..edge(column + 1));
                let all = heads * queries.len() * keys.len();
                let seen: usize = (0..heads)
                    .flat_map(|head| queries.clone().map(move |q| (head, q)))
                    .flat_map(|(head, q)| keys.clone().map(move |k| (head, q, k)))
                    .map(|(head, q, k)| pattern.multiplicity(&shape, head, q, k))
                    .sum();
                assert_eq!(
                    whole.shares[cell],
                    seen as f64 / all as f64,
                    "{pattern:?} {cell}"
                );
            }
        }
    }

    #[test]
    fn heads_that_see_the_same_share_a_picture() {
        let group = Mode::Group {
            scale: GroupScale::One,
        };
        let pattern = Pattern::dilated(&[8, 16], &[1, 2], group).unwrap();
        let picture = picture(Shape::new(1, 32, 4, 4, 4).unwrap(), &pattern);
        let heads: Vec<_> = picture
            .close
            .iter()
            .map(|close| close.heads.clone())
            .collect();
        assert_eq!(heads, [[0, 1], [2, 3]]);
        assert_eq!(picture.whole, None, "32 tokens fit from close up");
        assert_eq!(picture.more_kinds, 0);
        assert_eq!(picture.most(), 1);
    }

    #[test]
    fn a_million_tokens_are_no_harder() {
        let pattern = Pattern::dilated(
            &[2048, 1 << 20],
            &[1, 512],
            Mode::Mix {
                offsets: OffsetRule::HeadMod,
                gradient: MixingGradient::Exact,
            },
        );
        let shape = Shape::new(1, 1 << 20, 8, 2, 64).unwrap();
        let picture = picture(shape, &pattern.unwrap().causal(true));
        assert_eq!(picture.close.len() + picture.more_kinds, 8);
        let whole = picture.whole.unwrap();
        assert!(whole.shares[0] > whole.shares[whole.side * (whole.side - 1)]);
        assert_eq!(whole.shares[1], 0.0, "nobody sees the future");
    }
}
