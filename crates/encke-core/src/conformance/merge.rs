//! The suite for rules that merge finished partials (spec section 2).
//!
//! The decision here: the expected result is one softmax over all keys, never another merge, so the
//! rule and its test cannot share a mistake.

use super::failure::Failure;
use super::random::Random;
use crate::partial::{OnlineSoftmax, Partial};

/// Random pairs and triples.
const CASES: u64 = 300;
/// Allowed error relative to values of at most one.
const TOLERANCE: f64 = 1e-13;

/// Runs the suite on a rule.
pub fn merge(rule: impl Fn(&Partial, &Partial) -> Partial) -> Result<(), Failure> {
    for seed in 0..CASES {
        check(&rule, seed)?;
    }
    Ok(())
}

fn check(rule: &impl Fn(&Partial, &Partial) -> Partial, seed: u64) -> Result<(), Failure> {
    let random = &mut Random::new(seed);
    let dim = random.size(8);
    let pieces: Vec<Vec<ScoredValue>> = (0..3).map(|_| keys(random, dim)).collect();
    let [a, b, c] = [0, 1, 2].map(|i| softmax(dim, &pieces[i..=i]));
    let two = softmax(dim, &pieces[..2]);
    close(seed, "of two partials", &rule(&a, &b), &two)?;
    close(seed, "of two partials, exchanged", &rule(&b, &a), &two)?;
    let three = softmax(dim, &pieces);
    close(seed, "of three partials", &rule(&rule(&a, &b), &c), &three)?;
    close(
        seed,
        "of three, last two first",
        &rule(&a, &rule(&b, &c)),
        &three,
    )?;
    let none = Partial::empty(dim);
    close(seed, "with nothing", &rule(&a, &none), &a)?;
    close(seed, "of nothing with something", &rule(&none, &a), &a)?;
    close(seed, "of nothing with nothing", &rule(&none, &none), &none)?;
    let bits = |p: Partial| {
        [p.out, vec![p.lse]]
            .concat()
            .iter()
            .map(|x| x.to_bits())
            .collect()
    };
    let (first, again): (Vec<u64>, Vec<u64>) = (bits(rule(&a, &b)), bits(rule(&a, &b)));
    if first != again {
        return Err(failure(seed, "is not the same when repeated"));
    }
    Ok(())
}

/// A score and a value.
type ScoredValue = (f64, Vec<f64>);

/// Up to a dozen keys, or none.
fn keys(random: &mut Random, dim: usize) -> Vec<ScoredValue> {
    if random.once_in(4) {
        return Vec::new();
    }
    let height = random.pick(&[0.0, 0.0, 1e4, -1e4]);
    let spread = random.pick(&[1.0, 30.0, 1e4]);
    let number = |random: &mut Random| {
        let value = (0..dim).map(|_| random.unit()).collect();
        (height + spread * random.unit(), value)
    };
    (0..random.size(12)).map(|_| number(random)).collect()
}

/// Attention over all keys at once.
fn softmax(dim: usize, pieces: &[Vec<ScoredValue>]) -> Partial {
    let mut carry = OnlineSoftmax::new(dim);
    for (score, value) in pieces.iter().flatten() {
        carry.absorb(*score, value);
    }
    carry.finish()
}

fn close(seed: u64, what: &str, got: &Partial, expected: &Partial) -> Result<(), Failure> {
    // Weights are exponentials of differences of values as large as the lse.
    let limit = TOLERANCE
        * if expected.lse.is_finite() {
            1.0 + expected.lse.abs()
        } else {
            1.0
        };
    let near = |x: f64, y: f64| x == y || (x - y).abs() <= limit;
    let mut out = got.out.iter().zip(&expected.out);
    if near(got.lse, expected.lse) && out.all(|(x, y)| near(*x, *y)) {
        return Ok(());
    }
    Err(failure(
        seed,
        &format!("{what} gives {got:?} instead of {expected:?}"),
    ))
}

fn failure(seed: u64, what: &str) -> Failure {
    Failure {
        message: format!("merge, seed {seed}: the merge {what}"),
    }
}
