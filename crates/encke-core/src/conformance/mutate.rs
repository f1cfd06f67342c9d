//! Damaged files and messages, for tests of whatever reads them.

use super::Random;

/// Values that are wrong almost everywhere: the ends of integer types, fractions, other types.
const VALUES: [&str; 24] = [
    "0",
    "-1",
    "1",
    "255",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "340282366920938463463374607431768211456",
    "0.5",
    "-0.0",
    "1e-320",
    "1e308",
    "1e999",
    "NaN",
    "null",
    "true",
    "\"\"",
    "\"1\"",
    "\"\\u202e\\u001b[2J\"",
    "[]",
    "{}",
    "[[[[1]]]]",
];

/// The bytes with one to three random damages: flipped bits, missing, repeated and foreign bytes,
/// and, where they are JSON, wrong values and keys that are there twice.
pub fn mutate(random: &mut Random, bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..random.size(3) {
        damage(random, &mut bytes);
    }
    bytes
}

fn damage(random: &mut Random, bytes: &mut Vec<u8>) {
    let at = random.below(bytes.len() + 1);
    let end = (at + random.size(64)).min(bytes.len());
    match random.below(9) {
        0 | 1 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
        2 => bytes.truncate(at),
        3 => drop(bytes.drain(at..end)),
        4 => {
            let repeated = bytes[at..end].to_vec();
            bytes.splice(at..at, repeated);
        }
        5 => {
            let foreign = (0..random.size(16)).map(|_| random.bits() as u8);
            bytes.splice(at..at, foreign.collect::<Vec<u8>>());
        }
        6 | 7 => replace_value(random, bytes, at),
        _ => repeat_key(bytes, at),
    }
}

/// Replaces the first value after `at` that is not an object or an array.
fn replace_value(random: &mut Random, bytes: &mut Vec<u8>, at: usize) {
    let is_end = |byte: &u8| b",]}".contains(byte);
    let colon = bytes[at..].iter().position(|byte| b":[,".contains(byte));
    let Some(start) = colon.map(|colon| at + colon + 1) else {
        return;
    };
    let length = bytes[start..].iter().position(is_end).unwrap_or(0);
    bytes.splice(start..start + length, random.pick(&VALUES).bytes());
}

/// Repeats the first key after `at`, with what follows it up to a comma.
fn repeat_key(bytes: &mut Vec<u8>, at: usize) {
    let comma = |bytes: &[u8]| bytes.iter().position(|byte| *byte == b',');
    let Some(start) = comma(&bytes[at..]).map(|comma| at + comma) else {
        return;
    };
    let length = comma(&bytes[start + 1..]).map_or(0, |comma| comma + 1);
    let repeated = bytes[start..start + length].to_vec();
    bytes.splice(start..start, repeated);
}
