//! The task: facts early in a sequence, questions about them at its end, noise between.
//!
//! A fact is two tokens, a key and its value, said as often as the dilation and so far apart that it falls
//! on every phase once; a question is two tokens, a sign and a key, and its answer is the value. Values are
//! drawn anew for every sequence, so nothing about them can be learned but where to look. Facts and questions stand in local segments of their own: whoever sees no further than its
//! segment never sees a question and its fact together.

use encke::conformance::Random;

/// Symbols that mean nothing.
pub const NOISE: usize = 16;
/// Keys there are.
pub const KEYS: usize = 16;
/// Values there are: a guess is right once in so many times.
pub const VALUES: usize = 16;
/// The sign of a question.
const ASK: u32 = (NOISE + KEYS + VALUES) as u32;
/// All symbols.
pub const SYMBOLS: usize = NOISE + KEYS + VALUES + 1;

/// The sizes of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Task {
    /// Tokens of a sequence.
    pub tokens: usize,
    /// Tokens of a local segment.
    pub local: usize,
    /// Kinds of noise, up to [`NOISE`].
    pub kinds: usize,
    /// Facts of a sequence; each has a segment of its own.
    pub facts: usize,
    /// Questions of a sequence; each has a segment of its own.
    pub questions: usize,
    /// Times that a fact is said, once for each phase of a dilation.
    pub times: usize,
}

/// A sequence with its questions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequence {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// Where questions end, and which symbol answers each.
    pub answers: Vec<(usize, u32)>,
    /// Tokens between the nearest fact and question that belong together.
    pub shortest: usize,
}

impl Task {
    /// How many local segments at the beginning facts stand in, and questions at the end: an eighth of
    /// the sequence, or as many as are needed.
    fn segments(&self, needed: usize) -> usize {
        (self.tokens / self.local / 8).max(needed)
    }

    /// Tokens from one saying of a fact to the next: coprime to how often it is said, so that its value
    /// falls on every phase.
    fn period(&self) -> usize {
        let coprime = |period: &usize| {
            (2..=self.times).all(|f| !self.times.is_multiple_of(f) || !period.is_multiple_of(f))
        };
        (2..).find(coprime).unwrap_or(2)
    }

    /// Tokens that a fact takes up.
    pub fn passage(&self) -> usize {
        self.period() * self.times
    }

    /// Fewest tokens that facts and questions fit into without meeting.
    pub fn least_tokens(&self) -> usize {
        (self.facts + self.questions) * self.local
    }

    /// A sequence.
    pub fn sequence(&self, random: &mut Random) -> Sequence {
        let Task {
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
        let mut told = Vec::new();
        for (segment, key) in chosen(random, self.segments(facts), facts)
            .into_iter()
            .zip(keys)
        {
            let place = segment * local + random.below(local - self.passage() + 1);
            let value = (NOISE + KEYS + random.below(VALUES)) as u32;
            let key = (NOISE + key) as u32;
            let said = (0..times).map(|time| place + time * self.period());
            for place in said.clone() {
                sequence[place..place + 2].copy_from_slice(&[key, value]);
            }
            told.push((said.max().unwrap_or(place), key, value));
        }
        let all = tokens / local;
        let mut answers = Vec::new();
        let mut shortest = usize::MAX;
        for segment in chosen(random, self.segments(questions), questions) {
            let place = (all - 1 - segment) * local + random.below(local - 1);
            let (fact, key, value) = told[random.below(facts)];
            sequence[place..place + 2].copy_from_slice(&[ASK, key]);
            answers.push((place + 1, value));
            shortest = shortest.min(place - fact);
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
    fn every_question_is_answered_by_a_fact_far_before_it_and_in_another_segment() {
        let task = Task {
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
            for &(place, value) in &sequence.answers {
                let tokens = &sequence.tokens;
                assert_eq!(tokens[place - 1], ASK);
                let key = tokens[place];
                let fact = tokens.iter().position(|token| *token == key).unwrap();
                assert_eq!(tokens[fact + 1], value);
                assert_ne!(fact / task.local, place / task.local);
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
