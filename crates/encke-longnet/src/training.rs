//! One step of training after another, whoever holds the rows.
//!
//! The decision here: a step is a function of the settings, the text and the step's number. Ranks of this
//! process share the attention and nothing else; processes have a share of the rows each, and the sum of
//! their gradients, taken in the order of the ranks, moves the same weights in all of them.

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
pub trait Company {
    /// The sums of everybody's numbers, the same bits for everybody.
    fn sum(&mut self, numbers: &[f32]) -> Result<Vec<f32>>;

    /// Refused by all where somebody's checksum of `what` is another one.
    fn same(&mut self, what: &str, own: u64) -> Result<()>;
}

/// A model on its way.
pub struct Training<'a> {
    settings: Settings,
    text: Text,
    attention: Attention,
    rows: Vec<usize>,
    company: Option<&'a mut dyn Company>,
    model: LongNet,
    weights: Weights,
    optimiser: AdamW,
    losses: Vec<f64>,
}

impl<'a> Training<'a> {
    /// A model that has seen nothing yet. `rows` are the places of a sequence that are computed here.
    pub fn new(
        settings: Settings,
        text: Text,
        attention: Attention,
        rows: Vec<usize>,
        company: Option<&'a mut dyn Company>,
    ) -> Result<Training<'a>> {
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
            Some(company) => summed(&mut **company, loss, &gradients)?,
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use encke::Cut;
    use encke::threads::{Endpoint, endpoints};
    use encke_candle::Shard;
    use encke_ring::meeting::Meeting;

    use super::*;
    use crate::model::Sizes;
    use crate::text::chronicle;

    fn settings() -> Settings {
        let (segment_lengths, dilation_rates) = Settings::longnet(96);
        Settings {
            sizes: Sizes {
                symbols: 256,
                width: 16,
                layers: 2,
                heads: 4,
                kv_heads: 2,
                head_dim: 4,
                recent: 2,
            },
            tokens: 96,
            segment_lengths,
            dilation_rates,
            rate: 3e-3,
            steps: 20,
            seed: 1,
        }
    }

    fn text() -> Text {
        Text::of(chronicle(4000, 1).into_bytes())
    }

    /// Threads that meet as processes do.
    struct Table {
        rank: usize,
        members: Vec<usize>,
        end: Endpoint<Vec<u8>>,
    }

    impl Company for Table {
        fn sum(&mut self, numbers: &[f32]) -> Result<Vec<f32>> {
            Ok(Meeting::new(&mut self.end, self.rank, &self.members).sum(numbers)?)
        }

        fn same(&mut self, what: &str, own: u64) -> Result<()> {
            let mut meeting = Meeting::new(&mut self.end, self.rank, &self.members);
            let first = meeting.broadcast(own.to_le_bytes().to_vec())?;
            anyhow::ensure!(first == own.to_le_bytes(), "{what} differ");
            Ok(())
        }
    }

    /// What processes do, on threads: each has its rows, its weights and its end of a transport.
    fn apart(ranks: usize) -> Vec<Vec<f64>> {
        let patience = Duration::from_secs(120);
        std::thread::scope(|scope| {
            let tables = endpoints(ranks, patience).into_iter().enumerate();
            let tables = tables.map(|(rank, end)| Table {
                rank,
                members: (0..ranks).collect(),
                end,
            });
            let threads: Vec<_> = tables
                .zip(endpoints(ranks, patience))
                .map(|(mut table, end)| {
                    let rank = table.rank;
                    scope.spawn(move || {
                        let settings = settings();
                        let ring = encke::Attention::builder().pattern(settings.pattern().unwrap());
                        let shard = ring
                            .ranks(ranks)
                            .sharding(Cut::Zigzag)
                            .build_shard(rank)
                            .unwrap();
                        let runs = shard.sharding().runs(settings.tokens, rank);
                        let rows = runs.into_iter().flat_map(|run| run.tokens()).collect();
                        let ring = Shard::new(shard, settings.tokens, end, |_| ());
                        let attention = Attention::on(Arc::new(ring));
                        let mut training =
                            Training::new(settings, text(), attention, rows, Some(&mut table))
                                .unwrap();
                        let losses = (0..20).map(|_| training.step().unwrap());
                        let losses = losses.collect::<Vec<f64>>();
                        training.compare().unwrap();
                        losses
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        })
    }

    #[test]
    fn processes_with_their_own_rows_train_the_same_model() {
        let settings = settings();
        let ring = encke::Attention::builder().pattern(settings.pattern().unwrap());
        let rows = (0..settings.tokens).collect();
        let mut alone =
            Training::new(settings, text(), Attention::new(ring).unwrap(), rows, None).unwrap();
        let alone: Vec<f64> = (0..20).map(|_| alone.step().unwrap()).collect();
        assert!(alone[19] < alone[0] - 0.5, "it learns: {alone:?}");
        for ranks in [2, 3] {
            let all = apart(ranks);
            for losses in &all {
                assert_eq!(losses, &all[0], "everybody has the same losses, bit by bit");
            }
            for (got, expected) in all[0].iter().zip(&alone) {
                assert!((got - expected).abs() / expected < 1e-4, "{got} {expected}");
            }
        }
    }
}
