//! One step of training after another, whoever holds the rows.
//!
//! The decision here: a step is a function of the settings, the text and the step's number. Each rank has
//! a share of the rows, and weights of its own; the sum of all gradients, taken in the order of the ranks,
//! moves them in the same way everywhere.

use std::sync::Arc;

use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use encke_candle::Attention;
use encke_core::host::checksum;

use crate::adamw::{AdamW, rate};
use crate::checkpoint::{self, Told};
use crate::cross_entropy::cross_entropy;
use crate::gradients;
use crate::model::LongNet;
use crate::settings::Settings;
use crate::text::Text;
use crate::weights::Weights;

/// Draws weights towards zero, by so much of the rate in a step.
const DECAY: f64 = 0.1;

/// Others who train the same model on other rows of the same sequences.
pub trait Company: Send {
    /// The sums of everybody's numbers, the same bits for everybody.
    fn sum(&mut self, numbers: &[f32]) -> Result<Vec<f32>>;

    /// Refused by all where somebody's checksum of `what` is another one.
    fn same(&mut self, what: &str, own: u64) -> Result<()>;
}

/// A model on its way.
pub struct Training {
    settings: Settings,
    text: Arc<Text>,
    attention: Attention,
    rows: Vec<usize>,
    company: Option<Box<dyn Company>>,
    model: LongNet,
    weights: Weights,
    optimiser: AdamW,
    losses: Vec<f64>,
}

impl Training {
    /// A model that has seen nothing yet. `rows` are the places of a sequence that are computed here.
    pub fn new(
        settings: Settings,
        text: Arc<Text>,
        attention: Attention,
        rows: Vec<usize>,
        company: Option<Box<dyn Company>>,
    ) -> Result<Training> {
        let weights = Weights::new(settings.seed);
        let model = LongNet::new(settings.sizes, &attention, &weights.builder())?;
        let optimiser = AdamW::new(&weights, DECAY)?;
        Ok(Training {
            settings,
            text,
            attention,
            rows,
            company,
            model,
            weights,
            optimiser,
            losses: Vec::new(),
        })
    }

    /// Goes on where a checkpoint ends.
    pub fn resume(&mut self, from: &checkpoint::Read) -> Result<()> {
        from.restore(&mut self.optimiser)?;
        self.losses = from.told.losses.clone();
        Ok(())
    }

    /// What is trained.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The losses of all steps so far.
    pub fn losses(&self) -> &[f64] {
        &self.losses
    }

    /// How many numbers are learned.
    pub fn weights(&self) -> usize {
        self.weights.count()
    }

    /// Most bytes that a rank held in the attention of the last step.
    pub fn rank_bytes(&self) -> usize {
        let reports = self.attention.reports();
        let passes = reports.forward.iter().chain(&reports.backward);
        let ranks = passes.flat_map(|report| &report.memory);
        ranks
            .map(|memory| memory.planned_bytes())
            .max()
            .unwrap_or(0)
    }

    /// Refused by all where somebody's weights have gone another way.
    pub fn compare(&mut self) -> Result<()> {
        let Some(company) = &mut self.company else {
            return Ok(());
        };
        let mut bytes = Vec::new();
        for (_, weight) in self.weights.all() {
            let numbers = weight.flatten_all()?.to_vec1::<f32>()?;
            bytes.extend(numbers.iter().flat_map(|x| x.to_le_bytes()));
        }
        let step = self.losses.len();
        company.same(&format!("the weights after step {step}"), checksum(&bytes))
    }

    /// Writes everything down.
    pub fn save(&self, path: &std::path::Path) -> Result<()> {
        let told = Told {
            settings: self.settings.clone(),
            losses: self.losses.clone(),
        };
        checkpoint::save(path, &told, &self.optimiser)
    }

    /// One step; returns its loss, in nats for each byte.
    pub fn step(&mut self) -> Result<f64> {
        let Settings {
            tokens,
            rate: highest,
            steps,
            seed,
            ..
        } = self.settings;
        let step = self.losses.len();
        let sequence = self.text.sequence(tokens, seed, step);
        let loss = self.loss(&sequence)?;
        let gradients = gradients::of(&loss, &self.optimiser)?;
        let loss = loss.to_scalar::<f32>()?;
        let (loss, gradients) = match &mut self.company {
            None => (loss, gradients),
            Some(company) => summed(company.as_mut(), loss, &gradients)?,
        };
        self.optimiser
            .step(&gradients, rate(highest, step, steps))?;
        self.losses.push(f64::from(loss));
        Ok(f64::from(loss))
    }

    /// The share that the rows here have in the mean over all rows.
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

/// Loss and gradients summed over everybody.
fn summed(
    company: &mut dyn Company,
    loss: f32,
    gradients: &[Tensor],
) -> Result<(f32, Vec<Tensor>)> {
    let mut numbers = vec![loss];
    for gradient in gradients {
        numbers.extend(gradient.flatten_all()?.to_vec1::<f32>()?);
    }
    let sums = company.sum(&numbers)?;
    let (loss, mut rest) = sums.split_first().context("a sum has a loss")?;
    let mut whole = Vec::with_capacity(gradients.len());
    for gradient in gradients {
        let (own, others) = rest
            .split_at_checked(gradient.elem_count())
            .context("a sum has as many numbers as its parts")?;
        whole.push(Tensor::from_slice(own, gradient.dims(), &Device::Cpu)?);
        rest = others;
    }
    Ok((*loss, whole))
}
