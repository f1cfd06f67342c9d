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
    /// Of these, only every `part.1`-th, from number `part.0` on.
    part: (usize, usize),
    /// Groups that the filter selected so far.
    selected: usize,
}

impl GpuTally {
    /// Runs the groups whose name contains the first argument, or all; with `--part=1/4` a quarter
    /// of them, so that several processes share the work.
    pub fn from_arguments() -> GpuTally {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let filter = arguments.iter().find(|word| !word.starts_with('-'));
        let part = arguments
            .iter()
            .find_map(|word| word.strip_prefix("--part="));
        let part = part.map_or((0, 1), |part| {
            let numbers = part.split_once('/').and_then(|(number, of)| {
                let (number, of) = (number.parse::<usize>().ok()?, of.parse().ok()?);
                (1..=of).contains(&number).then_some((number - 1, of))
            });
            numbers.unwrap_or_else(|| panic!("--part={part} is not a part such as 1/4"))
        });
        GpuTally {
            passed: 0,
            failed: 0,
            filter: filter.cloned().unwrap_or_default(),
            part,
            selected: 0,
        }
    }

    /// Runs the checks of a group and prints how many passed.
    pub fn group(&mut self, name: &str, checks: impl IntoIterator<Item = Result<(), String>>) {
        if !name.contains(&self.filter) {
            return;
        }
        self.selected += 1;
        if (self.selected - 1) % self.part.1 != self.part.0 {
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
