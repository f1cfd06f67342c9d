//! The weights of a model by name: made from a seed, or read from a file.
//!
//! candle's own random numbers cannot be seeded on the CPU. The decision here: a weight's first values
//! depend on the seed and on its name, and on nothing else, so that models of any depth, on any ring and
//! in any process begin alike.

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
    /// None yet: they are made as a model asks for them.
    pub fn new(seed: u64) -> Weights {
        Weights {
            seed,
            variables: Arc::default(),
        }
    }

    /// What a model takes them from.
    pub fn builder(&self) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self.clone()), DType::F32, Device::Cpu)
    }

    /// All of them, in the order of their names.
    pub fn all(&self) -> Vec<(String, Var)> {
        let variables = self.lock();
        variables
            .iter()
            .map(|(name, variable)| (name.clone(), variable.clone()))
            .collect()
    }

    /// How many numbers they are.
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
                    "the weight {name} is {:?}, but this model wants {shape:?}",
                    variable.dims()
                )));
            }
            return Ok(variable.as_tensor().clone());
        }
        let values = first_values(self.seed, name, &shape, init);
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

/// What a weight begins with: constants as asked, everything else bell-shaped, as wide as it was asked
/// or as keeps the size of a row.
fn first_values(seed: u64, name: &str, shape: &Shape, init: Init) -> Vec<f32> {
    let width = match init {
        Init::Const(value) => return vec![value as f32; shape.elem_count()],
        Init::Randn { stdev, .. } => stdev,
        Init::Uniform { up, .. } => up / 3f64.sqrt(),
        Init::Kaiming { .. } => {
            let inputs = shape.dims().last().copied().unwrap_or(1);
            1.0 / (inputs.max(1) as f64).sqrt()
        }
    };
    let letters = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, letter| {
        (hash ^ u64::from(letter)).wrapping_mul(0x0100_0000_01b3)
    });
    let mut random = Random::new(seed ^ letters);
    // A sum of four even numbers is bell-shaped enough; its variance is 4/3.
    let mut bell = || (0..4).map(|_| random.unit()).sum::<f64>() * 0.75f64.sqrt();
    (0..shape.elem_count())
        .map(|_| (width * bell()) as f32)
        .collect()
}
