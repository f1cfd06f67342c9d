//! What is done so far, in a small file: written beside its place after every rank and renamed into
//! it, so that whatever ends the process leaves a whole state behind.

use std::path::Path;
use std::{fs, io};

use anyhow::{Context, Result, bail};
use encke_ring::out_of_core::Checksum;
use serde::{Deserialize, Serialize};

use super::options::Settings;
use crate::check::Checked;
use crate::output::OutputFile;

/// What is done so far.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Of which run.
    pub settings: Settings,
    /// Ranks finished: the next one has this number.
    pub finished: usize,
    /// The output so far.
    pub checksum: Checksum,
    /// The samples so far.
    pub checked: Checked,
    /// (query, key) pairs computed.
    pub pairs: u64,
    /// Bytes of rows of others that ranks read.
    pub received_bytes: u64,
    /// Time of all finished ranks.
    pub seconds: f64,
    /// Of that, making the rows of ranks' own inputs.
    pub load_seconds: f64,
    /// Of that, attention proper.
    pub compute_seconds: f64,
    /// How often the run was interrupted.
    pub interruptions: usize,
}

impl State {
    /// Nothing done yet.
    pub fn new(settings: Settings) -> State {
        State {
            settings,
            finished: 0,
            checksum: Checksum::default(),
            checked: Checked::default(),
            pairs: 0,
            received_bytes: 0,
            seconds: 0.0,
            load_seconds: 0.0,
            compute_seconds: 0.0,
            interruptions: 0,
        }
    }

    /// The state of an interrupted run with these settings; none if there is no file.
    pub fn load(path: &Path, settings: &Settings) -> Result<Option<State>> {
        let shown = path.display();
        let text = match fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).with_context(|| format!("cannot read {shown}")),
        };
        let state: State = serde_json::from_slice(&text)
            .with_context(|| format!("{shown} is not the state of a run; use another --state"))?;
        if state.settings != *settings {
            bail!(
                "{shown} is the state of another run ({}, {} tokens, {} ranks, {}, seed {}); give the \
                 same options to go on with it, --fresh to drop it, or another --state",
                state.settings.device,
                state.settings.tokens,
                state.settings.ranks,
                state.settings.dtype,
                state.settings.seed,
            );
        }
        Ok(Some(state))
    }

    /// Writes the state.
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut file = OutputFile::create(path, &[])?;
        file.write(|to| Ok(serde_json::to_writer(to, self)?))?;
        file.keep()
    }
}
