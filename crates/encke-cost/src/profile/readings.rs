//! Measured times, by what was timed.

use std::collections::BTreeMap;

use crate::ring_calibration::CalibrationPattern;
use crate::statistics::Statistic;

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Reading {
    /// A job that has the device to itself.
    Alone {
        probe: usize,
        backward: bool,
    },
    /// A job while other ranks run the same.
    Concurrent {
        probe: usize,
        backward: bool,
    },
    /// A calibration ring.
    Ring {
        pattern: CalibrationPattern,
        backward: bool,
    },
    Fill,
    Copy,
    AddingCopy,
    StridedCopy,
    Finish,
    Load,
    ThreadCopy,
    Allocation,
    /// A transfer, or on a device a task, of next to no bytes.
    Latency,
}

/// All times of each reading, in seconds.
#[derive(Debug, Default)]
pub(super) struct Readings(BTreeMap<Reading, Vec<f64>>);

impl Readings {
    pub fn add(&mut self, taken: impl IntoIterator<Item = (Reading, f64)>) {
        for (reading, seconds) in taken {
            self.0.entry(reading).or_default().push(seconds);
        }
    }

    /// The seconds of a reading, if it was taken.
    pub fn get(&self, reading: Reading, statistic: Statistic) -> Option<f64> {
        self.0.get(&reading).map(|taken| statistic.of(taken))
    }

    /// The seconds of a reading; 0 if it was not taken.
    pub fn seconds(&self, reading: Reading, statistic: Statistic) -> f64 {
        self.get(reading, statistic).unwrap_or(0.0)
    }
}
