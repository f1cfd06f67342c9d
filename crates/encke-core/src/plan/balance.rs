//! Shards by speed: cuts a sequence so that ranks of different speed finish together.
//!
//! The decision here: the cut balances work, not rows. The number of pairs of all queries before a
//! token has a closed form for every lane, so causal masks, segments and dilation are accounted for
//! exactly, and a cut of a billion tokens is found by bisection.

use super::work::PatternWork;
use crate::error::{Error, Result};
use crate::pattern::Pattern;
use crate::shape::Shape;
use crate::sharding::Cut;

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
    let pairs = PatternWork::new(pattern, &lanes, shape.tokens);
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
    use super::by_speed;
    use crate::pattern::Pattern;
    use crate::shape::Shape;
    use crate::sharding::Cut;

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
