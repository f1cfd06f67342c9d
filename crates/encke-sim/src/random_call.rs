//! A random call, forward or backward: a plan and random tensors for it.

use std::sync::Arc;

use encke_core::conformance::{Configuration, Random};
use encke_core::plan::program::Role;
use encke_core::plan::{Pass, Plan, Request};
use encke_core::{Result, Tensor, View};
use encke_ring::call;

/// A plan with random inputs.
#[derive(Debug)]
pub struct RandomCall {
    /// The plan.
    pub plan: Arc<Plan>,
    inputs: Vec<(Role, Tensor)>,
}

impl RandomCall {
    /// The forward or backward pass of a configuration. The backward pass gets random outputs of
    /// the forward pass as well: ranks treat them like any other input.
    pub fn new(configuration: &Configuration, backward: bool) -> Result<RandomCall> {
        let pass = match backward {
            true => Pass::Backward { dlse: true },
            false => Pass::Forward,
        };
        let plan = Arc::new(Plan::new(Request {
            pass,
            ..configuration.request.clone()
        })?);
        let mut random = Random::new(configuration.seed ^ 0x5eed);
        let mut inputs = Vec::new();
        for (role, _, dims) in call::inputs(&plan) {
            let dtype = match role {
                Role::Lse | Role::Dlse => configuration.request.dtype.sum(),
                _ => configuration.request.dtype,
            };
            let count = dims.iter().product();
            let values: Vec<f64> = (0..count).map(|_| 2.0 * random.unit()).collect();
            inputs.push((role, Tensor::from_f64(dtype, dims, &values)?));
        }
        Ok(RandomCall { plan, inputs })
    }

    /// Views of the inputs.
    pub fn inputs(&self) -> Vec<(Role, View<'_>)> {
        let inputs = self.inputs.iter();
        inputs
            .map(|(role, tensor)| (*role, tensor.view()))
            .collect()
    }

    /// The number of rounds of the longest program.
    pub fn rounds(&self) -> Result<usize> {
        let of = |rank| Ok(self.plan.rank(rank)?.rounds.len());
        let rounds = (0..self.plan.ranks()).map(of).collect::<Result<Vec<_>>>()?;
        Ok(rounds.into_iter().max().unwrap_or(0))
    }
}
