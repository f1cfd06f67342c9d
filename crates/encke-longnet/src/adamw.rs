//! AdamW whose moments can be written down, so that a run that is resumed is the run that was not
//! interrupted.

use anyhow::{Result, ensure};
use candle_core::{Tensor, Var};

use crate::weights::Weights;

const BETA1: f64 = 0.9;
const BETA2: f64 = 0.98;
const EPSILON: f64 = 1e-8;
/// Gradients longer than this are shortened to it.
const LONGEST: f64 = 1.0;

/// The optimiser and its state.
pub struct AdamW {
    weights: Vec<Weight>,
    steps: usize,
    decay: f64,
}

/// A weight with its moments.
struct Weight {
    name: String,
    variable: Var,
    first: Tensor,
    second: Tensor,
}

impl AdamW {
    /// For these weights, none of which has moved.
    pub fn new(weights: &Weights, decay: f64) -> Result<AdamW> {
        let weight = |(name, variable): (String, Var)| -> Result<Weight> {
            let zeros = variable.zeros_like()?;
            Ok(Weight {
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
            decay,
        })
    }

    /// The weights, in the order in which their gradients are given.
    pub fn variables(&self) -> impl Iterator<Item = &Var> {
        self.weights.iter().map(|weight| &weight.variable)
    }

    /// Moves every weight against its gradient.
    pub fn step(&mut self, gradients: &[Tensor], rate: f64) -> Result<()> {
        assert_eq!(
            gradients.len(),
            self.weights.len(),
            "a gradient for each weight"
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
        let shorten = (LONGEST / square.sqrt().max(1e-12)).min(1.0);
        let steps = self.steps as f64;
        let (scale1, scale2) = (
            1.0 / (1.0 - BETA1.powf(steps)),
            1.0 / (1.0 - BETA2.powf(steps)),
        );
        for (weight, gradient) in self.weights.iter_mut().zip(gradients) {
            let gradient = (gradient * shorten)?;
            weight.first = ((&weight.first * BETA1)? + (&gradient * (1.0 - BETA1))?)?;
            weight.second = ((&weight.second * BETA2)? + (gradient.sqr()? * (1.0 - BETA2))?)?;
            let size = ((&weight.second * scale2)?.sqrt()? + EPSILON)?;
            let towards = ((&weight.first * (scale1 * rate))? / size)?;
            // Gains and other vectors are not drawn to zero.
            let kept = match weight.variable.rank() {
                0 | 1 => 1.0,
                _ => 1.0 - rate * self.decay,
            };
            let moved = ((weight.variable.as_tensor() * kept)? - towards)?;
            weight.variable.set(&moved)?;
        }
        Ok(())
    }

    /// Everything that has to be written down, by name.
    pub fn state(&self) -> Vec<(String, Tensor)> {
        let of = |weight: &Weight| {
            let Weight {
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

    /// Takes up the state after `steps` steps.
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
                    "{name} is {:?} in the checkpoint, but this model wants {:?}",
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

/// The rate of a step: rising over the first steps, then falling along a cosine to a tenth.
pub fn rate(highest: f64, step: usize, steps: usize) -> f64 {
    let rising = (steps / 20).clamp(1, 100);
    if step < rising {
        return highest * (step + 1) as f64 / rising as f64;
    }
    let share = (step - rising) as f64 / (steps - rising).max(1) as f64;
    highest * (0.55 + 0.45 * (std::f64::consts::PI * share.min(1.0)).cos())
}
