//! The state of a run, in a small file that is replaced atomically after every rank, so that a
//! process which ends at any time leaves a complete state behind.
//!
//! The decision here: a result that took a day is not continued from a state that may be wrong. The
//! file is JSON whose first field is a checksum of the others, and what it says was computed must
//! be what the plan says of those ranks.

use std::iter::StepBy;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;
use std::{fs, io};

use anyhow::{Context, Result, bail};
use encke::plan::Plan;
use encke_core::host::checksum;
use encke_core::job::Job;
use encke_core::plan::program::Task;
use encke_files::json;
use encke_ring::RankReport;
use encke_ring::out_of_core::Checksum;
use serde::{Deserialize, Serialize};

use super::settings::BillionSettings;
use crate::format;
use crate::output::OutputFile;
use crate::row_check::RowCheck;

/// The most bytes of a state.
const LIMIT: u64 = 1 << 20;

/// The ranks that a process runs, in order.
pub type OwnRanks = StepBy<Range<usize>>;

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
    pub fn open(
        path: &Path,
        settings: &BillionSettings,
        (plan, ranks): (&Plan, OwnRanks),
        fresh: bool,
    ) -> Result<RunState> {
        let loaded = match fresh {
            true => None,
            false => RunState::load(path)?,
        };
        let state = match loaded {
            // A run that finished no rank has left nothing to lose.
            Some(state) if state.finished > 0 => state.continued(path, settings, plan, ranks)?,
            _ => RunState::new(settings.clone()),
        };
        state.save(path)?;
        Ok(state)
    }

    /// The state as it was written; `None` if there is no file.
    fn load(path: &Path) -> Result<Option<RunState>> {
        let shown = path.display();
        match encke_files::read(path, LIMIT) {
            Ok(text) => RunState::from_text(&text).map(Some).with_context(|| {
                format!("{shown} is not the state of a run; --fresh replaces it by a new one")
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot read {shown}")),
        }
    }

    /// The contents of a state file: the fields, after a checksum of them.
    pub(super) fn to_text(&self) -> Result<String> {
        let fields = serde_json::to_string(self)?;
        let check = checksum(fields.as_bytes());
        Ok(format!("{{\"check\":\"{check:016x}\",{}\n", &fields[1..]))
    }

    /// The state of such a text, or why it is damaged.
    pub(super) fn from_text(text: &[u8]) -> Result<RunState> {
        const DAMAGED: &str = "it is damaged, or was edited: its checksum does not fit";
        let text = str::from_utf8(text).context(DAMAGED)?;
        let parts = || {
            let rest = text.strip_prefix("{\"check\":\"")?;
            rest.strip_suffix('\n')?.split_once("\",")
        };
        let (check, fields) = parts().context("it does not begin with a checksum")?;
        let fields = format!("{{{fields}");
        if format!("{:016x}", checksum(fields.as_bytes())) != check {
            bail!(DAMAGED);
        }
        Ok(json::from_slice(fields.as_bytes())?)
    }

    /// The state to continue with, if it is that of a run with these settings and this plan.
    fn continued(
        mut self,
        path: &Path,
        settings: &BillionSettings,
        plan: &Plan,
        ranks: OwnRanks,
    ) -> Result<RunState> {
        let shown = path.display();
        if self.settings != *settings {
            bail!(
                "{shown} is the state of another run ({}, {} tokens, {} ranks, {}, seed {}, {}); \
                 give the same options to continue it, --fresh to drop it, or another --state",
                self.settings.device,
                self.settings.tokens,
                self.settings.ranks,
                self.settings.dtype,
                self.settings.seed,
                match self.settings.request() {
                    Ok(request) => format::pattern(&request.pattern),
                    Err(_) => "another pattern".to_string(),
                },
            );
        }
        let (tokens, own) = (settings.tokens, ranks.len());
        let (mut pairs, mut rows) = (0, 0);
        for rank in ranks.take(self.finished) {
            pairs += pairs_of(plan, rank)?;
            rows += plan.request().sharding.rows(tokens, rank) * settings.heads;
        }
        let found = (
            self.finished.min(own),
            u128::from(self.pairs),
            self.checksum.rows(),
        );
        if found != (self.finished, pairs, rows as u64) {
            bail!(
                "{shown} is not a state of this run: after {} of {own} ranks it has {} pairs and \
                 {} rows, and the plan {pairs} and {rows}; --fresh begins again",
                self.finished,
                self.pairs,
                self.checksum.rows()
            );
        }
        self.interruptions = self.interruptions.saturating_add(1);
        Ok(self)
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
        let text = self.to_text()?;
        file.write(|to| to.write_all(text.as_bytes()))?;
        file.keep()
    }
}

/// Removes a state file, or the one that a link leads to.
pub fn remove_state(path: &Path) -> Result<()> {
    let removed = fs::canonicalize(path).and_then(fs::remove_file);
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// The (query, key) pairs of a rank.
fn pairs_of(plan: &Plan, rank: usize) -> Result<u128> {
    let program = plan.rank(rank)?;
    let tasks = program.rounds.iter().flat_map(|round| &round.meanwhile);
    Ok(tasks.filter_map(Task::job).map(Job::pairs).sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::ComputeDevice;
    use crate::longnet;
    use encke::{DType, Documents, Window};
    use encke_core::conformance::{Random, mutate};

    /// The settings of a small run, its plan, and its state after `finished` of 8 ranks.
    fn interrupted(finished: usize) -> (BillionSettings, Plan, RunState) {
        let (segment_lengths, dilation_rates) = longnet::branches(256, 16, 4);
        let settings = BillionSettings {
            device: ComputeDevice::Cpu,
            tokens: 256,
            ranks: 8,
            dtype: DType::F32,
            heads: 2,
            dim: 8,
            segment_lengths,
            dilation_rates,
            window: Window {
                left: Some(40),
                right: None,
            },
            prefix: 3,
            documents: Documents::new(&[100, 156]).ok(),
            samples: 10,
            seed: 3,
        };
        let plan = Plan::new(settings.request().unwrap()).unwrap();
        let mut state = RunState::new(settings.clone());
        state.finished = finished;
        state.seconds = 0.1;
        state.checksum = Checksum::of_units(-77, 1 << 80, 64 * finished as u64);
        let pairs = (0..finished).map(|rank| pairs_of(&plan, rank).unwrap());
        state.pairs = pairs.sum::<u128>() as u64;
        (settings, plan, state)
    }

    #[test]
    fn a_state_of_another_mask_is_refused() {
        let changes: [fn(&mut BillionSettings); 3] = [
            |settings| settings.window = Window::ALL,
            |settings| settings.prefix = 4,
            |settings| settings.documents = None,
        ];
        for change in changes {
            let (_, _, mut state) = interrupted(5);
            change(&mut state.settings);
            let error = continued(state).unwrap_err().to_string();
            assert!(error.contains("another run"), "{error}");
        }
    }

    fn continued(state: RunState) -> Result<RunState> {
        let (settings, plan, _) = interrupted(0);
        state.continued(Path::new("s"), &settings, &plan, (0..8).step_by(1))
    }

    #[test]
    fn a_damaged_state_is_refused() {
        let (_, _, state) = interrupted(5);
        let text = state.to_text().unwrap();
        assert_eq!(RunState::from_text(text.as_bytes()).unwrap(), state);
        for bit in 0..8 * text.len() {
            let mut flipped = text.clone().into_bytes();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(RunState::from_text(&flipped).is_err(), "bit {bit}");
        }
        // The number of damages; hours of them by ENCKE_MUTATIONS.
        let count = std::env::var("ENCKE_MUTATIONS").ok();
        let count = count.map_or(3000, |count| count.parse().unwrap());
        for seed in 0..count {
            let damaged = mutate(&mut Random::new(seed), text.as_bytes());
            if let Ok(read) = RunState::from_text(&damaged) {
                assert_eq!(read, state, "seed {seed}");
            }
        }
    }

    #[test]
    fn a_state_with_a_right_checksum_must_fit_the_plan() {
        let (_, _, state) = interrupted(5);
        let right = continued(state.clone()).unwrap();
        assert_eq!(right.interruptions, 1);
        let changes: [fn(&mut RunState); 5] = [
            |state| state.finished = 4,
            |state| state.finished = 6,
            |state| state.finished = usize::MAX,
            |state| state.pairs += 1,
            |state| state.checksum = Checksum::default(),
        ];
        for (index, change) in changes.into_iter().enumerate() {
            let mut wrong = state.clone();
            change(&mut wrong);
            let error = continued(wrong).unwrap_err().to_string();
            assert!(error.contains("--fresh"), "{index}: {error}");
        }
        for seed in 0..1000 {
            let fields = serde_json::to_vec(&state).unwrap();
            let damaged = mutate(&mut Random::new(seed), &fields);
            if let Ok(read) = json::from_slice::<RunState>(&damaged) {
                let read = continued(read).map_or(5, |read| read.finished);
                assert_eq!(read, 5, "seed {seed}");
            }
        }
    }
}
