//! AdamW with gradient clipping. Its moments can be saved, so that a resumed run equals an
//! uninterrupted one.

use anyhow::{Result, ensure};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};

use crate::weights::Weights;

const BETA1: f64 = 0.9;
const BETA2: f64 = 0.98;
const EPSILON: f64 = 1e-8;
/// Gradients are clipped to this global norm.
const MAX_GRADIENT_NORM: f64 = 1.0;

/// The optimiser and its state.
pub struct AdamW {
    weights: Vec<AdamWParameter>,
    steps: usize,
    weight_decay: f64,
}

/// A parameter with its first and second moment.
struct AdamWParameter {
    name: String,
    variable: Var,
    first: Tensor,
    second: Tensor,
}

impl AdamW {
    /// An optimiser of these weights, with zero moments.
    pub fn new(weights: &Weights, weight_decay: f64) -> Result<AdamW> {
        let weight = |(name, variable): (String, Var)| -> Result<AdamWParameter> {
            let zeros = variable.zeros_like()?;
            Ok(AdamWParameter {
                name,
                variable,
                first: zeros.clone(),
                second: zeros,
            })
        };
        Ok(AdamW {
            weights: weights
                .all()
                .into_iter()
                .map(weight)
                .collect::<Result<_>>()?,
            steps: 0,
            weight_decay,
        })
    }

    /// The gradient of a loss for each weight; zeros for a weight that the loss does not depend on.
    pub fn gradients(&self, loss: &Tensor) -> Result<Vec<Tensor>> {
        let weights = self.weights.iter().map(|weight| &weight.variable);
        gradients_of(weights, &loss.backward()?)
    }

    /// One step with these gradients, in the order of [`AdamW::gradients`], and this learning rate.
    pub fn step(&mut self, gradients: &[Tensor], rate: f64) -> Result<()> {
        assert_eq!(
            gradients.len(),
            self.weights.len(),
            "one gradient per weight"
        );
        self.steps += 1;
        let mut square = 0.0;
        for gradient in gradients {
            square += f64::from(gradient.sqr()?.sum_all()?.to_scalar::<f32>()?);
        }
        ensure!(
            square.is_finite(),
            "the gradients of step {} are not finite; lower --rate",
            self.steps
        );
        let clip = (MAX_GRADIENT_NORM / square.sqrt().max(1e-12)).min(1.0);
        let steps = self.steps as f64;
        let (scale1, scale2) = (
            1.0 / (1.0 - BETA1.powf(steps)),
            1.0 / (1.0 - BETA2.powf(steps)),
        );
        for (weight, gradient) in self.weights.iter_mut().zip(gradients) {
            let gradient = (gradient * clip)?;
            weight.first = ((&weight.first * BETA1)? + (&gradient * (1.0 - BETA1))?)?;
            weight.second = ((&weight.second * BETA2)? + (gradient.sqr()? * (1.0 - BETA2))?)?;
            let size = ((&weight.second * scale2)?.sqrt()? + EPSILON)?;
            let update = ((&weight.first * (scale1 * rate))? / size)?;
            // Gains and other vectors have no weight decay.
            let keep = match weight.variable.rank() {
                0 | 1 => 1.0,
                _ => 1.0 - rate * self.weight_decay,
            };
            let value = ((weight.variable.as_tensor() * keep)? - update)?;
            weight.variable.set(&value)?;
        }
        Ok(())
    }

    /// Weights and moments by name.
    pub fn state(&self) -> Vec<(String, Tensor)> {
        let of = |weight: &AdamWParameter| {
            let AdamWParameter {
                name,
                variable,
                first,
                second,
            } = weight;
            [
                (name.clone(), variable.as_tensor().clone()),
                (format!("first.{name}"), first.clone()),
                (format!("second.{name}"), second.clone()),
            ]
        };
        self.weights.iter().flat_map(of).collect()
    }

    /// Restores the state after `steps` steps.
    pub fn resume(
        &mut self,
        steps: usize,
        mut state: impl FnMut(&str) -> Result<Tensor>,
    ) -> Result<()> {
        self.steps = steps;
        for weight in &mut self.weights {
            let name = &weight.name;
            let mut read = |name: &str| -> Result<Tensor> {
                let tensor = state(name)?;
                ensure!(
                    tensor.dims() == weight.variable.dims(),
                    "{name} is {:?} in the checkpoint, but {:?} in this model",
                    tensor.dims(),
                    weight.variable.dims()
                );
                Ok(tensor)
            };
            let value = read(name)?;
            let (first, second) = (
                read(&format!("first.{name}"))?,
                read(&format!("second.{name}"))?,
            );
            weight.variable.set(&value)?;
            (weight.first, weight.second) = (first, second);
        }
        Ok(())
    }
}

/// The gradient of each of some weights; zeros for one that the loss does not depend on.
pub fn gradients_of<'w>(
    weights: impl Iterator<Item = &'w Var>,
    all: &GradStore,
) -> Result<Vec<Tensor>> {
    let gradient = |weight: &Var| match all.get(weight) {
        Some(gradient) => Ok(gradient.clone()),
        None => Ok(weight.zeros_like()?),
    };
    weights.map(gradient).collect()
}

/// The learning rate of a step: linear warmup, then cosine decay to a tenth of the peak.
pub fn rate(peak: f64, step: usize, steps: usize) -> f64 {
    let warmup = (steps / 20).clamp(1, 100);
    if step < warmup {
        return peak * (step + 1) as f64 / warmup as f64;
    }
    let share = (step - warmup) as f64 / (steps - warmup).max(1) as f64;
    peak * (0.55 + 0.45 * (std::f64::consts::PI * share.min(1.0)).cos())
}
