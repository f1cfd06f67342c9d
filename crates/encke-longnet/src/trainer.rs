//! Training steps of one rank.
//!
//! The decision here: a step is a function of the settings, the text and the step's number. Each
//! rank has a share of the rows and its own copy of the weights; gradients are summed in the order
//! of the ranks, so all copies stay equal. Where bits must not depend on the ring, a rank's rows
//! are blocks of a fixed size, each with a copy of the weights, and gradients are summed in the
//! order of the blocks.

use std::sync::Arc;

use anyhow::{Context, Result};
use candle_core::{Device, Tensor, Var};
use encke_candle::Attention;
use encke_core::host::checksum;

use crate::adamw::{AdamW, gradients_of, rate};
use crate::checkpoint::{self, CheckpointFile, CheckpointHeader};
use crate::cross_entropy::cross_entropy;

use crate::model::LongNet;
use crate::settings::{RowBlocks, TrainingConfig};
use crate::text::Text;
use crate::weights::Weights;

/// Weight decay, multiplied by the learning rate.
const WEIGHT_DECAY: f64 = 0.1;

/// The ranks that train copies of one model on different rows of the same sequences.
pub trait ReplicaGroup: Send {
    /// The sums over the terms of all ranks, in their order, with the same bits on every rank. Rank
    /// i has `counts[i]` terms, one after the other.
    fn all_reduce_sum(&mut self, terms: &[f32], counts: &[usize]) -> Result<Vec<f32>>;

    /// Fails on all ranks if a checksum of `what` differs.
    fn check_equal(&mut self, what: &str, checksum: u64) -> Result<()>;
}

/// A model in training.
pub struct Trainer {
    settings: TrainingConfig,
    text: Arc<Text>,
    attention: Attention,
    rows: Vec<usize>,
    blocks: RowBlocks,
    group: Option<Box<dyn ReplicaGroup>>,
    /// A copy of the model for each block of rows; the optimiser has the weights of the first.
    copies: Vec<(LongNet, Weights)>,
    optimiser: AdamW,
    losses: Vec<f64>,
}

impl Trainer {
    /// A new model, or the one of a checkpoint. `rows` are the positions of a sequence that this
    /// rank computes, and `blocks` those whose gradients are summed in order.
    pub fn new(
        settings: TrainingConfig,
        text: Arc<Text>,
        attention: Attention,
        (rows, blocks): (Vec<usize>, RowBlocks),
        group: Option<Box<dyn ReplicaGroup>>,
        resumed: Option<&CheckpointFile>,
    ) -> Result<Trainer> {
        let copy = |_: &[usize]| -> Result<(LongNet, Weights)> {
            let weights = Weights::new(settings.seed);
            let model = LongNet::new(settings.sizes, &attention, &weights.builder())?;
            Ok((model, weights))
        };
        let copies: Vec<_> = rows.chunks(blocks.size).map(copy).collect::<Result<_>>()?;
        let (_, weights) = copies.first().context("a rank has rows")?;
        let mut optimiser = AdamW::new(weights, WEIGHT_DECAY)?;
        let mut losses = Vec::new();
        if let Some(file) = resumed {
            file.restore(&mut optimiser)?;
            losses = file.header.losses.clone();
        }
        let trainer = Trainer {
            settings,
            text,
            attention,
            rows,
            blocks,
            group,
            copies,
            optimiser,
            losses,
        };
        trainer.update_copies()?;
        Ok(trainer)
    }

    /// The weights that the optimiser has.
    fn trained(&self) -> &Weights {
        &self.copies[0].1
    }

    /// Gives all copies the weights of the first.
    fn update_copies(&self) -> Result<()> {
        let trained = self.trained().all();
        for (_, weights) in &self.copies[1..] {
            for ((_, weight), (_, from)) in weights.all().iter().zip(&trained) {
                weight.set(from.as_tensor())?;
            }
        }
        Ok(())
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
        self.trained().count()
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
        let weights = self.trained().all();
        let Some(group) = &mut self.group else {
            return Ok(());
        };
        let mut bytes = Vec::new();
        for (_, weight) in weights {
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
        let losses = self.block_losses(&sequence)?;
        let whole = losses[1..]
            .iter()
            .try_fold(losses[0].clone(), |sum, loss| sum + loss)?;
        let all = whole.backward()?;
        let mut terms = Vec::new();
        for ((_, weights), loss) in self.copies.iter().zip(&losses) {
            let weights: Vec<Var> = weights.all().into_iter().map(|(_, var)| var).collect();
            terms.push((
                loss.to_scalar::<f32>()?,
                gradients_of(weights.iter(), &all)?,
            ));
        }
        let (loss, gradients) = match (&mut self.group, terms.len()) {
            (None, 1) => terms.remove(0),
            (None, _) => summed(&terms, sum_in_order)?,
            (Some(group), _) => {
                let counts = &self.blocks.counts;
                summed(&terms, |terms, _| group.all_reduce_sum(terms, counts))?
            }
        };
        self.optimiser.step(&gradients, rate(peak, step, steps))?;
        self.update_copies()?;
        self.losses.push(f64::from(loss));
        Ok(f64::from(loss))
    }

    /// The contribution of each of this rank's blocks to the mean loss over all rows.
    fn block_losses(&self, sequence: &[u32]) -> Result<Vec<Tensor>> {
        let tokens = self.settings.tokens;
        let models: Vec<&LongNet> = self.copies.iter().map(|(model, _)| model).collect();
        let blocks: Vec<&[usize]> = self.rows.chunks(self.blocks.size).collect();
        let sequences = [sequence[..tokens].to_vec()];
        let hidden = LongNet::rows_of_blocks(&models, &sequences, &blocks)?;
        let mut losses = Vec::new();
        for ((model, rows), hidden) in models.iter().zip(blocks).zip(hidden) {
            let next: Vec<u32> = rows.iter().map(|&row| sequence[row + 1]).collect();
            let logits = model.logits(&hidden.squeeze(0)?)?;
            let mean = cross_entropy(&logits, next)?;
            losses.push((mean * (rows.len() as f64 / tokens as f64))?);
        }
        Ok(losses)
    }
}

/// The sum of terms of `length` elements, one after the other.
fn sum_in_order(terms: &[f32], length: usize) -> Result<Vec<f32>> {
    let mut sums = vec![0.0; length];
    for term in terms.chunks(length) {
        sums.iter_mut().zip(term).for_each(|(sum, x)| *sum += x);
    }
    Ok(sums)
}

/// Loss and gradients of all terms, as `sum` sums them: given the terms, and the elements of one.
fn summed(
    terms: &[(f32, Vec<Tensor>)],
    sum: impl FnOnce(&[f32], usize) -> Result<Vec<f32>>,
) -> Result<(f32, Vec<Tensor>)> {
    let mut values = Vec::new();
    for (loss, gradients) in terms {
        values.push(*loss);
        for gradient in gradients {
            values.extend(gradient.flatten_all()?.to_vec1::<f32>()?);
        }
    }
    let (_, gradients) = terms.first().context("a rank has rows")?;
    let sums = sum(&values, values.len() / terms.len())?;
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
