//! How much passed.

use std::process::ExitCode;
use std::time::Instant;

/// How many failures of a group are shown, and how much of each.
const SHOWN: usize = 3;
const LONG: usize = 600;

pub struct Tally {
    passed: usize,
    failed: usize,
    /// What the names of groups must contain.
    wanted: String,
}

impl Tally {
    /// Of the groups whose name contains the first argument, or of all.
    pub fn from_arguments() -> Tally {
        let wanted = std::env::args().skip(1).find(|word| !word.starts_with('-'));
        Tally {
            passed: 0,
            failed: 0,
            wanted: wanted.unwrap_or_default(),
        }
    }

    /// Runs the checks of a group and says how many passed.
    pub fn group(&mut self, name: &str, checks: impl IntoIterator<Item = Result<(), String>>) {
        if !name.contains(&self.wanted) {
            return;
        }
        let (start, passed, failed) = (Instant::now(), self.passed, self.failed);
        for check in checks {
            match check {
                Ok(()) => self.passed += 1,
                Err(what) => {
                    self.failed += 1;
                    // One cause often fails many checks; the first few tell it.
                    if self.failed - failed <= SHOWN {
                        let what: String = what.chars().take(LONG).collect();
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

    /// Says how much passed in all.
    pub fn conclude(self) -> ExitCode {
        println!("{} passed, {} failed", self.passed, self.failed);
        match self.failed {
            0 => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        }
    }
}
