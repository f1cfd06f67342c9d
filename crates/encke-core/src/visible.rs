//! The keys of one query, as runs of tokens: what a heat map of one row needs.

use std::ops::Range;

use crate::pattern::Pattern;
use crate::shape::Shape;
use crate::sharding::Run;

impl Pattern {
    /// The keys that the query of `head` at position `x` sees, branch by branch; a key that several
    /// branches see is in several runs.
    pub fn visible(&self, shape: &Shape, head: usize, x: usize) -> Vec<Run> {
        let mut runs = Vec::new();
        let document = self.document_of(x, shape.tokens);
        let at = x - document.start;
        for (index, branch) in self.branches().iter().enumerate() {
            let heads = self.heads_of(index, shape.heads);
            let Some(&(_, offset)) = heads.iter().find(|(other, _)| *other == head) else {
                continue;
            };
            let segment = branch.segment.min(document.len());
            let start = at / segment * segment;
            if (at - start) % branch.dilation != offset {
                continue;
            }
            let end = (start + segment).min(document.len());
            let index_set = Run {
                first: document.start + start + offset,
                stride: branch.dilation,
                count: (end - start - offset).div_ceil(branch.dilation),
            };
            let parts = self.reach(document.start, x);
            runs.extend(parts.iter().filter_map(|part| index_set.within(part)));
        }
        runs
    }

    /// The positions that a query at position `x` sees in a document that begins at `first`: those
    /// in the window, and those of the prefix before and after it.
    fn reach(&self, first: usize, x: usize) -> [Range<usize>; 3] {
        let window = self.effective_window().reach(x, x);
        let shown = self.prefix_window().reach(x, x);
        let end = shown.end.min(first + self.effective_prefix());
        [
            first..end.min(window.start),
            first.max(window.end)..end,
            window,
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::random_pattern;

    #[test]
    fn visible_keys_are_those_of_the_definition() {
        for seed in 0..60 {
            let shape = Shape::new(1, 40, 3, 3, 2).unwrap();
            let pattern = random_pattern(seed, &shape);
            for (head, x) in (0..3).flat_map(|head| (0..40).map(move |x| (head, x))) {
                let mut seen = [0; 40];
                for run in pattern.visible(&shape, head, x) {
                    run.tokens().for_each(|token| seen[token] += 1);
                }
                let expected = |k: usize| pattern.multiplicity(&shape, head, x, k);
                assert_eq!(seen.to_vec(), (0..40).map(expected).collect::<Vec<_>>());
            }
        }
    }
}
