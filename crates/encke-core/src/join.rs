//! Joining adjacent jobs and blocks, and splitting jobs.
//!
//! A rank's tokens are up to two runs, so its work comes as several jobs: a zigzag shard attended
//! to itself is two triangles and a square. The runs are adjacent in memory, in token order, so the
//! three together are one causal attention. Joining does not change what is computed: the joined
//! job has exactly the pairs of its parts. It is larger, which kernels run more efficiently, and
//! reads and writes its carry once.

use crate::job::{Band, Block, Job, Mask, Operand};

/// A job is split at a multiple of this many query rows: the size of the smallest kernel tile.
const BLOCK: usize = 16;

impl Block {
    /// The same copy in as few contiguous pieces as possible: heads that are adjacent on both sides
    /// become one, and so do rows, segments and batch entries.
    pub fn coalesced(&self) -> Block {
        let mut block = self.clone();
        let adjacent = |of: &Operand| {
            let mut each = of.heads.iter().enumerate();
            each.all(|(head, &at)| at == of.heads[0] + head * self.width)
        };
        if block.heads == 0 || !adjacent(&block.from) || !adjacent(&block.to) {
            return block;
        }
        for of in [&mut block.from, &mut block.to] {
            of.offset += of.heads[0];
            of.heads = [0].into();
        }
        block.width *= std::mem::replace(&mut block.heads, 1);
        let Block {
            batch,
            segments,
            rows,
            width,
            from,
            to,
            ..
        } = &mut block;
        let levels = [
            (rows, [from.row, to.row]),
            (segments, [from.segment, to.segment]),
            (batch, [from.batch, to.batch]),
        ];
        for (count, strides) in levels {
            match *count == 1 || strides == [*width; 2] {
                true => *width *= std::mem::replace(count, 1),
                false => break,
            }
        }
        block
    }

    /// Joins this block with one whose rows follow on both sides; None if they do not follow.
    pub fn join_rows(&self, next: &Block) -> Option<Block> {
        let follows = |a: &Operand, b: &Operand| {
            (a.row, &a.heads) == (b.row, &b.heads)
                && (self.batch == 1 || a.batch == b.batch)
                && (self.segments == 1 || a.segment == b.segment)
                && b.offset == a.offset + self.rows * a.row
        };
        let shape = |of: &Block| (of.batch, of.segments, of.heads, of.width);
        let joined = shape(self) == shape(next)
            && follows(&self.from, &next.from)
            && follows(&self.to, &next.to);
        joined.then(|| Block {
            rows: self.rows + next.rows,
            ..self.clone()
        })
    }
}

impl Job {
    /// The two halves of its queries; None if the job is too small to split.
    pub fn halves(&self) -> Option<(Job, Job)> {
        let first = self.queries.div_ceil(2).next_multiple_of(BLOCK);
        if first >= self.queries {
            return None;
        }
        let keys = match &self.mask {
            // The last query sees the last keys.
            Some(Mask::Band(_)) => self.visible(first - 1).end.max(1),
            _ => self.keys,
        };
        let low = Job {
            keys,
            ..self.of_queries(0..first)
        };
        let high = self.of_queries(first..self.queries);
        Some((low, high))
    }

    /// Joins this job with one on the same queries whose keys follow in memory; None if they cannot
    /// be joined.
    pub fn join_keys(&self, next: &Job) -> Option<Job> {
        let same_queries = self.queries == next.queries
            && self.same(&self.q, &next.q, self.queries)
            && self.same(&self.cells, &next.cells, self.queries)
            && self.same_option([&self.delta, &next.delta], 0)
            && self.same_option([&self.dq, &next.dq], 0);
        let adjacent = self.is_like(next)
            && same_queries
            && self.follows(&self.k, self.keys, &next.k)
            && !self.hides();
        if !adjacent {
            return None;
        }
        let mask = match next.hides() {
            false => None,
            true => {
                let mask = next.causal()?;
                // In the joined mask every query sees all of this job's keys only if the first
                // query's position is at most one key step before the next job's first key.
                (mask.query + mask.key_step >= mask.key).then_some(())?;
                let ahead = self.keys * mask.key_step;
                Some(Mask::Band(Band {
                    query: mask.query + ahead,
                    ..mask
                }))
            }
        };
        Some(Job {
            keys: self.keys + next.keys,
            k: self.k_of(next),
            mask,
            ..self.clone()
        })
    }

