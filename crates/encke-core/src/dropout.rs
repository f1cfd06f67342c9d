//! Dropout that does not depend on the ring (spec section 11): every pair of a query and a key has
//! one coin, which is a function of the seed and the pair.
//!
//! The decision here: coins are never stored. The rank that computes a pair draws its coin,
//! and the backward pass draws it again. The seed belongs to the call and decides nothing in a
//! plan.

use std::sync::Arc;

use serde::Serialize;

use crate::error::{Error, Result};

/// Dropout of one call.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Dropout {
    probability: f64,
    seed: u64,
}

impl Dropout {
    /// Drops a pair with a probability of at least 0 and below 1.
    pub fn new(probability: f64, seed: u64) -> Result<Dropout> {
        match (0.0..1.0).contains(&probability) {
            true => Ok(Dropout { probability, seed }),
            false => Err(Error::Dropout { got: probability }),
        }
    }

    /// The same with another seed: other pairs are dropped.
    pub fn with_seed(self, seed: u64) -> Dropout {
        Dropout { seed, ..self }
    }

    /// The seed of the coins.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The factor of a pair that is kept.
    pub fn gain(&self) -> f64 {
        1.0 / (1.0 - self.probability)
    }

    /// The key of the generator.
    pub fn seed_words(&self) -> [u32; 2] {
        [self.seed as u32, (self.seed >> 32) as u32]
    }

    /// The least coin of a pair that is kept, at most 2^32.
    pub fn threshold(&self) -> u64 {
        (self.probability * 2f64.powi(32)).ceil() as u64
    }

    /// The factors of the weights of four consecutive keys: 0 for a pair that is dropped.
    pub fn factors(&self, pairs: FourPairs) -> [f64; 4] {
        let counter = [
            pairs.keys as u32,
            pairs.query as u32,
            pairs.head as u32,
            pairs.document as u32,
        ];
        let threshold = self.threshold();
        let factor = |coin: u32| match u64::from(coin) >= threshold {
            true => self.gain(),
            false => 0.0,
        };
        philox(counter, self.seed_words()).map(factor)
    }
}

/// A query and four consecutive keys, as the counter of their coins. Tokens are those of the whole
/// sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FourPairs {
    /// The first key's token, divided by 4.
    pub keys: usize,
    /// The position of the query.
    pub query: usize,
    /// The query head, plus the number of heads times the batch entry.
    pub head: usize,
    /// The first token of the document.
    pub document: usize,
}

/// Where the pairs of a job are in the call.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct JobDropout {
    /// The dropout of the call.
    pub dropout: Dropout,
    /// The token at position 0 of the first segment, counted in its batch entry.
    pub first_token: usize,
    /// Tokens from one segment to the next.
    pub segment_step: usize,
    /// The first token of the document, counted in its batch entry.
    pub document: usize,
    /// The query head of each head of the job, plus the number of heads times the batch entry that
    /// packed rows come from.
    pub heads: Arc<[usize]>,
    /// Query heads of the call.
    pub all_heads: usize,
}

impl JobDropout {
    /// The four pairs of which the pair of `query` and `key` is one, positions in `segment`, and
    /// its index among them.
    #[inline]
    pub fn pairs(
        &self,
        (batch, segment, head): (usize, usize, usize),
        query: usize,
        key: usize,
    ) -> (FourPairs, usize) {
        let start = self.first_token + segment * self.segment_step;
        let pairs = FourPairs {
            keys: (start + key) / 4,
            query: start + query,
            head: self.heads[head] + self.all_heads * batch,
            document: self.document,
        };
        (pairs, (start + key) % 4)
    }
}

/// Philox4x32 with ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let product = |factor: u32, x: u32| {
        let wide = u64::from(factor) * u64::from(x);
        ((wide >> 32) as u32, wide as u32)
    };
    for round in 0..10 {
        if round > 0 {
            key = [
                key[0].wrapping_add(0x9E37_79B9),
                key[1].wrapping_add(0xBB67_AE85),
            ];
        }
        let (high0, low0) = product(0xD251_1F53, counter[0]);
        let (high1, low1) = product(0xCD9E_8D57, counter[2]);
        counter = [
            high1 ^ counter[1] ^ key[0],
            low1,
            high0 ^ counter[3] ^ key[1],
            low0,
        ];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_has_the_published_values() {
        // The known-answer vectors of the authors' library.
        let zeros = philox([0; 4], [0; 2]);
        assert_eq!(zeros, [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        let ones = philox([u32::MAX; 4], [u32::MAX; 2]);
        assert_eq!(ones, [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        let pi = philox(
            [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344],
            [0xa4093822, 0x299f31d0],
        );
        assert_eq!(pi, [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]);
    }

    #[test]
    fn a_share_of_the_pairs_is_dropped_and_the_mean_factor_is_one() {
        let dropout = Dropout::new(0.25, 7).unwrap();
        let mut sum = 0.0;
        for keys in 0..10_000 {
            let pairs = FourPairs {
                keys,
                query: 3,
                head: 1,
                document: 0,
            };
            sum += dropout.factors(pairs).iter().sum::<f64>();
        }
        // 40,000 coins: the standard deviation of the mean is 0.0029.
        assert!((sum / 40_000.0 - 1.0).abs() < 0.015, "{sum}");
        assert!(Dropout::new(1.0, 0).is_err() && Dropout::new(f64::NAN, 0).is_err());
    }
}
