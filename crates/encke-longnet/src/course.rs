//! The course of a run: what it reads, the steps it takes, what it shows and writes down.
//!
//! How a step is computed, and by whom, is the training's. The decision here: places of files are
//! claimed before the first step, and only one of several processes claims, writes and speaks.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, bail};
use encke::explain::bytes;
use encke_lab::output::OutputFile;
use encke_lab::terminal::{long_bar, note, say};
use indicatif::ProgressBar;

use crate::checkpoint::Read;
use crate::record::{self, Record};
use crate::settings::Settings;
use crate::text::Text;
use crate::training::Training;

/// What the steps are, and what becomes of them.
#[derive(Debug)]
pub struct Course<'a> {
    /// The text.
    pub text: &'a Path,
    /// The step after which it stops.
    pub last: usize,
    /// Steps between two checkpoints.
    pub every: usize,
    /// Where checkpoints go.
    pub checkpoint: Option<&'a Path>,
    /// Whether to go on from there.
    pub resume: bool,
    /// Where the record goes.
    pub record: Option<&'a Path>,
}

/// What was read and claimed before the first step.
pub struct Ready {
    /// The text.
    pub text: Arc<Text>,
    /// What to go on from.
    pub resumed: Option<Read>,
    /// The place of the record.
    pub record: Option<OutputFile>,
}

/// Who took the steps.
#[derive(Debug)]
pub struct Ring {
    /// How many ranks.
    pub ranks: usize,
    /// Whether they were processes.
    pub processes: bool,
    /// Most bytes that a rank's attention held in a pass.
    pub rank_bytes: usize,
}

impl Course<'_> {
    /// Reads what there is to read; who speaks also claims the places of what will be written.
    pub fn prepare(&self, settings: &Settings, speaks: bool) -> Result<Ready> {
        let text = Arc::new(Text::read(self.text, settings.tokens)?);
        let resumed = self.resumed(settings)?;
        let mut record = None;
        if speaks {
            let mut others = vec![("the text", self.text)];
            if let Some(path) = self.checkpoint {
                // Let go at once: it is claimed again whenever there is something to write.
                OutputFile::create(path, &others)?;
                others.push(("the checkpoint", path));
            }
            let claimed = self.record.map(|path| OutputFile::create(path, &others));
            record = claimed.transpose()?;
        }
        Ok(Ready {
            text,
            resumed,
            record,
        })
    }

    /// What to go on from, if that was asked for and is the same run.
    fn resumed(&self, settings: &Settings) -> Result<Option<Read>> {
        let Some(path) = self.checkpoint.filter(|_| self.resume) else {
            return Ok(None);
        };
        let read = Read::open(path)?;
        if read.told.settings != *settings {
            bail!(
                "{} was trained with other settings: {}; give the same ones (the ring may differ)",
                path.display(),
                serde_json::to_string(&read.told.settings)?
            );
        }
        Ok(Some(read))
    }

    /// Takes the steps that are left; returns the seconds of each.
    pub fn take(&self, training: &mut Training, speaks: bool) -> Result<Vec<f64>> {
        let first = training.losses().len();
        let bar = match speaks {
            true => long_bar(self.last.saturating_sub(first)),
            false => ProgressBar::hidden(),
        };
        let mut seconds = Vec::new();
        for step in first..self.last {
            let begin = Instant::now();
            let loss = training.step()?;
            let took = begin.elapsed().as_secs_f64();
            seconds.push(took);
            bar.inc(1);
            bar.set_message(format!(
                "loss {loss:.4}, {:.0} tokens/s, {} a rank",
                training.settings().tokens as f64 / took,
                bytes(training.rank_bytes())
            ));
            if (step + 1) % self.every == 0 || step + 1 == self.last {
                training.compare()?;
                if let Some(path) = self.checkpoint.filter(|_| speaks) {
                    training.save(path)?;
                }
            }
        }
        bar.finish_and_clear();
        Ok(seconds)
    }

    /// Says what came of it, and writes it down.
    pub fn conclude(
        &self,
        training: &Training,
        seconds: Vec<f64>,
        ring: &Ring,
        record: Option<OutputFile>,
    ) -> Result<()> {
        summarise(training, &seconds, ring)?;
        let Some(output) = record else {
            return Ok(());
        };
        let record = Record::Training(record::Training {
            settings: training.settings().clone(),
            ranks: ring.ranks,
            processes: ring.processes,
            weights: training.weights(),
            losses: training.losses().to_vec(),
            rank_bytes: ring.rank_bytes,
            seconds,
        });
        record.write(output)
    }
}

fn summarise(training: &Training, seconds: &[f64], ring: &Ring) -> Result<()> {
    let (losses, tokens) = (training.losses(), training.settings().tokens);
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
        training.weights(),
        losses.len()
    ))?;
    let mut sorted = seconds.to_vec();
    sorted.sort_by(f64::total_cmp);
    if let Some(median) = sorted.get(sorted.len() / 2) {
        note(&format!(
            "{median:.3} s a step, {:.0} tokens/s, {} a rank in attention",
            tokens as f64 / median,
            bytes(ring.rank_bytes)
        ));
    }
    Ok(())
}
