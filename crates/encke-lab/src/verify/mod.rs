//! Verification: random configurations on a ring compared with the f64 reference, or random calls
//! with injected faults in the simulator, or rings of several sizes with one rank, bit for bit.
//!
//! The decision here: configuration i of seed S is configuration 0 of seed S + i, so that a failure
//! is reproduced by its own seed alone, whatever ran before it.

mod bits;
mod compare;
mod configuration;
mod faults;
#[cfg(feature = "mpi")]
pub mod processes;

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, anyhow};
use encke::Attention;

use crate::device::ComputeDevice;
use crate::terminal::bar;
use bits::BitsSuite;
use compare::{Comparer, WorstErrors};
use configuration::RandomConfiguration;
use faults::FaultSuite;

/// How many configurations are verified, and from which seed on.
#[derive(Debug, Clone, Copy)]
pub struct VerifySettings {
    /// Seed of the first configuration; each next one has the next seed.
    pub seed: u64,
    /// Number of configurations.
    pub count: usize,
    /// Time after which no further configuration is started.
    pub limit: Duration,
}

/// How many configurations ran and failed.
#[derive(Debug, Clone, Copy)]
pub struct VerifyCounts {
    /// Configurations that ran.
    pub ran: usize,
    /// Of those, configurations that failed.
    pub failed: usize,
    /// The time they took.
    pub elapsed: Duration,
}

/// What is verified.
pub enum VerifySuite {
    /// Results against the reference.
    Reference(Box<ReferenceSuite>),
    /// Calls with injected faults.
    Faults(Box<FaultSuite>),
    /// Rings of several sizes, bit for bit.
    Bits(Box<BitsSuite>),
}

/// Results of a device against the reference, with the worst errors so far.
pub struct ReferenceSuite {
    comparer: Comparer,
    worst: WorstErrors,
}

impl ReferenceSuite {
    fn run(&mut self, case: &RandomConfiguration) -> Result<()> {
        self.comparer.run(case, &mut self.worst)
    }
}

impl VerifySuite {
    /// Results of a device against the reference.
    pub fn reference(device: ComputeDevice) -> Result<VerifySuite> {
        // Without a kernel no configuration can run: an error, not a failed check.
        Attention::builder().build()?;
        Ok(VerifySuite::Reference(Box::new(ReferenceSuite {
            comparer: Comparer::new(device)?,
            worst: WorstErrors::default(),
        })))
    }

    /// Calls with injected faults, in which `redundancy` other ranks keep each rank's inputs.
    pub fn faults(redundancy: usize) -> Result<VerifySuite> {
        let attention = Attention::builder().build()?;
        Ok(VerifySuite::Faults(Box::new(FaultSuite::new(
            attention, redundancy,
        ))))
    }

    /// Bits that do not depend on the ring.
    pub fn bits(device: ComputeDevice) -> Result<VerifySuite> {
        Attention::builder().build()?;
        Ok(VerifySuite::Bits(Box::new(BitsSuite::new(device)?)))
    }

    /// Runs the configuration of a seed; the error describes the configuration and what is wrong.
    fn run_one(&mut self, seed: u64) -> Result<()> {
        match self {
            VerifySuite::Reference(suite) => {
                let case = RandomConfiguration::new(seed);
                let compared = suite.run(&case);
                compared.map_err(|error| anyhow!("{case}\n  {error:#}"))
            }
            VerifySuite::Faults(suite) => {
                let result = suite.run(seed);
                result.map_err(|error| anyhow!("seed {seed}: {error:#}"))
            }
            VerifySuite::Bits(suite) => {
                let result = suite.run(seed);
                result.map_err(|error| anyhow!("seed {seed}: {error:#}"))
            }
        }
    }

    /// Runs configurations up to the count or the time limit, at least one; calls `on_failure` with
    /// the seed and the error of each that fails.
    pub fn run(
        &mut self,
        settings: &VerifySettings,
        mut on_failure: impl FnMut(u64, &anyhow::Error) -> Result<()>,
    ) -> Result<VerifyCounts> {
        let begin = Instant::now();
        let progress = bar(settings.count);
        let (mut ran, mut failed) = (0, 0);
        while ran < settings.count && (ran == 0 || begin.elapsed() < settings.limit) {
            let seed = settings.seed.wrapping_add(ran as u64);
            progress.set_message(format!("{failed} failed"));
            if let Err(error) = self.run_one(seed) {
                failed += 1;
                progress.suspend(|| on_failure(seed, &error))?;
            }
            ran += 1;
            progress.inc(1);
        }
        progress.finish_and_clear();
        Ok(VerifyCounts {
            ran,
            failed,
            elapsed: begin.elapsed(),
        })
    }

    /// The largest errors, or the outcomes of the calls, as text.
    pub fn details(&self) -> String {
        match self {
            VerifySuite::Reference(suite) => suite.worst.to_string(),
            VerifySuite::Faults(suite) => suite.table().to_string(),
            VerifySuite::Bits(suite) => suite.to_string(),
        }
    }
}

/// A seed from the clock, small enough to be typed.
pub fn clock_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(1, |now| now.as_micros() as u64 % 1_000_000_000)
}