    /// Joins this job with one whose queries follow in memory and whose keys begin with the same
    /// one; None if they cannot be joined.
    pub fn join_queries(&self, next: &Job) -> Option<Job> {
        let keys = self.keys.max(next.keys);
        let adjacent = self.is_like(next)
            && self.same(&self.k, &next.k, keys)
            && self.follows(&self.q, self.queries, &next.q)
            && self.follows(&self.cells, self.queries, &next.cells)
            && self.same_option([&self.delta, &next.delta], self.queries)
            && self.same_option([&self.dq, &next.dq], self.queries);
        if !adjacent {
            return None;
        }
        let mask = match self.hides() {
            false => {
                (self.keys == next.keys && !next.hides()).then_some(())?;
                None
            }
            true => {
                let mask = self.causal()?;
                self.mask_extends_to(&mask, next)?.then_some(())?;
                Some(Mask::Band(mask))
            }
        };
        let widest = if next.keys > self.keys { next } else { self };
        let rows_of_option = |[own, next]: [&Option<Operand>; 2]| {
            let both = own.as_ref().zip(next.as_ref());
            both.map(|(own, next)| self.rows_of(own, next, self.queries))
        };
        Some(Job {
            queries: self.queries + next.queries,
            keys,
            q: self.rows_of(&self.q, &next.q, self.queries),
            cells: self.rows_of(&self.cells, &next.cells, self.queries),
            delta: rows_of_option([&self.delta, &next.delta]),
            dq: rows_of_option([&self.dq, &next.dq]),
            k: widest.k.clone(),
            mask,
            ..self.clone()
        })
    }

    /// Whether this job's mask, extended to the keys and queries of both jobs, leaves the visible
    /// keys of all queries unchanged; None if the next job has another kind of mask.
    fn mask_extends_to(&self, mask: &Band, next: &Job) -> Option<bool> {
        let longer = Job {
            queries: self.queries + next.queries,
            keys: self.keys.max(next.keys),
            ..self.clone()
        };
        let own_unchanged = next.keys <= self.keys || {
            let unbounded = Job {
                keys: usize::MAX,
                ..self.clone()
            };
            unbounded.visible(self.queries - 1).end <= self.keys
        };
        let wide = |x: usize| x as i128;
        let lead = |mask: &Band| wide(mask.query) - wide(mask.key);
        let next_unchanged = match next.hides() {
            false => next.keys >= self.keys && longer.visible(self.queries).end >= next.keys,
            true => {
                let other = next.causal()?;
                let steps = (mask.query_step, mask.key_step) == (other.query_step, other.key_step);
                let same = lead(mask) + wide(self.queries * mask.query_step) == lead(&other);
                let last = next.queries - 1;
                let clipped =
                    self.keys <= next.keys || longer.visible(self.queries + last).end <= next.keys;
                steps && same && clipped
            }
        };
        Some(own_unchanged && next_unchanged)
    }

    /// Whether the jobs differ only in their rows.
    fn is_like(&self, next: &Job) -> bool {
        (self.batch, self.segments, self.heads) == (next.batch, next.segments, next.heads)
            && (self.dim, self.value_dim) == (next.dim, next.value_dim)
            && (self.scale, self.gain) == (next.scale, next.gain)
            && self.transform == next.transform
            // Joined keys have no common positions, which slopes and dropout would need.
            && self.transform.as_ref().is_none_or(|of| of.slopes.is_none())
            && self.dropout.is_none()
            && next.dropout.is_none()
            // Joined jobs have another order of sums.
            && self.tiles.is_none()
            && next.tiles.is_none()
    }

    /// Whether two operands have the same addresses for `rows` rows.
    fn same(&self, one: &Operand, other: &Operand, rows: usize) -> bool {
        one.offset == other.offset
            && one.heads == other.heads
            && (rows <= 1 || one.row == other.row)
            && (self.batch <= 1 || one.batch == other.batch)
            && (self.segments <= 1 || one.segment == other.segment)
    }

    /// Whether the rows of `next` directly follow the first `rows` rows of `one`.
    fn follows(&self, one: &Operand, rows: usize, next: &Operand) -> bool {
        let step = match rows {
            1 => next.row,
            _ => one.row,
        };
        let shifted = Operand {
            offset: one.offset + rows * step,
            row: step,
            ..one.clone()
        };
        step == next.row && self.same(&shifted, next, 2)
    }

