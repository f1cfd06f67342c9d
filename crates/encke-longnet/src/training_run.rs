//! A training run around its steps: inputs, progress, checkpoints, summary and record.
//!
//! [`Trainer`] computes the steps. The decision here: output files are created before the first
//! step, and only the root of several ranks creates, writes and prints.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, bail};
use encke::explain::bytes;
use encke_lab::output::OutputFile;
use encke_lab::terminal::{long_bar, note, say};
use indicatif::ProgressBar;

use crate::checkpoint::CheckpointFile;
use crate::record::{RunRecord, TrainingRecord, median};
use crate::settings::TrainingConfig;
use crate::text::Text;
use crate::trainer::Trainer;

/// Files and steps of a run.
#[derive(Debug)]
pub struct TrainingRun<'a> {
    /// The text.
    pub text: &'a Path,
    /// The step after which the run stops.
    pub last: usize,
    /// Steps between two checkpoints.
    pub every: usize,
    /// The checkpoint file.
    pub checkpoint: Option<&'a Path>,
    /// Whether to resume from it.
    pub resume: bool,
    /// The record file.
    pub record: Option<&'a Path>,
}

/// Files opened before the first step.
pub struct RunInputs {
    /// The text.
    pub text: Arc<Text>,
    /// The checkpoint to resume from.
    pub resumed: Option<CheckpointFile>,
    /// The record to write.
    pub record: Option<OutputFile>,
}

/// The ring that ran the steps.
#[derive(Debug)]
pub struct TrainingRing {
    /// Number of ranks.
    pub ranks: usize,
    /// Whether the ranks were processes.
    pub processes: bool,
    /// Peak attention bytes of a rank in a pass.
    pub rank_bytes: usize,
}

impl TrainingRun<'_> {
    /// Reads the inputs; the root also creates the output files.
    pub fn prepare(&self, settings: &TrainingConfig, is_root: bool) -> Result<RunInputs> {
        let text = Arc::new(Text::read(self.text, settings.tokens)?);
        let resumed = self.resumed(settings)?;
        let mut record = None;
        if is_root {
            let mut others = vec![("the text", self.text)];
            if let Some(path) = self.checkpoint {
                // Dropped at once: this only checks that the file can be created.
                OutputFile::create(path, &others)?;
                others.push(("the checkpoint", path));
            }
            let created = self.record.map(|path| OutputFile::create(path, &others));
            record = created.transpose()?;
        }
        Ok(RunInputs {
            text,
            resumed,
            record,
        })
    }

    /// The checkpoint to resume from, if requested; its settings must be equal.
    fn resumed(&self, settings: &TrainingConfig) -> Result<Option<CheckpointFile>> {
        let Some(path) = self.checkpoint.filter(|_| self.resume) else {
            return Ok(None);
        };
        let file = CheckpointFile::open(path)?;
        if file.header.settings != *settings {
            bail!(
                "{} was trained with other settings: {}; give the same ones (the ring may differ)",
                path.display(),
                serde_json::to_string(&file.header.settings)?
            );
        }
        Ok(Some(file))
    }

    /// Runs the remaining steps; returns the seconds of each.
    pub fn take_steps(&self, trainer: &mut Trainer, is_root: bool) -> Result<Vec<f64>> {
        let first = trainer.losses().len();
        let bar = match is_root {
            true => long_bar(self.last.saturating_sub(first)),
            false => ProgressBar::hidden(),
        };
        let mut seconds = Vec::new();
        for step in first..self.last {
            let begin = Instant::now();
            let loss = trainer.step()?;
            let took = begin.elapsed().as_secs_f64();
            seconds.push(took);
            bar.inc(1);
            bar.set_message(format!(
                "loss {loss:.4}, {:.0} tokens/s, {} a rank",
                trainer.settings().tokens as f64 / took,
                bytes(trainer.rank_bytes())
            ));
            if (step + 1) % self.every == 0 || step + 1 == self.last {
                trainer.compare()?;
                if let Some(path) = self.checkpoint.filter(|_| is_root) {
                    trainer.save(path)?;
                }
            }
        }
        bar.finish_and_clear();
        Ok(seconds)
    }

    /// Writes the record and prints the summary.
    pub fn finish(
        &self,
        trainer: &Trainer,
        seconds: Vec<f64>,
        ring: &TrainingRing,
        record: Option<OutputFile>,
    ) -> Result<()> {
        if let Some(output) = record {
            let record = RunRecord::Training(TrainingRecord {
                settings: trainer.settings().clone(),
                ranks: ring.ranks,
                processes: ring.processes,
                weights: trainer.weights(),
                losses: trainer.losses().to_vec(),
                rank_bytes: ring.rank_bytes,
                seconds: seconds.clone(),
            });
            record.write(output)?;
        }
        summarise(trainer, &seconds, ring)
    }
}

fn summarise(trainer: &Trainer, seconds: &[f64], ring: &TrainingRing) -> Result<()> {
    let (losses, tokens) = (trainer.losses(), trainer.settings().tokens);
    let (Some(first), Some(last)) = (losses.first(), losses.last()) else {
        return Ok(());
    };
    let who = match (ring.ranks, ring.processes) {
        (1, _) => "1 rank".to_string(),
        (ranks, false) => format!("{ranks} ranks"),
        (ranks, true) => format!("{ranks} processes"),
    };
    say(&format!(
        "{} weights, {tokens} tokens, {who}: loss {first:.4} in step 1, {last:.6} in step {}\n",
        trainer.weights(),
        losses.len()
    ))?;
    if let Some(median) = median(seconds) {
        note(&format!(
            "{median:.3} s a step, {:.0} tokens/s, {} a rank in attention",
            tokens as f64 / median,
            bytes(ring.rank_bytes)
        ));
    }
    Ok(())
}
