//! The weights of a model by name, initialised from a seed.
//!
//! candle's random numbers cannot be seeded on the CPU. The decision here: a weight's initial
//! values depend only on the seed and on its name, so that models on any ring and in any process
//! start equal.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Error, Result, Shape, Tensor, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use encke::conformance::Random;

/// Weights by name. Clones share them.
#[derive(Clone)]
pub struct Weights {
    seed: u64,
    variables: Arc<Mutex<BTreeMap<String, Var>>>,
}

impl Weights {
    /// No weights yet; they are created when a model first requests them.
    pub fn new(seed: u64) -> Weights {
        Weights {
            seed,
            variables: Arc::default(),
        }
    }

    /// A builder for a model.
    pub fn builder(&self) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self.clone()), DType::F32, Device::Cpu)
    }

    /// All weights, in the order of their names.
    pub fn all(&self) -> Vec<(String, Var)> {
        let variables = self.lock();
        variables
            .iter()
            .map(|(name, variable)| (name.clone(), variable.clone()))
            .collect()
    }

    /// Number of parameters.
    pub fn count(&self) -> usize {
        self.lock().values().map(|weight| weight.elem_count()).sum()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Var>> {
        self.variables
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl SimpleBackend for Weights {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        _: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let mut variables = self.lock();
        if let Some(variable) = variables.get(name) {
            if variable.shape() != &shape {
                return Err(Error::msg(format!(
                    "the weight {name} is {:?}, but {shape:?} in this model",
                    variable.dims()
                )));
            }
            return Ok(variable.as_tensor().clone());
        }
        let values = initial_values(self.seed, name, &shape, init);
        let variable = Var::from_tensor(&Tensor::from_vec(values, shape, device)?)?;
        let tensor = variable.as_tensor().clone();
        variables.insert(name.to_string(), variable);
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        let variables = self.lock();
        let variable = variables.get(name);
        let found = variable.map(|variable| variable.as_tensor().clone());
        found.ok_or_else(|| Error::msg(format!("there is no weight {name}")))
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }
}

/// Initial values: constants as requested, everything else approximately normal with the requested
/// standard deviation, or 1/sqrt(fan-in) for Kaiming.
fn initial_values(seed: u64, name: &str, shape: &Shape, init: Init) -> Vec<f32> {
    let deviation = match init {
        Init::Const(value) => return vec![value as f32; shape.elem_count()],
        Init::Randn { stdev, .. } => stdev,
        Init::Uniform { up, .. } => up / 3f64.sqrt(),
        Init::Kaiming { .. } => {
            let inputs = shape.dims().last().copied().unwrap_or(1);
            1.0 / (inputs.max(1) as f64).sqrt()
        }
    };
    // FNV-1a.
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let mut random = Random::new(seed ^ hash);
    // The sum of four uniform numbers is approximately normal; its variance is 4/3.
    let mut normal = || (0..4).map(|_| random.unit()).sum::<f64>() * 0.75f64.sqrt();
    (0..shape.elem_count())
        .map(|_| (deviation * normal()) as f32)
        .collect()
}
