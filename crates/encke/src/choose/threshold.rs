//! Up to how many tokens one device is enough: a length that is computed, not a rule.
//!
//! The decision here: the same pattern, heads and type are timed at doubling lengths, on one device
//! and on rings of two and of the most ranks, until a ring wins; the length in between is then
//! found by halving, to within a sixteenth.

use encke_core::Shape;
use encke_core::kernel::Kernel;
use encke_core::plan::rings::Rotating;
use serde::Serialize;

use super::{ALIKE, ChoiceError, Constraints, choose};
use encke_cost::Machine;

/// Lengths that are looked at.
const SHORTEST: usize = 256;
const LONGEST: usize = 1 << 24;

/// Up to how many tokens one device is enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Threshold {
    /// From about so many tokens on a ring is faster.
    Tokens(usize),
    /// A ring is faster at every length that was looked at.
    AlwaysRing,
    /// No ring is faster up to this length: ranks share what they compute on, or there is one.
    NeverRing {
        /// The longest length that was looked at.
        up_to: usize,
    },
}

/// Finds the length from which a ring of at most the wish's ranks is faster than one device.
/// Memory is left out of it.
pub fn one_device_until<K: Kernel>(
    kernel: &K,
    wish: &Constraints,
    machine: &Machine,
) -> Result<Threshold, ChoiceError> {
    let ring_wins = |tokens: usize| -> Result<bool, ChoiceError> {
        let best = |ranks: usize| -> Result<f64, ChoiceError> {
            let shape = Shape {
                tokens,
                ..wish.shape
            };
            let wish = Constraints {
                shape,
                ranks: Some(ranks),
                // How parcels go round moves the length by less than the clock can tell.
                width: wish.width.or(Some(1)),
                rotate: wish.rotate.or(Some(Rotating::Keys)),
                redundancy: 0,
                memory_limit: None,
                one_device_below: None,
                ..wish.clone()
            };
            Ok(choose(kernel, &wish, machine)?.alternatives[0].seconds)
        };
        let alone = best(1)? / (1.0 + ALIKE);
        for ranks in [2, wish.most_ranks.min(8)] {
            if ranks > 1 && best(ranks)? < alone {
                return Ok(true);
            }
        }
        Ok(false)
    };
    let longest = LONGEST.max(wish.shape.tokens);
    if wish.most_ranks < 2 {
        return Ok(Threshold::NeverRing { up_to: longest });
    }
    let mut high = SHORTEST;
    while !ring_wins(high)? {
        if high >= longest {
            return Ok(Threshold::NeverRing { up_to: high });
        }
        high *= 2;
    }
    if high == SHORTEST {
        return Ok(Threshold::AlwaysRing);
    }
    let mut low = high / 2;
    while high - low > high / 16 {
        let middle = low + (high - low) / 2;
        match ring_wins(middle)? {
            true => high = middle,
            false => low = middle,
        }
    }
    Ok(Threshold::Tokens(high))
}
