//! How scores are computed and what is added to the denominator (spec sections 10 and 11).

use std::sync::Arc;

use serde::Serialize;

use crate::dropout::Dropout;

/// Scale, softcap, slopes, sinks and dropout of one call.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Scores {
    /// Factor of q·k.
    pub scale: f64,
    /// Scores x become `softcap * tanh(x / softcap)`.
    pub softcap: Option<f64>,
    /// The ALiBi slope of each query head: slope times distance is subtracted from the score.
    pub slopes: Option<Arc<[f64]>>,
    /// The sink of each query head: a score without a key and a value.
    pub sinks: Option<Arc<[f64]>>,
    /// Which pairs are dropped after the softmax.
    pub dropout: Option<Dropout>,
}

impl Scores {
    /// The score of a pair from its q·k, and the derivative of the score by `scale * q·k`.
    pub fn of(&self, product: f64, head: usize, distance: usize) -> (f64, f64) {
        let x = self.scale * product;
        let (score, slope) = match self.softcap {
            None => (x, 1.0),
            Some(cap) => {
                let t = (x / cap).tanh();
                (cap * t, 1.0 - t * t)
            }
        };
        let bias = self.slopes.as_ref().map_or(0.0, |slopes| slopes[head]);
        (score - bias * distance as f64, slope)
    }
}

impl From<f64> for Scores {
    fn from(scale: f64) -> Scores {
        Scores {
            scale,
            softcap: None,
            slopes: None,
            sinks: None,
            dropout: None,
        }
    }
}

/// The ALiBi slopes of `heads` heads: 2^(−8(h+1)/heads).
pub fn alibi_slopes(heads: usize) -> Arc<[f64]> {
    let slope = |head: usize| (-8.0 * (head + 1) as f64 / heads as f64).exp2();
    (0..heads).map(slope).collect()
}
