//! Masks of jobs: which keys each query row sees.
//!
//! The decision here: to every query the visible keys of a job are one range of key rows. A band
//! (causal masks, windows) moves with the position of the query; documents are bands of their own
//! over disjoint rows. Kernels need only the range, [`Job::visible`](crate::job::Job::visible).

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// How far a query sees, in positions; None without a limit (spec section 9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Window {
    /// Positions before the query's own.
    pub left: Option<usize>,
    /// Positions after the query's own.
    pub right: Option<usize>,
}

impl Window {
    /// Every key.
    pub const ALL: Window = Window {
        left: None,
        right: None,
    };
    /// The keys at or before the query.
    pub const CAUSAL: Window = Window {
        left: None,
        right: Some(0),
    };

    /// The keys that are in both windows.
    pub fn and(self, other: Window) -> Window {
        let least = |a: Option<usize>, b: Option<usize>| match (a, b) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        Window {
            left: least(self.left, other.left),
            right: least(self.right, other.right),
        }
    }

    /// The positions that queries at positions `first` to `last` see: from the first to one past
    /// the last.
    pub fn reach(self, first: usize, last: usize) -> Range<usize> {
        let start = self.left.map_or(0, |left| first.saturating_sub(left));
        let end = self.right.map_or(usize::MAX, |right| {
            last.saturating_add(right).saturating_add(1)
        });
        start..end
    }
}

/// A window over affine positions: query row i is at `query + i * query_step`, key row j at `key +
/// j * key_step`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Band {
    /// Position of the first query.
    pub query: usize,
    /// Step between the positions of consecutive queries.
    pub query_step: usize,
    /// Position of the first key.
    pub key: usize,
    /// Step between the positions of consecutive keys.
    pub key_step: usize,
    /// How far queries see.
    pub window: Window,
}

impl Band {
    /// A causal mask: (position, step) of the queries and of the keys.
    pub const fn causal(
        (query, query_step): (usize, usize),
        (key, key_step): (usize, usize),
    ) -> Band {
        Band {
            query,
            query_step,
            key,
            key_step,
            window: Window::CAUSAL,
        }
    }

    /// The rows of `keys` keys that query row `i` sees.
    #[inline]
    pub fn visible(&self, i: usize, keys: usize) -> Range<usize> {
        let position = self.query + i * self.query_step;
        let reach = self.window.reach(position, position);
        self.rows_before(reach.start, keys)..self.rows_before(reach.end, keys)
    }

    /// The distance between the positions of query row `i` and key row `j`.
    #[inline]
    pub fn distance(&self, i: usize, j: usize) -> usize {
        let (query, key) = (
            self.query + i * self.query_step,
            self.key + j * self.key_step,
        );
        query.abs_diff(key)
    }

    /// How many of `keys` keys have a position below `position`.
    #[inline]
    fn rows_before(&self, position: usize, keys: usize) -> usize {
        match position.checked_sub(self.key) {
            None | Some(0) => 0,
            // Most bands have step 1, and a division takes as long as the rest of this function.
            Some(above) if self.key_step == 1 => above.min(keys),
            Some(above) => above.div_ceil(self.key_step).min(keys),
        }
    }

    /// The number of visible pairs in closed form.
    pub fn pairs(&self, queries: usize, keys: usize) -> u128 {
        let lead = self.query as i128 - self.key as i128;
        let right = |by: usize| lead + by as i128;
        let before_end = match self.window.right {
            Some(by) => self.pairs_below(right(by), queries, keys),
            None => queries as u128 * keys as u128,
        };
        // Keys before the window: at most `left + 1` positions before the query.
        let before_start = match self.window.left {
            Some(by) => self.pairs_below(lead - by as i128 - 1, queries, keys),
            None => 0,
        };
        before_end - before_start
    }

    /// Pairs whose key is at most `lead + i * query_step` positions after the first key, for query
    /// row i.
    fn pairs_below(&self, lead: i128, queries: usize, keys: usize) -> u128 {
        let (step, count) = (self.query_step as i128, queries as i128);
        // Queries before `first` see nothing, those from `full` on see every key.
        let ahead = |position: i128| {
            let gap = (position - lead).max(0);
            ((gap + step - 1) / step).min(count)
        };
        let first = ahead(0);
        let full = ahead((keys as i128 - 1) * self.key_step as i128).max(first);
        let start = lead + first * step;
        let between = match full - first {
            0 => 0,
            rows => {
                let rows = rows as u128;
                floor_sum(rows, self.key_step as u128, step as u128, start as u128) + rows
            }
        };
        between + (count - full) as u128 * keys as u128
    }
}

/// Sum over i in 0..n of floor((a·i + b) / m).
fn floor_sum(mut n: u128, mut m: u128, mut a: u128, mut b: u128) -> u128 {
    let mut sum = 0;
    while n > 0 {
        sum += n * (n - 1) / 2 * (a / m) + n * (b / m);
        (a, b) = (a % m, b % m);
        let top = a * n + b;
        (n, b) = (top / m, top % m);
        (m, a) = (a, m);
        if m == 0 {
            break;
        }
    }
    sum
}

/// Query rows that see only some key rows: one document of a packed job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Piece {
    /// The query rows.
    pub queries: Range<usize>,
    /// The key rows.
    pub keys: Range<usize>,
    /// The mask, with positions of the piece's first query and first key; None if every query sees
    /// every key of the piece.
    pub band: Option<Band>,
}

