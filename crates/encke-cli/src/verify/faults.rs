//! `encke verify --faults`: calls under hardship, in the simulator, by seed.
//!
//! Which hardship a seed means follows from the seed alone, so that any run can be repeated alone.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use encke::{Attention, RankError, TransportError};
use encke_sim::fault_config::FaultKind;
use encke_sim::fault_outcome::{self, FaultOutcome};
use encke_sim::fault_run::RankEnd;

use crate::table::Table;

/// What became of the calls under one kind of hardship.
#[derive(Debug, Default)]
struct Tally {
    runs: usize,
    struck: usize,
    right: usize,
    survived: usize,
    deadline: usize,
    corrupt: usize,
    died: usize,
    lost: usize,
    wrong: usize,
}

/// What became of all calls.
pub struct Faults {
    attention: Attention,
    redundancy: usize,
    by_kind: BTreeMap<FaultKind, Tally>,
}

impl Faults {
    /// No calls yet, to be computed with the kernel of this attention.
    pub fn new(attention: Attention, redundancy: usize) -> Faults {
        Faults {
            attention,
            redundancy,
            by_kind: BTreeMap::new(),
        }
    }

    /// Tries the call of a seed; an error says what must not have happened.
    pub fn run(&mut self, seed: u64) -> Result<()> {
        let kind = FaultKind::ALL[(seed % FaultKind::ALL.len() as u64) as usize];
        let (sample, hardship) = match self.redundancy {
            0 => fault_outcome::random_case(kind, seed)?,
            redundancy => fault_outcome::random_surviving_case(kind, seed, redundancy)?,
        };
        let (trial, verdict) =
            fault_outcome::run_and_check(self.attention.kernel(), &sample, &hardship)?;
        let tally = self.by_kind.entry(kind).or_default();
        tally.runs += 1;
        tally.struck += usize::from(!trial.faults.is_empty());
        let is_lost = |end: &RankEnd| matches!(end.error, Some(RankError::Lost(_)));
        let place = match &verdict {
            FaultOutcome::Correct => &mut tally.right,
            FaultOutcome::Survived { .. } => &mut tally.survived,
            FaultOutcome::Failed { .. } if trial.ends.iter().any(is_lost) => &mut tally.lost,
            FaultOutcome::Failed {
                first: RankError::Died { .. },
            } => &mut tally.died,
            FaultOutcome::Failed {
                first: RankError::Transport(TransportError::Corrupt { .. }),
            } => &mut tally.corrupt,
            FaultOutcome::Failed { .. } => &mut tally.deadline,
            FaultOutcome::Wrong { .. } | FaultOutcome::Violation { .. } => &mut tally.wrong,
        };
        *place += 1;
        match verdict {
            FaultOutcome::Correct | FaultOutcome::Survived { .. } | FaultOutcome::Failed { .. } => {
                Ok(())
            }
            FaultOutcome::Wrong { output } => {
                bail!("{}: {output} has wrong numbers", kind.name())
            }
            FaultOutcome::Violation { how } => bail!("{}: {how}", kind.name()),
        }
    }

    /// The outcomes by kind of hardship.
    pub fn table(&self) -> Table {
        let mut table = Table::new(
            2,
            [
                "fault", "calls", "struck", "right", "survived", "deadline", "corrupt", "died",
                "lost", "wrong",
            ],
        );
        for (kind, tally) in &self.by_kind {
            let counts = [
                tally.runs,
                tally.struck,
                tally.right,
                tally.survived,
                tally.deadline,
                tally.corrupt,
                tally.died,
                tally.lost,
                tally.wrong,
            ];
            let counts = counts.iter().map(usize::to_string);
            table.row([kind.name().to_string()].into_iter().chain(counts));
        }
        table
    }
}
