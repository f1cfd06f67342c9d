//! A random call of either pass, for trials: a plan, and tensors for it.

use std::sync::Arc;

use encke_core::conformance::{Configuration, Random};
use encke_core::plan::program::Role;
use encke_core::plan::{Pass, Plan, Request};
use encke_core::{Result, Tensor, View};
use encke_ring::call;

/// A plan with tensors for it.
#[derive(Debug)]
pub struct RandomCall {
    /// The plan.
    pub plan: Arc<Plan>,
    inputs: Vec<(Role, Tensor)>,
}

impl RandomCall {
    /// One of the two passes of a configuration. What a backward pass is given of the forward
    /// pass is random too: whoever drives ranks cannot tell.
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
            let numbers: Vec<f64> = (0..count).map(|_| 2.0 * random.unit()).collect();
            inputs.push((role, Tensor::from_f64(dtype, dims, &numbers)?));
        }
        Ok(RandomCall { plan, inputs })
    }

    /// The tensors, lent.
    pub fn inputs(&self) -> Vec<(Role, View<'_>)> {
        let inputs = self.inputs.iter();
        inputs
            .map(|(role, tensor)| (*role, tensor.view()))
            .collect()
    }

    /// The rounds of the longest program.
    pub fn rounds(&self) -> Result<usize> {
        let of = |rank| Ok(self.plan.rank(rank)?.rounds.len());
        let rounds = (0..self.plan.ranks()).map(of).collect::<Result<Vec<_>>>()?;
        Ok(rounds.into_iter().max().unwrap_or(0))
    }
}
