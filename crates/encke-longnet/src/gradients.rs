//! Gradients of a loss, one for each weight, in the order of the weights.

use anyhow::Result;
use candle_core::{Tensor, Var};

use crate::adamw::AdamW;

/// The gradient of each weight; zeros for one that the loss does not depend on.
pub fn of(loss: &Tensor, optimiser: &AdamW) -> Result<Vec<Tensor>> {
    let found = loss.backward()?;
    let gradient = |variable: &Var| -> Result<Tensor> {
        match found.get(variable) {
            Some(gradient) => Ok(gradient.clone()),
            None => Ok(variable.zeros_like()?),
        }
    };
    optimiser.variables().map(gradient).collect()
}
