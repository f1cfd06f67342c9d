//! Whether the rows of an operand overlap.
//!
//! Kernels write the rows of a job from several threads, so no two of them may share an element.
//! The decision here: strides and heads alone decide, in time that does not depend on the number of
//! rows. Some operands without overlap are not recognised: plans do not join such jobs.

use crate::job::{Job, Operand};

/// A stride, and how many steps of it there are.
type Steps = (usize, usize);

impl Job {
    /// Whether no two rows of what a kernel writes can overlap: cells, dq, and dk and dv.
    pub fn writes_apart(&self) -> bool {
        let [queries, keys] =
            [self.queries, self.keys].map(|rows| [self.batch, self.segments, rows]);
        let dq = self.dq.as_ref().unwrap_or(&self.q);
        self.cells.is_apart(queries, 1, false)
            && dq.is_apart(queries, self.dim, false)
            && self.k.is_apart(keys, self.dim, true)
    }
}

impl Operand {
    /// Whether no two rows can overlap, for every (batch, segment, row, head) of the given counts
    /// and rows of `width` elements.
    ///
    /// Heads at the same address overlap, unless they are `grouped`: then one task has all of them.
    pub fn is_apart(&self, counts: [usize; 3], width: usize, grouped: bool) -> bool {
        let strides = [self.batch, self.segment, self.row].into_iter();
        let mut strides: Vec<Steps> = strides.zip(counts).filter(|of| of.1 > 1).collect();
        strides.sort_unstable();
        let mut heads = self.heads.to_vec();
        heads.sort_unstable();
        if grouped {
            heads.dedup();
        }
        are_apart(&heads, &strides, width) || are_apart_in_columns(heads, strides, width)
    }
}

/// The distance of the first and the last step.
fn extent((stride, count): &Steps) -> usize {
    stride.saturating_mul(count - 1)
}

/// The smallest gap between heads, and the distance of the first and the last.
fn gap_and_extent(heads: &[usize]) -> Option<(usize, usize)> {
    let gaps = heads.windows(2).map(|pair| pair[1] - pair[0]);
    Some((gaps.min()?, heads.last()? - heads.first()?))
}

/// Whether every dimension is farther apart than the smaller ones reach.
fn are_apart(heads: &[usize], strides: &[Steps], width: usize) -> bool {
    let mut extents: Vec<(usize, usize)> = strides.iter().map(|of| (of.0, extent(of))).collect();
    extents.extend(gap_and_extent(heads));
    extents.sort_unstable();
    let mut reach = width;
    extents.into_iter().all(|(distance, extent)| {
        let apart = distance >= reach;
        reach = reach.saturating_add(extent);
        apart
    })
}

/// The same for heads that begin in rows of their own. Strides (in ascending order) that are longer
/// than all the rest reaches are left out; modulo the common divisor of the others, heads of
/// different columns never meet, and those of one column are apart.
fn are_apart_in_columns(mut heads: Vec<usize>, mut strides: Vec<Steps>, width: usize) -> bool {
    let reach_of_heads = width + gap_and_extent(&heads).map_or(0, |of| of.1);
    while let Some(((longest, _), rest)) = strides.split_last() {
        let reach = rest
            .iter()
            .map(extent)
            .fold(reach_of_heads, usize::saturating_add);
        if *longest < reach {
            break;
        }
        strides.pop();
    }
    let column = strides.iter().map(|of| of.0).fold(0, common_divisor);
    if column == 0 {
        return are_apart(&heads, &strides, width);
    }
    heads.sort_unstable_by_key(|head| (head % column, *head));
    let columns: Vec<&[usize]> = heads.chunk_by(|a, b| a % column == b % column).collect();
    let begins: Vec<usize> = columns.iter().map(|of| of[0] % column).collect();
    let around = begins.first().map(|first| first + column);
    let next = begins.iter().copied().skip(1).chain(around);
    begins
        .iter()
        .zip(next)
        .all(|(own, next)| next - own >= width)
        && columns
            .iter()
            .all(|heads| are_apart(heads, &strides, width))
}

