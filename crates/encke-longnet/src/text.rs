//! Training texts: a generated one, and sequences of any file.
//!
//! The generated text is a chronicle: people are introduced with a trade and a town, and mentioned
//! with them again much later. The same seed gives the same bytes on every machine.

use std::path::Path;

use anyhow::{Context, Result, bail};
use encke::conformance::Random;

const NAMES: [&str; 16] = [
    "Aldo", "Berta", "Casimir", "Dora", "Emil", "Frieda", "Gustav", "Hanna", "Ivo", "Judith",
    "Konrad", "Lene", "Moritz", "Nora", "Otto", "Paula",
];
const TRADES: [&str; 8] = [
    "baker",
    "clockmaker",
    "ferryman",
    "gardener",
    "miller",
    "printer",
    "tailor",
    "weaver",
];
const TOWNS: [&str; 8] = [
    "Ashford", "Brenn", "Callow", "Dunmore", "Elmsee", "Farrow", "Grauburg", "Holm",
];
const SKIES: [&str; 6] = ["clear", "grey", "bright", "heavy", "pale", "windy"];

/// A chronicle of at least `bytes` bytes.
pub fn chronicle(bytes: usize, seed: u64) -> String {
    let mut random = Random::new(seed);
    let mut people: Vec<(&str, &str, &str)> = NAMES
        .iter()
        .map(|name| (*name, random.pick(&TRADES), random.pick(&TOWNS)))
        .collect();
    let mut text = String::with_capacity(bytes + 128);
    let mut year = 1;
    while text.len() < bytes {
        if random.once_in(40) {
            // A person changes trade and town.
            let person = random.below(people.len());
            people[person].1 = random.pick(&TRADES);
            people[person].2 = random.pick(&TOWNS);
        }
        let (name, trade, town) = people[random.below(people.len())];
        let (other, other_trade, _) = people[random.below(people.len())];
        let sky = random.pick(&SKIES);
        let sentence = match random.below(6) {
            0 => {
                year += 1;
                format!("In the year {year}, {name} was the {trade} of {town}.\n")
            }
            1 => format!("{name} the {trade} came from {town} under a {sky} sky. "),
            2 => format!("{name} met {other}, and the {trade} spoke with the {other_trade}. "),
            3 => format!("That day the sky over {town} was {sky}. "),
            4 => format!("\"Where is {name}?\" asked {other}. \"In {town},\" they said. "),
            _ => format!(
                "{other} owed {name} a debt of {} coins. ",
                2 + random.below(9)
            ),
        };
        text += &sentence;
    }
    text
}

/// The most bytes of a text, which is held in memory.
const LIMIT: u64 = 4 << 30;

/// The bytes of a text file, as tokens.
pub struct Text {
    bytes: Vec<u8>,
}

impl Text {
    /// Reads a file; it must be longer than one sequence.
    pub fn read(path: &Path, tokens: usize) -> Result<Text> {
        let bytes = encke_files::read(path, LIMIT);
        let bytes = bytes.with_context(|| format!("cannot read {}", path.display()))?;
        if bytes.len() <= tokens {
            bail!(
                "{} has {} bytes, and a sequence of {tokens} needs {}; use a longer text or a \
                 smaller --tokens (`longnet text` writes one of any length)",
                path.display(),
                bytes.len(),
                tokens + 1
            );
        }
        Ok(Text { bytes })
    }

    /// All bytes.
    #[cfg(feature = "mpi")]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The sequence of a step: `tokens` tokens and the one that follows, from a position that
    /// depends only on the seed and the step.
    pub fn sequence(&self, tokens: usize, seed: u64, step: usize) -> Vec<u32> {
        let mut random = Random::new(seed.wrapping_add(step as u64).wrapping_mul(0x9e37_79b9));
        let start = random.below(self.bytes.len() - tokens);
        let bytes = &self.bytes[start..start + tokens + 1];
        bytes.iter().map(|byte| u32::from(*byte)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::chronicle;

    #[test]
    fn a_chronicle_has_the_requested_length_and_depends_only_on_the_seed() {
        let text = chronicle(10_000, 3);
        assert!(text.len() >= 10_000 && text.len() < 10_200);
        assert!(text.is_ascii());
        assert_eq!(text, chronicle(10_000, 3));
        assert_ne!(text, chronicle(10_000, 4));
        assert!(chronicle(20_000, 3).starts_with(&text[..9_000]));
    }
}
