//! A run as a page shows it: what was trained, on which ring, and how the loss fell.

use std::path::Path;

use anyhow::{Context, Result};
use encke_lab::output::OutputFile;
use serde::{Deserialize, Serialize};

use crate::retrieval::Learned;
use crate::settings::Settings;

/// Something that happened.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Record {
    /// A model was trained on a text.
    Training(Training),
    /// Models learned the retrieval task.
    Retrieval(Retrieval),
}

/// A training run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Training {
    /// What was trained.
    pub settings: Settings,
    /// Ranks of the ring.
    pub ranks: usize,
    /// Whether they were processes.
    pub processes: bool,
    /// How many weights there are.
    pub weights: usize,
    /// The loss of every step.
    pub losses: Vec<f64>,
    /// Seconds of every step of this run.
    pub seconds: Vec<f64>,
    /// Most bytes that a rank's attention held in a pass.
    pub rank_bytes: usize,
}

/// What came of the retrieval task.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Retrieval {
    /// Tokens of a sequence.
    pub tokens: usize,
    /// Tokens of a local segment.
    pub local: usize,
    /// The dilation.
    pub dilation: usize,
    /// Share of right answers by guessing.
    pub chance: f64,
    /// The models.
    pub models: Vec<Learned>,
}

impl Record {
    /// Writes it.
    pub fn write(&self, mut output: OutputFile) -> Result<()> {
        let text = serde_json::to_string(self)?;
        output.write(|to| to.write_all(text.as_bytes()))?;
        output.keep()
    }

    /// Reads one.
    pub fn read(path: &Path) -> Result<Record> {
        let text = std::fs::read_to_string(path);
        let text = text.with_context(|| format!("cannot read {}", path.display()))?;
        let record = serde_json::from_str(&text);
        record.with_context(|| format!("{} is no record of longnet", path.display()))
    }
}
