//! Checkpoints: weights, the optimiser's moments, settings and losses, in the safetensors format.
//!
//! The decision here: a file is written completely or not at all, and holds everything the next
//! step depends on, so that a resumed run has the losses of an uninterrupted one.

use std::path::Path;

use anyhow::{Context, Result, bail};
use candle_core::{Device, Tensor};
use encke_files::json;
use encke_lab::output::OutputFile;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

use crate::adamw::AdamW;
use crate::settings::TrainingConfig;

/// The key of the header in the file's metadata.
const KEY: &str = "longnet";
/// The most bytes of a checkpoint: three f32 for each of a billion weights, and more.
const LIMIT: u64 = 16 << 30;

/// The metadata of a checkpoint.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CheckpointHeader {
    /// The settings of the run.
    pub settings: TrainingConfig,
    /// The loss of every step so far.
    pub losses: Vec<f64>,
}

/// Writes a checkpoint.
pub fn save(path: &Path, header: &CheckpointHeader, optimiser: &AdamW) -> Result<()> {
    let mut tensors = Vec::new();
    for (name, tensor) in optimiser.state() {
        let values: Vec<f32> = tensor.flatten_all()?.to_vec1()?;
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        tensors.push((name, tensor.dims().to_vec(), bytes));
    }
    let mut views = Vec::new();
    for (name, dims, bytes) in &tensors {
        views.push((
            name.as_str(),
            TensorView::new(Dtype::F32, dims.clone(), bytes)?,
        ));
    }
    let about = HashMap::from([(KEY.to_string(), serde_json::to_string(header)?)]);
    let file = safetensors::serialize(views, Some(about))?;
    let mut output = OutputFile::create(path, &[])?;
    output.write(|to| to.write_all(&file))?;
    output.keep()
}

/// A checkpoint read from a file.
pub struct CheckpointFile {
    /// Its metadata.
    pub header: CheckpointHeader,
    bytes: Vec<u8>,
    path: String,
}

impl CheckpointFile {
    /// Reads a file.
    pub fn open(path: &Path) -> Result<CheckpointFile> {
        let shown = path.display().to_string();
        let bytes = encke_files::read(path, LIMIT);
        let bytes = bytes.with_context(|| format!("cannot read {shown}"))?;
        let what = || format!("{shown} is not a checkpoint of longnet");
        let (length, header) = SafeTensors::read_metadata(&bytes).with_context(what)?;
        json::check_keys(&bytes[8..8 + length]).with_context(what)?;
        let about = header.metadata().as_ref().and_then(|about| about.get(KEY));
        let Some(about) = about else { bail!(what()) };
        Ok(CheckpointFile {
            header: json::from_slice(about.as_bytes()).with_context(what)?,
            bytes,
            path: shown,
        })
    }

    /// The whole file.
    #[cfg(feature = "mpi")]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// A tensor by name.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let what = || format!("{} has no usable tensor {name}", self.path);
        let file = SafeTensors::deserialize(&self.bytes).with_context(what)?;
        let view = file.tensor(name).with_context(what)?;
        if view.dtype() != Dtype::F32 {
            bail!("{}: it holds {:?} instead of F32", what(), view.dtype());
        }
        let number = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let values: Vec<f32> = view.data().chunks_exact(4).map(number).collect();
        Ok(Tensor::from_vec(values, view.shape(), &Device::Cpu)?)
    }

    /// Restores an optimiser and its weights.
    pub fn restore(&self, optimiser: &mut AdamW) -> Result<()> {
        optimiser.resume(self.header.losses.len(), |name| self.tensor(name))
    }
}
