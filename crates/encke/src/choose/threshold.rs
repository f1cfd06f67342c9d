//! The sequence length up to which one device is faster than a ring.
//!
//! The decision here: the same pattern, heads and type are timed at doubling lengths, on one device
//! and on rings of two and of the most ranks, until a ring is faster; bisection then finds the
//! length to within a sixteenth.

use encke_core::kernel::Kernel;
use encke_core::plan::Schedule;
use encke_core::plan::rings::Rotating;
use serde::Serialize;

use super::{ChoiceError, Constraints, TIE_TOLERANCE, choose};
use encke_cost::Machine;

/// The lengths tried.
const SHORTEST: usize = 256;
const LONGEST: usize = 1 << 24;

/// From how many tokens on a ring is faster than one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Threshold {
    /// A ring is faster from about this many tokens on.
    Tokens(usize),
    /// A ring is faster at every length tried.
    AlwaysRing,
    /// No ring is faster: the ranks share one device, or only one rank is allowed.
    NeverRing {
        /// The longest length tried.
        up_to: usize,
    },
}

/// Finds the length from which a ring of at most `most_ranks` ranks is faster than one device,
/// without regard to memory.
pub fn one_device_until<K: Kernel>(
    kernel: &K,
    constraints: &Constraints,
    machine: &Machine,
) -> Result<Threshold, ChoiceError> {
    let ring_wins = |tokens: usize| -> Result<bool, ChoiceError> {
        let best = |ranks: usize| -> Result<f64, ChoiceError> {
            let constraints = Constraints {
                shape: constraints.shape.with_tokens(tokens),
                ranks: Some(ranks),
                // The schedule moves the length by less than the prediction error.
                width: constraints.width.or(Some(1)),
                nodes: constraints.nodes.or(Some(Schedule::RING)),
                rotate: constraints.rotate.or(Some(Rotating::Keys)),
                redundancy: 0,
                memory_limit: None,
                one_device_below: None,
                ..constraints.clone()
            };
            Ok(choose(kernel, &constraints, machine)?.alternatives[0].seconds)
        };
        let alone = best(1)? / (1.0 + TIE_TOLERANCE);
        for ranks in [2, constraints.most_ranks.min(8)] {
            if ranks > 1 && best(ranks)? < alone {
                return Ok(true);
            }
        }
        Ok(false)
    };
    let longest = LONGEST.max(constraints.shape.tokens);
    if constraints.most_ranks < 2 {
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