impl Piece {
    /// The key rows that query row `i` of the job sees.
    #[inline]
    pub fn visible(&self, i: usize) -> Range<usize> {
        match &self.band {
            None => self.keys.clone(),
            Some(band) => {
                let rows = band.visible(i - self.queries.start, self.keys.len());
                self.keys.start + rows.start..self.keys.start + rows.end
            }
        }
    }

    /// The number of visible pairs.
    pub fn pairs(&self) -> u128 {
        let (queries, keys) = (self.queries.len(), self.keys.len());
        match &self.band {
            None => queries as u128 * keys as u128,
            Some(band) => band.pairs(queries, keys),
        }
    }
}

/// The piece that holds query row `i`, if any does.
#[inline]
fn piece_of(pieces: &[Piece], i: usize) -> Option<&Piece> {
    let after = pieces.partition_point(|piece| piece.queries.end <= i);
    pieces.get(after).filter(|piece| piece.queries.start <= i)
}

/// Which key rows each query row of a job sees, the same in every segment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mask {
    /// One band over all rows.
    Band(Band),
    /// Documents: their query rows are disjoint and ascending, and so are their key rows. A query
    /// row in none of them sees nothing.
    Documents(Arc<[Piece]>),
}

impl Mask {
    /// The rows of `keys` keys that query row `i` sees.
    #[inline]
    pub fn visible(&self, i: usize, keys: usize) -> Range<usize> {
        match self {
            Mask::Band(band) => band.visible(i, keys),
            Mask::Documents(pieces) => piece_of(pieces, i).map_or(0..0, |piece| piece.visible(i)),
        }
    }

    /// The distance between the positions of query row `i` and key row `j`, which it sees; None if
    /// the mask of that query has no positions.
    pub fn distance(&self, i: usize, j: usize) -> Option<usize> {
        match self {
            Mask::Band(band) => Some(band.distance(i, j)),
            Mask::Documents(pieces) => {
                let piece = piece_of(pieces, i)?;
                let band = piece.band.as_ref()?;
                Some(band.distance(i - piece.queries.start, j - piece.keys.start))
            }
        }
    }

    /// The number of visible pairs.
    pub fn pairs(&self, queries: usize, keys: usize) -> u128 {
        match self {
            Mask::Band(band) => band.pairs(queries, keys),
            Mask::Documents(pieces) => pieces.iter().map(Piece::pairs).sum(),
        }
    }

    /// The mask of query rows `rows`, counted from the first of them.
    pub fn of_queries(&self, rows: Range<usize>) -> Mask {
        match self {
            Mask::Band(band) => Mask::Band(Band {
                query: band.query + rows.start * band.query_step,
                ..*band
            }),
            Mask::Documents(pieces) => {
                let cut = |piece: &Piece| {
                    let start = piece.queries.start.max(rows.start);
                    let end = piece.queries.end.min(rows.end);
                    let skipped = start - piece.queries.start;
                    (start < end).then(|| Piece {
                        queries: start - rows.start..end - rows.start,
                        keys: piece.keys.clone(),
                        band: piece.band.map(|band| Band {
                            query: band.query + skipped * band.query_step,
                            ..band
                        }),
                    })
                };
                Mask::Documents(pieces.iter().filter_map(cut).collect())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::Random;

    #[test]
    fn a_band_shows_the_keys_within_its_window() {
        for seed in 0..4000 {
            let mut random = Random::new(seed);
            let mut limit = || match random.below(3) {
                0 => None,
                _ => Some(random.below(12)),
            };
            let window = Window {
                left: limit(),
                right: limit(),
            };
            let (queries, keys) = (1 + random.below(9), 1 + random.below(9));
            let band = Band {
                query: random.below(20),
                query_step: 1 + random.below(3),
                key: random.below(20),
                key_step: 1 + random.below(3),
                window,
            };
            let mut pairs = 0;
            for i in 0..queries {
                let x = band.query + i * band.query_step;
                let sees = |j: &usize| {
                    let y = band.key + j * band.key_step;
                    window.left.is_none_or(|left| x <= y + left)
                        && window.right.is_none_or(|right| y <= x + right)
                };
                let expected: Vec<usize> = (0..keys).filter(sees).collect();
                let got: Vec<usize> = band.visible(i, keys).collect();
                assert_eq!(got, expected, "seed {seed}, query {i}: {band:?}");
                pairs += expected.len() as u128;
            }
            assert_eq!(band.pairs(queries, keys), pairs, "seed {seed}: {band:?}");
        }
    }

    #[test]
    fn documents_show_each_query_its_own_piece() {
        let causal = Band::causal((0, 1), (0, 1));
        let piece = |queries: Range<usize>, keys: Range<usize>, band| Piece {
            queries,
            keys,
            band,
        };
        let mask = Mask::Documents(
            [
                piece(0..3, 2..5, Some(causal)),
                piece(4..6, 5..9, None),
                piece(6..8, 9..11, Some(causal)),
            ]
            .into(),
        );
        let visible = |mask: &Mask, i: usize| mask.visible(i, 11);
        let expected = [2..3, 2..4, 2..5, 0..0, 5..9, 5..9, 9..10, 9..11];
        for (i, expected) in expected.iter().enumerate() {
            assert_eq!(visible(&mask, i), *expected, "query {i}");
        }
        assert_eq!(mask.pairs(8, 11), 6 + 8 + 3);
        let part = mask.of_queries(1..7);
        for i in 0..6 {
            assert_eq!(visible(&part, i), expected[i + 1], "query {i} of the part");
        }
    }
}
