//! What a pattern puts where a segment has no token: nothing, or the keys of `phantoms.rs`.

use serde::{Deserialize, Serialize};

/// What stands in the places of a segment that have no token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Padding {
    /// Nothing: a softmax is over tokens.
    #[default]
    None,
    /// A phantom key in each place that torchscale fills with zeros.
    Torchscale,
}

impl Padding {
    pub(crate) fn is_none(&self) -> bool {
        *self == Padding::None
    }
}