fn common_divisor(a: usize, b: usize) -> usize {
    let (mut a, mut b) = (a, b);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn rows_that_are_apart_share_no_element(
            strides in [0..40_usize, 0..40_usize, 0..12_usize],
            counts in [1..4_usize, 1..4_usize, 1..5_usize],
            heads in prop::collection::vec(0..30_usize, 1..5),
            width in 1..4_usize,
            grouped in any::<bool>(),
        ) {
            let of = operand(strides[0], strides[1], strides[2], &heads);
            if !of.is_apart(counts, width, grouped) {
                return Ok(());
            }
            let heads: Vec<usize> = match grouped {
                true => heads.into_iter().collect::<BTreeSet<_>>().into_iter().collect(),
                false => heads,
            };
            let mut elements = BTreeSet::new();
            for b in 0..counts[0] {
                for s in 0..counts[1] {
                    for row in 0..counts[2] {
                        for head in &heads {
                            let at = b * strides[0] + s * strides[1] + row * strides[2] + head;
                            for element in at..at + width {
                                prop_assert!(elements.insert(element), "{of:?} meets at {element}");
                            }
                        }
                    }
                }
            }
        }
    }

    fn operand(batch: usize, segment: usize, row: usize, heads: &[usize]) -> Operand {
        Operand {
            offset: 0,
            batch,
            segment,
            row,
            heads: heads.into(),
        }
    }

    #[test]
    fn rows_that_could_overlap_are_found() {
        // Two heads of width 4, rows of 8, segments of 10 rows, a batch of 100 rows.
        let good = operand(800, 80, 8, &[4, 0]);
        assert!(good.is_apart([2, 10, 10], 4, false));
        assert!(
            !good.is_apart([2, 10, 11], 4, false),
            "a segment longer than its stride"
        );
        assert!(
            !good.is_apart([2, 11, 10], 4, false),
            "more segments than the batch has"
        );
        assert!(
            !good.is_apart([2, 10, 10], 5, false),
            "heads wider than their distance"
        );
        assert!(
            !operand(800, 80, 7, &[0, 4]).is_apart([1, 1, 2], 4, false),
            "rows too close"
        );
        assert!(
            operand(0, 0, 0, &[0, 4]).is_apart([1, 1, 1], 4, false),
            "a single row"
        );
        // Heads of four phases, two to a row of 8, in rows four apart; and packed, phase after
        // phase.
        let phases = [0, 8, 16, 24].map(|token| [token, token + 4]);
        let phases = operand(0, 0, 32, phases.as_flattened());
        assert!(phases.is_apart([1, 1, 9], 4, false));
        let packed = [0, 72, 144].map(|section| [section, section + 4]);
        let packed = operand(0, 0, 8, packed.as_flattened());
        assert!(packed.is_apart([1, 1, 9], 4, false));
        assert!(
            !packed.is_apart([1, 1, 10], 4, false),
            "a section that reaches into the next one"
        );
        // Heads that begin in other rows, farther than the rows are apart.
        let shifted = operand(0, 0, 16, &[0, 36, 72]);
        assert!(shifted.is_apart([1, 1, 9], 4, false));
        assert!(!shifted.is_apart([1, 1, 9], 5, false));
        // Heads of one column in every other row, and batch entries of an odd number of rows.
        let odd = operand(13, 0, 2, &[0, 3]);
        assert!(odd.is_apart([2, 1, 5], 1, true));
        assert!(
            !odd.is_apart([2, 1, 6], 1, true),
            "it reaches into the next entry"
        );
        // Heads at one address are one row: fine for one task, a race for two.
        let twice = operand(0, 0, 8, &[0, 0, 4]);
        assert!(twice.is_apart([1, 1, 3], 4, true));
        assert!(!twice.is_apart([1, 1, 3], 4, false));
    }
}
