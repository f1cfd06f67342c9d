//! Training steps of one rank.
//!
//! The decision here: a step is a function of the settings, the text and the step's number. Each
//! rank has a share of the rows and its own copy of the weights; gradients are summed in the order
//! of the ranks, so all copies stay equal.

use std::sync::Arc;

use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use encke_candle::Attention;
use encke_core::host::checksum;

use crate::adamw::{AdamW, rate};
use crate::checkpoint::{self, CheckpointFile, CheckpointHeader};
use crate::cross_entropy::cross_entropy;

use crate::model::LongNet;
use crate::settings::TrainingConfig;
use crate::text::Text;
use crate::weights::Weights;

/// Weight decay, multiplied by the learning rate.
const WEIGHT_DECAY: f64 = 0.1;

/// The ranks that train copies of one model on different rows of the same sequences.
pub trait ReplicaGroup: Send {
    /// The sums over all ranks, with the same bits on every rank.
    fn all_reduce_sum(&mut self, values: &[f32]) -> Result<Vec<f32>>;

    /// Fails on all ranks if a checksum of `what` differs.
    fn check_equal(&mut self, what: &str, checksum: u64) -> Result<()>;
}

/// A model in training.
pub struct Trainer {
    settings: TrainingConfig,
    text: Arc<Text>,
    attention: Attention,
    rows: Vec<usize>,
    group: Option<Box<dyn ReplicaGroup>>,
    model: LongNet,
    weights: Weights,
    optimiser: AdamW,
    losses: Vec<f64>,
}

impl Trainer {
    /// A new model, or the one of a checkpoint. `rows` are the positions of a sequence that this
    /// rank computes.
    pub fn new(
        settings: TrainingConfig,
        text: Arc<Text>,
        attention: Attention,
        rows: Vec<usize>,
        group: Option<Box<dyn ReplicaGroup>>,
        resumed: Option<&CheckpointFile>,
    ) -> Result<Trainer> {
        let weights = Weights::new(settings.seed);
        let model = LongNet::new(settings.sizes, &attention, &weights.builder())?;
        let mut optimiser = AdamW::new(&weights, WEIGHT_DECAY)?;
        let mut losses = Vec::new();
        if let Some(file) = resumed {
            file.restore(&mut optimiser)?;
            losses = file.header.losses.clone();
        }
        Ok(Trainer {
            settings,
            text,
            attention,
            rows,
            group,
            model,
            weights,
            optimiser,
            losses,
        })
    }

    /// Model and training settings.
    pub fn settings(&self) -> &TrainingConfig {
        &self.settings
    }

    /// The losses of all steps so far.
    pub fn losses(&self) -> &[f64] {
        &self.losses
    }

    /// Number of parameters.
    pub fn weights(&self) -> usize {
        self.weights.count()
    }

    /// Peak attention bytes of a rank in the last step.
    pub fn rank_bytes(&self) -> usize {
        let reports = self.attention.reports();
        let passes = reports.forward.iter().chain(&reports.backward);
        let ranks = passes.flat_map(|report| &report.memory);
        ranks
            .map(|memory| memory.planned_bytes())
            .max()
            .unwrap_or(0)
    }

    /// Fails on all ranks if their weights differ.
    pub fn compare(&mut self) -> Result<()> {
        let Some(group) = &mut self.group else {
            return Ok(());
        };
        let mut bytes = Vec::new();
        for (_, weight) in self.weights.all() {
            let values = weight.flatten_all()?.to_vec1::<f32>()?;
            bytes.extend(values.iter().flat_map(|x| x.to_le_bytes()));
        }
        let step = self.losses.len();
        group.check_equal(&format!("the weights after step {step}"), checksum(&bytes))
    }

    /// Writes a checkpoint.
    pub fn save(&self, path: &std::path::Path) -> Result<()> {
        let header = CheckpointHeader {
            settings: self.settings.clone(),
            losses: self.losses.clone(),
        };
        checkpoint::save(path, &header, &self.optimiser)
    }

    /// One step; returns its loss in nats per byte.
    pub fn step(&mut self) -> Result<f64> {
        let TrainingConfig {
            tokens,
            rate: peak,
            steps,
            seed,
            ..
        } = self.settings;
        let step = self.losses.len();
        let sequence = self.text.sequence(tokens, seed, step);
        let loss = self.loss(&sequence)?;
        let gradients = self.optimiser.gradients(&loss)?;
        let loss = loss.to_scalar::<f32>()?;
        let (loss, gradients) = match &mut self.group {
            None => (loss, gradients),
            Some(group) => all_reduce(group.as_mut(), loss, &gradients)?,
        };
        self.optimiser.step(&gradients, rate(peak, step, steps))?;
        self.losses.push(f64::from(loss));
        Ok(f64::from(loss))
    }

    /// The contribution of this rank's rows to the mean loss over all rows.
    fn loss(&self, sequence: &[u32]) -> Result<Tensor> {
        let tokens = self.settings.tokens;
        let next: Vec<u32> = self.rows.iter().map(|&row| sequence[row + 1]).collect();
        let rows = self
            .model
            .rows(&[sequence[..tokens].to_vec()], &self.rows)?;
        let logits = self.model.logits(&rows.squeeze(0)?)?;
        let mean = cross_entropy(&logits, next)?;
        Ok((mean * (self.rows.len() as f64 / tokens as f64))?)
    }
}

/// Loss and gradients summed over all ranks.
fn all_reduce(
    group: &mut dyn ReplicaGroup,
    loss: f32,
    gradients: &[Tensor],
) -> Result<(f32, Vec<Tensor>)> {
    let mut values = vec![loss];
    for gradient in gradients {
        values.extend(gradient.flatten_all()?.to_vec1::<f32>()?);
    }
    let sums = group.all_reduce_sum(&values)?;
    let (loss, mut rest) = sums.split_first().context("the sum has no loss")?;
    let mut summed = Vec::with_capacity(gradients.len());
    for gradient in gradients {
        let (sum, others) = rest
            .split_at_checked(gradient.elem_count())
            .context("the sum is shorter than the gradients")?;
        summed.push(Tensor::from_slice(sum, gradient.dims(), &Device::Cpu)?);
        rest = others;
    }
    Ok((*loss, summed))
}
