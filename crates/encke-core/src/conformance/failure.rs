//! The result of a failed conformance check.

/// What an implementation did wrong: the check, the seed of the case and the values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// The description, in one line.
    pub message: String,
}