    /// Whether two operands that not every job has are the same, with `rows` 0, or follow one
    /// another after so many rows.
    fn same_option(&self, both: [&Option<Operand>; 2], rows: usize) -> bool {
        match both {
            [None, None] => true,
            [Some(own), Some(next)] if rows == 0 => self.same(own, next, self.queries),
            [Some(own), Some(next)] => self.follows(own, rows, next),
            _ => false,
        }
    }

    /// An operand over its own rows and those of `next`, which has the stride if `rows` is 1.
    fn rows_of(&self, one: &Operand, next: &Operand, rows: usize) -> Operand {
        let row = if rows == 1 { next.row } else { one.row };
        Operand { row, ..one.clone() }
    }

    fn k_of(&self, next: &Job) -> Operand {
        self.rows_of(&self.k, &next.k, self.keys)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::Random;
    use crate::job::Window;
    use std::collections::BTreeMap;

    /// How often each pair of addresses is computed.
    fn pairs(jobs: &[Job]) -> BTreeMap<[usize; 4], usize> {
        let mut found = BTreeMap::new();
        for job in jobs {
            for (segment, head) in
                (0..job.segments).flat_map(|s| (0..job.heads).map(move |h| (s, h)))
            {
                for i in 0..job.queries {
                    for j in job.visible(i) {
                        let dq = job.dq.as_ref().unwrap_or(&job.q);
                        let at = [&job.q, &job.cells, dq].map(|of| of.at(0, segment, i, head));
                        let key = job.k.at(0, segment, j, head);
                        *found.entry([at[0], at[1], at[2], key]).or_default() += 1;
                    }
                }
            }
        }
        found
    }

    #[test]
    fn blocks_join_if_their_rows_follow_on_both_sides() {
        let block = |rows: usize, from: usize, to: usize| Block {
            batch: 1,
            segments: 1,
            rows,
            heads: 1,
            width: 4,
            from: operand(from, 4),
            to: operand(to, 6),
        };
        let (first, next) = (block(3, 8, 6), block(5, 20, 24));
        assert_eq!(first.join_rows(&next), Some(block(8, 8, 6)));
        assert_eq!(next.join_rows(&first), None);
        assert_eq!(first.join_rows(&block(5, 20, 30)), None);
        let batch = |of: Block| Block { batch: 2, ..of };
        let mut far = batch(next.clone());
        far.to.batch = 100;
        assert!(batch(first.clone()).join_rows(&batch(next)).is_some());
        assert_eq!(batch(first).join_rows(&far), None);
    }

    proptest::proptest! {
        #[test]
        fn coalescing_does_not_change_what_is_copied(
            [batch, segments, rows, heads, width] in
                [1usize..3, 1usize..3, 1usize..4, 1usize..4, 1usize..4],
            dense in proptest::array::uniform8(proptest::bool::weighted(0.7)),
            reversed: bool,
        ) {
            // Each level is contiguous or has a gap.
            let of = |dense: &[bool]| {
                let gap = |dense: bool| usize::from(!dense);
                let head = width + gap(dense[0]);
                let row = heads * head + gap(dense[1]);
                let segment = rows * row + gap(dense[2]);
                let batch = segments * segment + gap(dense[3]);
                let head_at = |at| if reversed { heads - 1 - at } else { at } * head;
                let heads = (0..heads).map(head_at);
                Operand { offset: 5, batch, segment, row, heads: heads.collect() }
            };
            let (from, to) = (of(&dense[..4]), of(&dense[4..]));
            let block = Block { batch, segments, rows, heads, width, from, to };
            let copied = |block: &Block| {
                let each = block.addresses().flat_map(|(from, to)| {
                    (0..block.width).map(move |i| (from + i, to + i))
                });
                let mut all: Vec<_> = each.collect();
                all.sort_unstable();
                all
            };
            let coalesced = block.coalesced();
            proptest::prop_assert_eq!(copied(&coalesced), copied(&block));
            if dense.iter().all(|&dense| dense) && (!reversed || heads == 1) {
                proptest::prop_assert_eq!(coalesced.addresses().count(), 1);
            }
        }
    }

    fn operand(offset: usize, row: usize) -> Operand {
        Operand {
            offset,
            batch: 0,
            segment: 1000,
            row,
            heads: [0, 10_000].into(),
        }
    }

    fn job(queries: (usize, usize), keys: (usize, usize), band: Option<Band>) -> Job {
        Job {
            batch: 1,
            segments: 2,
            queries: queries.1,
            keys: keys.1,
            heads: 2,
            dim: 8,
            value_dim: 8,
            q: operand(8 * queries.0, 8),
            k: operand(8 * keys.0, 8),
            cells: operand(queries.0, 1),
            delta: None,
            dq: None,
            mask: band.map(Mask::Band),
            transform: None,
            dropout: None,
            scale: 0.5,
            gain: 1.0,
            tiles: None,
        }
    }

    fn causal(query: usize, key: usize) -> Option<Band> {
        Some(Band::causal((query, 1), (key, 1)))
    }

    /// Mostly causal.
    fn window(random: &mut Random) -> Window {
        let mut limit = || (!random.once_in(3)).then(|| random.below(12));
        let (left, right) = (limit(), limit());
        match random.once_in(4) {
            true => Window { left, right },
            false => Window::CAUSAL,
        }
    }

    #[test]
    fn a_zigzag_shard_with_itself_is_one_causal_job() {
        // Two runs of 5 tokens: 10..15 and 40..45.
        let low = job((0, 5), (0, 5), causal(10, 10));
        let square = job((5, 5), (0, 5), causal(40, 10));
        let high = job((5, 5), (5, 5), causal(40, 40));
        let below = square.join_keys(&high).unwrap();
        let all = low.join_queries(&below).unwrap();
        assert_eq!((all.queries, all.keys), (10, 10));
        assert_eq!(
            pairs(std::slice::from_ref(&all)),
            pairs(&[low, square, high])
        );
    }

    #[test]
    fn a_joined_job_has_exactly_the_pairs_of_its_parts() {
        let mut joined = [0; 2];
        for seed in 0..60_000 {
            let mut random = Random::new(seed);
            let mut mask = || {
                let steps = (1 + random.below(3), 1 + random.below(3));
                let band = Band::causal((random.below(20), steps.0), (random.below(20), steps.1));
                Band {
                    window: window(&mut random),
                    ..band
                }
            };
            let (first, mut second) = (mask(), mask());
            if random.once_in(2) {
                (second.query_step, second.key_step) = (first.query_step, first.key_step);
            }
            let masks = [first, second].map(|mask| (!random.once_in(4)).then_some(mask));
            let (q, k) = (1 + random.below(4), 1 + random.below(4));
            let (more_q, more_k) = (1 + random.below(4), 1 + random.below(4));
            let left = job((0, q), (0, k), masks[0]);
            let right = job((0, q), (k, more_k), masks[1]);
            let below = job((q, more_q), (0, more_k), masks[1]);
            for (which, (next, all)) in [
                (&right, left.join_keys(&right)),
                (&below, left.join_queries(&below)),
            ]
            .into_iter()
            .enumerate()
            {
                let Some(all) = all else { continue };
                let apart = pairs(&[left.clone(), next.clone()]);
                assert_eq!(pairs(&[all]), apart, "seed {seed}: {left:?} and {next:?}");
                joined[which] += 1;
            }
        }
        assert!(joined.iter().all(|&count| count > 500), "{joined:?}");
    }

    #[test]
    fn halves_have_exactly_the_pairs_of_the_whole() {
        let mut cut = 0;
        for seed in 0..2000 {
            let mut random = Random::new(seed);
            let mut affine = || (random.below(20), 1 + random.below(3));
            let mask = Band::causal(affine(), affine());
            let mask = Band {
                window: window(&mut random),
                ..mask
            };
            let mask = (!random.once_in(4)).then_some(mask);
            let whole = job((0, 1 + random.below(60)), (0, 1 + random.below(60)), mask);
            let Some((low, high)) = whole.halves() else {
                assert!(whole.queries <= BLOCK, "{whole:?}");
                continue;
            };
            assert!(low.queries.is_multiple_of(BLOCK) && high.queries > 0);
            assert_eq!(low.pairs() + high.pairs(), whole.pairs(), "seed {seed}");
            let whole = pairs(std::slice::from_ref(&whole));
            assert_eq!(pairs(&[low, high]), whole, "seed {seed}");
            cut += 1;
        }
        assert!(cut > 500, "{cut}");
    }

    #[test]
    fn jobs_that_are_not_adjacent_do_not_join() {
        let first = job((0, 4), (0, 4), None);
        assert_eq!(first.join_keys(&job((0, 4), (5, 4), None)), None);
        assert_eq!(first.join_keys(&job((0, 3), (4, 4), None)), None);
        assert_eq!(first.join_queries(&job((5, 4), (0, 4), None)), None);
        let scaled = Job {
            scale: 0.25,
            ..job((0, 4), (4, 4), None)
        };
        assert_eq!(first.join_keys(&scaled), None);
    }
}
