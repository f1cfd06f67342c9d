//! Records of runs, for `longnet report`: settings, ring, losses and times.

use std::path::Path;

use anyhow::{Context, Result};
use encke_files::json;
use encke_lab::output::OutputFile;
use serde::{Deserialize, Serialize};

use crate::retrieval::RetrievalResult;
use crate::settings::TrainingConfig;

/// The most bytes of a record: 40 for each of a million steps, and more.
const LIMIT: u64 = 64 << 20;

/// A recorded run.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunRecord {
    /// A model trained on a text.
    Training(TrainingRecord),
    /// Models trained on the retrieval task.
    Retrieval(RetrievalRecord),
}

/// A training run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TrainingRecord {
    /// Model and training settings.
    pub settings: TrainingConfig,
    /// Ranks of the ring.
    pub ranks: usize,
    /// Whether the ranks were processes.
    pub processes: bool,
    /// Number of parameters.
    pub weights: usize,
    /// The loss of every step.
    pub losses: Vec<f64>,
    /// Seconds of every step of this run.
    pub seconds: Vec<f64>,
    /// Peak attention bytes of a rank in a pass.
    pub rank_bytes: usize,
}

/// Results of the retrieval task.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RetrievalRecord {
    /// Tokens of a sequence.
    pub tokens: usize,
    /// Tokens of a local segment.
    pub local: usize,
    /// The dilation.
    pub dilation: usize,
    /// Accuracy of guessing.
    pub chance: f64,
    /// The models.
    pub models: Vec<RetrievalResult>,
}

impl RunRecord {
    /// Writes the record as JSON.
    pub fn write(&self, mut output: OutputFile) -> Result<()> {
        let text = serde_json::to_string(self)?;
        output.write(|to| to.write_all(text.as_bytes()))?;
        output.keep()
    }

    /// Reads a record.
    pub fn read(path: &Path) -> Result<RunRecord> {
        let text = encke_files::read(path, LIMIT);
        let text = text.with_context(|| format!("cannot read {}", path.display()))?;
        let record = json::from_slice(&text);
        record.with_context(|| format!("{} is not a record of longnet", path.display()))
    }
}

/// The median of the steps' times; `None` without steps.
pub fn median(seconds: &[f64]) -> Option<f64> {
    let mut sorted = seconds.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}
