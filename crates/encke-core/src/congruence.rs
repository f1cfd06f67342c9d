//! Two congruences at once: the arithmetic of index sets.
//!
//! The decision here: in `i128`, because an inverse may be negative and a difference wide.

/// The smallest u >= 0 with u = a (mod m) and u = b (mod n), and the step between solutions.
pub(crate) fn congruence(a: usize, m: usize, b: usize, n: usize) -> Option<(usize, usize)> {
    if n == 1 {
        return Some((a % m, m));
    }
    let (gcd, inverse) = extended_gcd(m as i128, n as i128);
    let difference = b as i128 - (a % m) as i128;
    if difference % gcd != 0 {
        return None;
    }
    let period = n as i128 / gcd;
    let times = (difference / gcd * inverse).rem_euclid(period);
    Some(((a % m) + m * times as usize, m * period as usize))
}

/// The greatest common divisor.
pub(crate) fn gcd(m: usize, n: usize) -> usize {
    extended_gcd(m as i128, n as i128).0 as usize
}

/// gcd(m, n) and an x with m·x = gcd (mod n).
fn extended_gcd(m: i128, n: i128) -> (i128, i128) {
    let (mut old, mut new) = ((m, 1), (n, 0));
    while new.0 != 0 {
        let quotient = old.0 / new.0;
        (old, new) = (new, (old.0 - quotient * new.0, old.1 - quotient * new.1));
    }
    old
}
