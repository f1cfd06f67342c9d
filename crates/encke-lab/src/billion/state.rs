//! The state of a run, in a small file that is replaced atomically after every rank, so that a
//! process which ends at any time leaves a complete state behind.

use std::path::Path;
use std::time::Duration;
use std::{fs, io};

use anyhow::{Context, Result, bail};
use encke_ring::RankReport;
use encke_ring::out_of_core::Checksum;
use serde::{Deserialize, Serialize};

use super::settings::BillionSettings;
use crate::output::OutputFile;
use crate::row_check::RowCheck;

/// The ranks that are finished, and their results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunState {
    /// The settings of the run.
    pub settings: BillionSettings,
    /// Number of finished ranks.
    pub finished: usize,
    /// The checksum of the output so far.
    pub checksum: Checksum,
    /// The sampled rows so far.
    pub checked: RowCheck,
    /// (query, key) pairs computed.
    pub pairs: u64,
    /// Bytes that ranks read of the rows of other ranks.
    pub received_bytes: u64,
    /// Time of all finished ranks.
    pub seconds: f64,
    /// Of that, the time to generate the ranks' own inputs.
    pub load_seconds: f64,
    /// Of that, the time of attention itself.
    pub compute_seconds: f64,
    /// How often the run was interrupted.
    pub interruptions: usize,
}

impl RunState {
    /// A state without finished ranks.
    pub fn new(settings: BillionSettings) -> RunState {
        RunState {
            settings,
            finished: 0,
            checksum: Checksum::default(),
            checked: RowCheck::default(),
            pairs: 0,
            received_bytes: 0,
            seconds: 0.0,
            load_seconds: 0.0,
            compute_seconds: 0.0,
            interruptions: 0,
        }
    }

    /// The state of an interrupted run with these settings, or a new one; saved, so that a path
    /// that cannot be written is found before there is anything to lose.
    pub fn open(path: &Path, settings: &BillionSettings, fresh: bool) -> Result<RunState> {
        let loaded = match fresh {
            true => None,
            false => RunState::load(path, settings)?,
        };
        let state = match loaded {
            Some(mut state) => {
                state.interruptions += 1;
                state
            }
            None => RunState::new(settings.clone()),
        };
        state.save(path)?;
        Ok(state)
    }

    /// The state of an interrupted run with these settings; `None` if there is no file.
    fn load(path: &Path, settings: &BillionSettings) -> Result<Option<RunState>> {
        let shown = path.display();
        let text = match fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).with_context(|| format!("cannot read {shown}")),
        };
        let state: RunState = serde_json::from_slice(&text)
            .with_context(|| format!("{shown} is not the state of a run; use another --state"))?;
        if state.settings != *settings {
            bail!(
                "{shown} is the state of another run ({}, {} tokens, {} ranks, {}, seed {}); give \
                 the same options to continue it, --fresh to drop it, or another --state",
                state.settings.device,
                state.settings.tokens,
                state.settings.ranks,
                state.settings.dtype,
                state.settings.seed,
            );
        }
        Ok(Some(state))
    }

    /// Adds a finished rank.
    pub fn add(&mut self, done: &RankReport, elapsed: Duration) {
        self.finished += 1;
        self.pairs += done.pairs as u64;
        let received = done.events.iter().map(|event| event.received_bytes as u64);
        self.received_bytes += received.sum::<u64>();
        self.seconds += elapsed.as_secs_f64();
    }

    /// Writes the state.
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut file = OutputFile::create(path, &[])?;
        file.write(|to| Ok(serde_json::to_writer(to, self)?))?;
        file.keep()
    }
}
