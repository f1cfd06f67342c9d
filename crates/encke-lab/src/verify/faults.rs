//! Calls with injected faults, in the simulator, by seed.
//!
//! The seed alone determines the call and its faults, so that each call can be repeated alone.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use encke::{Attention, RankError, TransportError};
use encke_sim::fault_config::FaultKind;
use encke_sim::fault_outcome::{self, FaultOutcome};
use encke_sim::fault_run::RankEnd;

use crate::table::TextTable;

/// The outcomes of the calls with one kind of fault.
#[derive(Debug, Default)]
struct OutcomeCounts {
    runs: usize,
    with_faults: usize,
    right: usize,
    survived: usize,
    deadline: usize,
    corrupt: usize,
    died: usize,
    lost: usize,
    wrong: usize,
}

/// The outcomes of all calls so far, by kind of fault.
pub struct FaultSuite {
    attention: Attention,
    redundancy: usize,
    by_kind: BTreeMap<FaultKind, OutcomeCounts>,
}

impl FaultSuite {
    /// A suite that computes with the kernel of this attention.
    pub(super) fn new(attention: Attention, redundancy: usize) -> FaultSuite {
        FaultSuite {
            attention,
            redundancy,
            by_kind: BTreeMap::new(),
        }
    }

    /// Runs the call of a seed; fails if its outcome is neither right nor a proper error.
    pub(super) fn run(&mut self, seed: u64) -> Result<()> {
        let kind = FaultKind::ALL[(seed % FaultKind::ALL.len() as u64) as usize];
        let (sample, faults) = match self.redundancy {
            0 => fault_outcome::random_case(kind, seed)?,
            redundancy => fault_outcome::random_surviving_case(kind, seed, redundancy)?,
        };
        let (run, outcome) =
            fault_outcome::run_and_check(self.attention.kernel(), &sample, &faults)?;
        let counts = self.by_kind.entry(kind).or_default();
        counts.runs += 1;
        counts.with_faults += usize::from(!run.faults.is_empty());
        let is_lost = |end: &RankEnd| matches!(end.error, Some(RankError::Lost(_)));
        let count = match &outcome {
            FaultOutcome::Correct => &mut counts.right,
            FaultOutcome::Survived { .. } => &mut counts.survived,
            FaultOutcome::Failed { .. } if run.ends.iter().any(is_lost) => &mut counts.lost,
            FaultOutcome::Failed {
                first: RankError::Died { .. },
            } => &mut counts.died,
            FaultOutcome::Failed {
                first: RankError::Transport(TransportError::Corrupt { .. }),
            } => &mut counts.corrupt,
            FaultOutcome::Failed { .. } => &mut counts.deadline,
            FaultOutcome::Wrong { .. } | FaultOutcome::Violation { .. } => &mut counts.wrong,
        };
        *count += 1;
        match outcome {
            FaultOutcome::Correct | FaultOutcome::Survived { .. } | FaultOutcome::Failed { .. } => {
                Ok(())
            }
            FaultOutcome::Wrong { output } => {
                bail!("{}: {output} has wrong values", kind.name())
            }
            FaultOutcome::Violation { how } => bail!("{}: {how}", kind.name()),
        }
    }

    /// The outcomes by kind of fault.
    pub(super) fn table(&self) -> TextTable {
        let mut table = TextTable::new(
            2,
            [
                "fault", "calls", "injected", "right", "survived", "deadline", "corrupt", "died",
                "lost", "wrong",
            ],
        );
        for (kind, counts) in &self.by_kind {
            let cells = [
                counts.runs,
                counts.with_faults,
                counts.right,
                counts.survived,
                counts.deadline,
                counts.corrupt,
                counts.died,
                counts.lost,
                counts.wrong,
            ];
            let cells = cells.iter().map(usize::to_string);
            table.row([kind.name().to_string()].into_iter().chain(cells));
        }
        table
    }
}
