//! The attention mask as cells: the whole sequence, and its first tokens.
//!
//! The decision here: nothing is sampled. For the first tokens, a cell is one (query, key) pair
//! with its multiplicity in the pattern; for the whole sequence, a cell is the exact fraction of
//! its pairs, counted query by query: the keys of one are a few runs, whatever the mask is.

use std::collections::BTreeMap;

use encke::plan::Plan;
use encke::{Pattern, Request, Shape};

/// The most tokens shown pair by pair.
const CLOSE: usize = 64;
/// The most cells along an edge of the whole sequence.
const CELLS: usize = 96;
/// The most kinds of heads shown.
const KINDS: usize = 3;

/// The attention mask of a pattern.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Picture {
    /// The whole sequence, all heads together; `None` if the first tokens are all tokens.
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
    /// Of each cell, the fraction of its (head, query, key) that are attended; pairs of several
    /// branches count several times.
    pub fractions: Vec<f64>,
}

/// The first tokens of heads with the same mask.
#[derive(Debug, Clone, PartialEq)]
pub struct Close {
    /// The heads.
    pub heads: Vec<usize>,
    /// Tokens along an edge.
    pub tokens: usize,
    /// Of each (query, key), the number of branches that contain it.
    pub multiplicity: Vec<usize>,
}

impl Picture {
    /// The mask of a plan's pattern.
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
            whole: (shape.tokens > CLOSE).then(|| Whole::new(request, &kinds)),
            more_kinds: kinds.len().saturating_sub(KINDS),
        }
    }

    /// The largest multiplicity of the first tokens.
    pub fn most(&self) -> usize {
        let cells = self.close.iter().flat_map(|close| &close.multiplicity);
        cells.copied().max().unwrap_or(0)
    }
}

/// Groups of heads with the same mask, in the order of their first head.
fn kinds(plan: &Plan) -> Vec<Vec<usize>> {
    let mut branches: Vec<Vec<(usize, usize)>> = vec![Vec::new(); plan.request().shape.heads];
    for lane in plan.lanes() {
        for head in &lane.heads {
            branches[head.head].push((lane.branch, lane.offset));
        }
    }
    let mut kinds: BTreeMap<&[(usize, usize)], Vec<usize>> = BTreeMap::new();
    for (head, branches) in branches.iter().enumerate() {
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
    fn new(request: &Request, kinds: &[Vec<usize>]) -> Whole {
        let (shape, pattern) = (&request.shape, &request.pattern);
        let tokens = shape.tokens;
        let side = tokens.min(CELLS);
        let edge = |cell: usize| (cell as u128 * tokens as u128 / side as u128) as usize;
        // The last cell that begins at or before a token.
        let cell_of = |token: usize| {
            ((token as u128 + 1) * side as u128).div_ceil(tokens as u128) as usize - 1
        };
        let mut pairs = vec![0; side * side];
        for heads in kinds {
            for row in 0..side {
                let seen = |query: usize| pattern.visible(shape, heads[0], query);
                for run in (edge(row)..edge(row + 1)).flat_map(seen) {
                    for column in cell_of(run.first)..=cell_of(run.end() - 1) {
                        let keys = run.within(&(edge(column)..edge(column + 1)));
                        let count = keys.map_or(0, |keys| keys.count);
                        pairs[row * side + column] += (count * heads.len()) as u64;
                    }
                }
            }
        }
        let fraction = |(cell, attended): (usize, u64)| {
            let width = |cell: usize| edge(cell + 1) - edge(cell);
            let all = width(cell / side) * width(cell % side) * shape.heads;
            attended as f64 / all as f64
        };
        Whole {
            tokens,
            side,
            fractions: pairs.into_iter().enumerate().map(fraction).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{CLOSE, Picture};
    use encke::conformance::{Random, random_mask};
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

    /// The runs of keys agree with a count of all pairs, for random patterns and masks.
    #[test]
    fn fractions_of_the_whole_agree_with_a_count_of_all_pairs() {
        let mut random = Random::new(5);
        for _ in 0..24 {
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
            let pattern = random_mask(&mut random, pattern, tokens);
            let whole = picture(shape, &pattern).whole.unwrap();
            let edge = |cell: usize| cell * tokens / whole.side;
            for cell in 0..whole.side * whole.side {
                let (row, column) = (cell / whole.side, cell % whole.side);
                let (queries, keys) = (edge(row)..edge(row + 1), edge(column)..edge(column + 1));
                let all = heads * queries.len() * keys.len();
                let attended: usize = (0..heads)
                    .flat_map(|head| queries.clone().map(move |q| (head, q)))
                    .flat_map(|(head, q)| keys.clone().map(move |k| (head, q, k)))
                    .map(|(head, q, k)| pattern.multiplicity(&shape, head, q, k))
                    .sum();
                assert_eq!(
                    whole.fractions[cell],
                    attended as f64 / all as f64,
                    "{pattern:?} {cell}"
                );
            }
        }
    }

    #[test]
    fn heads_with_the_same_mask_share_a_panel() {
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
        assert_eq!(picture.whole, None, "32 tokens are shown pair by pair");
        assert_eq!(picture.more_kinds, 0);
        assert_eq!(picture.most(), 1);
    }

    #[test]
    fn a_million_tokens_are_counted() {
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
        assert!(whole.fractions[0] > whole.fractions[whole.side * (whole.side - 1)]);
        assert_eq!(whole.fractions[1], 0.0, "no query attends to later keys");
    }
}
