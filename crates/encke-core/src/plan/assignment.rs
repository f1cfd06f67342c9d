//! Assigns the ranks of a new ring to places of the old one so that the most rows stay where they
//! are.
//!
//! The decision here: the assignment is optimal. The Hungarian method (shortest augmenting paths)
//! takes time cubic in the ranks, one second for a thousand, and resizes are rare.

/// For each new rank a distinct place out of `places`, so that the sum of `kept(rank, place)` is
/// maximal. Among optimal assignments, those with `rank == place` are preferred.
pub(super) fn assign(
    ranks: usize,
    places: usize,
    kept: impl Fn(usize, usize) -> usize,
) -> Vec<usize> {
    assert!(ranks <= places, "every rank has a place");
    // Negated gains; the tie-break for `rank == place` is too small to change the optimum.
    let cost = |rank: usize, place: usize| -> i128 {
        let own = i128::from(rank == place);
        -((kept(rank, place) as i128) * (ranks as i128 + 1) + own)
    };
    // Potentials of ranks and of places, both numbered from 1; 0 means unassigned.
    let (mut of_rank, mut of_place) = (vec![0i128; ranks + 1], vec![0i128; places + 1]);
    let mut taken_by = vec![0usize; places + 1];
    for rank in 1..=ranks {
        taken_by[0] = rank;
        let mut at = 0;
        let mut least = vec![i128::MAX; places + 1];
        let mut before = vec![0usize; places + 1];
        let mut seen = vec![false; places + 1];
        while taken_by[at] != 0 {
            seen[at] = true;
            let (holder, mut step, mut next) = (taken_by[at], i128::MAX, 0);
            for place in 1..=places {
                if seen[place] {
                    continue;
                }
                let reduced = cost(holder - 1, place - 1) - of_rank[holder] - of_place[place];
                if reduced < least[place] {
                    (least[place], before[place]) = (reduced, at);
                }
                if least[place] < step {
                    (step, next) = (least[place], place);
                }
            }
            for place in 0..=places {
                if seen[place] {
                    of_rank[taken_by[place]] += step;
                    of_place[place] -= step;
                } else if least[place] != i128::MAX {
                    least[place] -= step;
                }
            }
            at = next;
        }
        // Augment along the path: each place on it takes the rank of the place before it.
        while at != 0 {
            taken_by[at] = taken_by[before[at]];
            at = before[at];
        }
    }
    let mut found = vec![0; ranks];
    for place in 1..=places {
        if taken_by[place] > 0 {
            found[taken_by[place] - 1] = place - 1;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::assign;

    /// The largest sum over all assignments, by enumeration.
    fn best(rank: usize, ranks: usize, free: &mut Vec<usize>, kept: &[Vec<usize>]) -> usize {
        if rank == ranks {
            return 0;
        }
        let mut most = 0;
        for i in 0..free.len() {
            let place = free.swap_remove(i);
            most = most.max(kept[rank][place] + best(rank + 1, ranks, free, kept));
            free.push(place);
            let last = free.len() - 1;
            free.swap(i, last);
        }
        most
    }

    #[test]
    fn no_assignment_keeps_more() {
        let mut state = 7u64;
        let mut random = move |below: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) % below
        };
        for _ in 0..300 {
            let ranks = 1 + random(5) as usize;
            let places = ranks + random(3) as usize;
            let kept: Vec<Vec<usize>> = (0..ranks)
                .map(|_| (0..places).map(|_| random(9) as usize).collect())
                .collect();
            let found = assign(ranks, places, |rank, place| kept[rank][place]);
            let sum: usize = found.iter().enumerate().map(|(r, p)| kept[r][*p]).sum();
            let mut once = found.clone();
            once.sort_unstable();
            once.dedup();
            assert_eq!(once.len(), ranks, "{found:?}");
            assert_eq!(sum, best(0, ranks, &mut (0..places).collect(), &kept));
        }
    }

    #[test]
    fn among_equal_assignments_ranks_keep_their_numbers() {
        assert_eq!(assign(4, 6, |_, _| 0), [0, 1, 2, 3]);
        assert_eq!(
            assign(3, 4, |rank, place| usize::from(rank == place)),
            [0, 1, 2]
        );
    }
}
