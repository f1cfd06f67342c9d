//! Counts passed and failed checks by group.

use std::process::ExitCode;
use std::time::Instant;

/// Failures printed per group, and characters of each.
const SHOWN: usize = 3;
const SHOWN_CHARS: usize = 600;

/// Counts of checks.
pub struct GpuTally {
    passed: usize,
    failed: usize,
    /// Only groups whose name contains this run.
    filter: String,
}

impl GpuTally {
    /// Runs the groups whose name contains the first argument, or all.
    pub fn from_arguments() -> GpuTally {
        let filter = std::env::args()
            .skip(1)
            .find(|argument| !argument.starts_with('-'));
        GpuTally {
            passed: 0,
            failed: 0,
            filter: filter.unwrap_or_default(),
        }
    }

    /// Runs the checks of a group and prints how many passed.
    pub fn group(&mut self, name: &str, checks: impl IntoIterator<Item = Result<(), String>>) {
        if !name.contains(&self.filter) {
            return;
        }
        let (start, passed, failed) = (Instant::now(), self.passed, self.failed);
        for check in checks {
            match check {
                Ok(()) => self.passed += 1,
                Err(what) => {
                    self.failed += 1;
                    // One cause often fails many checks; the first few show it.
                    if self.failed - failed <= SHOWN {
                        let what: String = what.chars().take(SHOWN_CHARS).collect();
                        println!("  FAILED {name}: {what}");
                    }
                }
            }
        }
        let (passed, failed) = (self.passed - passed, self.failed - failed);
        println!(
            "{name}: {passed} passed, {failed} failed ({:.1?})",
            start.elapsed()
        );
    }

    /// Prints the totals.
    pub fn finish(self) -> ExitCode {
        println!("{} passed, {} failed", self.passed, self.failed);
        match self.failed {
            0 => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        }
    }
}
