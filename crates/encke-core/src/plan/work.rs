//! The work of a pattern: how many (query, key) pairs its queries have, in closed form.
//!
//! Nothing here grows with the number of tokens; documents are summed once.

use std::ops::Range;

use crate::mask::Band;
use crate::pattern::{Lane, Pattern};
use crate::rows::Rows;
use crate::shape::Shape;

/// The work of some lanes of a pattern.
pub(super) struct PatternWork<'a> {
    pattern: &'a Pattern,
    lanes: &'a [Lane],
    tokens: usize,
    /// The positions of the queries.
    queries: Range<usize>,
    /// First token of each document, and the pairs of all queries before it.
    documents: Vec<(usize, u128)>,
}

impl<'a> PatternWork<'a> {
    pub fn new(pattern: &'a Pattern, lanes: &'a [Lane], shape: &Shape) -> PatternWork<'a> {
        let first_query = pattern.first_query(shape);
        let mut work = PatternWork {
            pattern,
            lanes,
            tokens: shape.tokens,
            queries: first_query..first_query + shape.queries,
            documents: Vec::new(),
        };
        let mut before = 0;
        match pattern.document_list() {
            None => work.documents.push((0, 0)),
            Some(documents) => {
                for document in documents.ranges() {
                    work.documents.push((document.start, before));
                    before += work.in_document(&document, document.len());
                }
            }
        }
        work
    }

    /// Pairs of all queries, for one batch entry.
    pub fn all(&self) -> u128 {
        self.before(self.tokens)
    }

    /// Pairs of the queries before `token`.
    pub fn before(&self, token: usize) -> u128 {
        let token = token.clamp(self.queries.start, self.queries.end);
        self.positions_before(token) - self.positions_before(self.queries.start)
    }

    /// Pairs of the positions before `token`, if there were a query at each.
    fn positions_before(&self, token: usize) -> u128 {
        let index = self.documents.partition_point(|(first, _)| *first < token);
        let Some(&(first, before)) = index.checked_sub(1).map(|at| &self.documents[at]) else {
            return 0;
        };
        let document = self.pattern.document_of(first, self.tokens);
        before + self.in_document(&document, token - first)
    }

    /// Pairs of the first `queries` queries of a document.
    pub fn in_document(&self, document: &Range<usize>, queries: usize) -> u128 {
        let of = |lane: &Lane| self.in_lane(lane, document.len(), queries);
        self.lanes.iter().map(of).sum()
    }

    /// Pairs of the first `queries` queries of a document of `length` tokens, in one lane.
    fn in_lane(&self, lane: &Lane, length: usize, queries: usize) -> u128 {
        let (w, prefix) = (lane.segment, self.pattern.effective_prefix());
        let (whole, rest) = (queries / w, queries % w);
        let of = |segment: usize, queries: usize| {
            let start = segment * w;
            let tokens = w.min(length - start);
            self.in_segment(lane, tokens, prefix.saturating_sub(start), queries)
        };
        let special = prefix.div_ceil(w).min(whole);
        let mut pairs: u128 = (0..special).map(|segment| of(segment, w)).sum();
        if special < whole {
            pairs += (whole - special) as u128 * of(special, w);
        }
        if rest > 0 {
            pairs += of(whole, rest);
        }
        pairs * lane.heads.len() as u128
    }

    /// Pairs of the queries before position `queries` in a segment of `tokens` tokens, of which the
    /// first `prefix` are visible outside the window.
    fn in_segment(&self, lane: &Lane, tokens: usize, prefix: usize, queries: usize) -> u128 {
        let rows = |below: usize| below.saturating_sub(lane.offset).div_ceil(lane.dilation);
        let all = Rows {
            count: rows(tokens),
            row: 0,
            row_step: 1,
            segment_step: 0,
            position: lane.offset,
            position_step: lane.dilation,
        };
        let (cut, queries) = (all.rows_before(prefix), rows(queries));
        let parts = [all.part(0..cut), all.part(cut..all.count)];
        let pairs = |keys: Rows| {
            let band = Band {
                query: all.position,
                query_step: all.position_step,
                key: keys.position,
                key_step: keys.position_step,
                window: self.pattern.window_of(&keys, prefix),
            };
            band.pairs(queries, keys.count)
        };
        match queries {
            0 => 0,
            _ => parts.into_iter().flatten().map(pairs).sum(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::PatternWork;
    use crate::conformance::random_pattern;
    use crate::shape::Shape;

    #[test]
    fn work_counts_the_pairs_of_the_pattern() {
        for seed in 0..300 {
            let tokens = 1 + seed as usize % 53;
            let shape = Shape::new(1, tokens, 4, 2, 8).unwrap();
            let queries = 1 + seed as usize % 7 * tokens / 7;
            let shape = shape.with_queries(queries).unwrap();
            let pattern = random_pattern(seed, &shape);
            let positions = tokens - queries..tokens;
            let lanes = pattern.lanes(&shape);
            let work = PatternWork::new(&pattern, &lanes, &shape);
            let mut expected = 0;
            for query in 0..tokens {
                assert_eq!(work.before(query), expected, "seed {seed}: {pattern:?}");
                let keys = (0..tokens).flat_map(|key| (0..4).map(move |head| (head, key)));
                let pairs = keys.map(|(head, key)| pattern.multiplicity(&shape, head, query, key));
                if positions.contains(&query) {
                    expected += pairs.map(|times| times as u128).sum::<u128>();
                }
            }
            assert_eq!(work.all(), expected, "seed {seed}: {pattern:?}");
        }
    }
}
