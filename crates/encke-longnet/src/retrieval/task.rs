//! The retrieval task: facts early in a sequence, questions about them at its end, noise between.
//!
//! A fact is two tokens, a key and its value, repeated as often as the dilation, at distances such
//! that it falls on every phase once. A question is two tokens, a marker and a key; its answer is
//! the value. Values are drawn anew for every sequence, so only where to look can be learned. Facts
//! and questions are in different local segments: a model without a longer branch never sees a
//! question and its fact together.

use encke::conformance::Random;

/// Number of noise symbols.
pub const NOISE: usize = 16;
/// Number of keys.
pub const KEYS: usize = 16;
/// Number of values: a guess is right with probability 1 / VALUES.
pub const VALUES: usize = 16;
/// The marker of a question.
const ASK: u32 = (NOISE + KEYS + VALUES) as u32;
/// All symbols.
pub const SYMBOLS: usize = NOISE + KEYS + VALUES + 1;

/// The sizes of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetrievalTask {
    /// Tokens of a sequence.
    pub tokens: usize,
    /// Tokens of a local segment.
    pub local: usize,
    /// Number of different noise symbols, up to [`NOISE`].
    pub kinds: usize,
    /// Facts of a sequence, each in its own segment.
    pub facts: usize,
    /// Questions of a sequence, each in its own segment.
    pub questions: usize,
    /// Repetitions of a fact, one for each phase of the dilation.
    pub times: usize,
}

/// A sequence with its questions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequence {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// The last position of each question, and its answer.
    pub answers: Vec<(usize, u32)>,
    /// Smallest distance in tokens between a question and its fact.
    pub shortest: usize,
}

impl RetrievalTask {
    /// Number of segments at the beginning that may hold facts, or at the end that may hold
    /// questions: an eighth of the sequence, or as many as needed.
    fn segments(&self, needed: usize) -> usize {
        (self.tokens / self.local / 8).max(needed)
    }

    /// Tokens from one repetition of a fact to the next: coprime to their number, so that the value
    /// falls on every phase.
    fn period(&self) -> usize {
        let coprime = |period: &usize| {
            (2..=self.times).all(|f| !self.times.is_multiple_of(f) || !period.is_multiple_of(f))
        };
        (2..).find(coprime).unwrap_or(2)
    }

    /// Tokens of a fact with its repetitions.
    pub fn passage(&self) -> usize {
        self.period() * self.times
    }

    /// Fewest tokens in which facts and questions have segments of their own.
    pub fn least_tokens(&self) -> usize {
        (self.facts + self.questions) * self.local
    }

    /// A random sequence.
    pub fn sequence(&self, random: &mut Random) -> Sequence {
        let RetrievalTask {
            tokens,
            local,
            kinds,
            facts,
            questions,
            times,
        } = *self;
        assert!(
            tokens >= self.least_tokens(),
            "facts and questions have room"
        );
        assert!(local >= self.passage(), "a fact fits into a segment");
        let mut sequence: Vec<u32> = (0..tokens).map(|_| random.below(kinds) as u32).collect();
        let chosen = |random: &mut Random, all: usize, count: usize| {
            let mut all: Vec<usize> = (0..all).collect();
            random.shuffle(&mut all);
            all.truncate(count);
            all
        };
        let keys = chosen(random, KEYS, facts);
        let mut placed = Vec::new();
        for (segment, key) in chosen(random, self.segments(facts), facts)
            .into_iter()
            .zip(keys)
        {
            let position = segment * local + random.below(local - self.passage() + 1);
            let value = (NOISE + KEYS + random.below(VALUES)) as u32;
            let key = (NOISE + key) as u32;
            let repeats = (0..times).map(|time| position + time * self.period());
            for at in repeats.clone() {
                sequence[at..at + 2].copy_from_slice(&[key, value]);
            }
            placed.push((repeats.max().unwrap_or(position), key, value));
        }
        let all = tokens / local;
        let mut answers = Vec::new();
        let mut shortest = usize::MAX;
        for segment in chosen(random, self.segments(questions), questions) {
            let position = (all - 1 - segment) * local + random.below(local - 1);
            let (fact, key, value) = placed[random.below(facts)];
            sequence[position..position + 2].copy_from_slice(&[ASK, key]);
            answers.push((position + 1, value));
            shortest = shortest.min(position - fact);
        }
        Sequence {
            tokens: sequence,
            answers,
            shortest,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_question_has_a_distant_fact_in_another_segment() {
        let task = RetrievalTask {
            tokens: 4096,
            local: 64,
            kinds: NOISE,
            facts: 4,
            questions: 8,
            times: 8,
        };
        let mut random = Random::new(1);
        let mut values = [0; VALUES];
        for _ in 0..200 {
            let sequence = task.sequence(&mut random);
            assert_eq!(sequence.tokens.len(), task.tokens);
            assert_eq!(sequence.answers.len(), task.questions);
            assert!(sequence.shortest >= task.tokens / 4 * 3 - 2 * task.local);
            for &(position, value) in &sequence.answers {
                let tokens = &sequence.tokens;
                assert_eq!(tokens[position - 1], ASK);
                let key = tokens[position];
                let fact = tokens.iter().position(|token| *token == key).unwrap();
                assert_eq!(tokens[fact + 1], value);
                assert_ne!(fact / task.local, position / task.local);
                let values_at = tokens
                    .iter()
                    .enumerate()
                    .filter(|(_, token)| **token == value);
                let mut phases: Vec<usize> = values_at
                    .filter(|(at, _)| tokens[at - 1] == key)
                    .map(|(at, _)| at % task.times)
                    .collect();
                phases.sort();
                assert_eq!(phases, (0..task.times).collect::<Vec<_>>());
                assert_eq!((fact + task.passage() - 1) / task.local, fact / task.local);
                values[value as usize - NOISE - KEYS] += 1;
            }
        }
        assert!(values.iter().all(|count| *count > 50), "{values:?}");
    }
}
