//! Profiles as files: CSV with a line for each rank, round and component, or one JSON document.

use std::collections::BTreeMap;
use std::io::{self, Write};

use encke::Request;
use encke::plan::program::Component;
use encke_sim::profile::{
    MemorySource, RankProfile, RingProfile, component_exponent, total_exponent,
};
use serde::Serialize;

use super::measure::PassProfile;
use crate::process;

#[derive(Serialize)]
struct ProfileDocument<'a> {
    request: &'a Request,
    passes: Vec<PassDocument<'a>>,
    peak_resident_bytes: Option<usize>,
}

#[derive(Serialize)]
struct PassDocument<'a> {
    pass: &'static str,
    exponents: BTreeMap<Component, Exponents>,
    total_exponents: Exponents,
    run: &'a [RingProfile],
    planned: &'a [RingProfile],
}

#[derive(Serialize)]
struct Exponents {
    measured: Option<f64>,
    planned: Option<f64>,
}

impl<'a> PassDocument<'a> {
    fn new(profile: &'a PassProfile) -> PassDocument<'a> {
        let run = &profile.run;
        let components = run.iter().flat_map(RingProfile::components);
        let exponents = components.map(|component| {
            let fitted = Exponents {
                measured: component_exponent(run, component, MemorySource::Measured),
                planned: component_exponent(run, component, MemorySource::Planned),
            };
            (component, fitted)
        });
        PassDocument {
            pass: profile.pass,
            exponents: exponents.collect(),
            total_exponents: Exponents {
                measured: total_exponent(run, MemorySource::Measured),
                planned: total_exponent(run, MemorySource::Planned),
            },
            run,
            planned: &profile.planned,
        }
    }
}

/// Writes the JSON document.
pub fn write_json(to: &mut dyn Write, request: &Request, passes: &[PassProfile]) -> io::Result<()> {
    let document = ProfileDocument {
        request,
        passes: passes.iter().map(PassDocument::new).collect(),
        peak_resident_bytes: process::peak_resident_bytes(),
    };
    serde_json::to_writer(&mut *to, &document)?;
    to.write_all(b"\n")
}

/// Writes comma-separated values. Rings that were only planned have no rounds and no measured
/// bytes.
pub fn write_csv(to: &mut dyn Write, passes: &[PassProfile]) -> io::Result<()> {
    writeln!(
        to,
        "pass,ranks,rank,round,component,held_bytes,peak_bytes,planned_bytes"
    )?;
    for profile in passes {
        for ring in profile.run.iter().chain(&profile.planned) {
            for rank in &ring.of {
                let prefix = format!("{},{},{}", profile.pass, ring.ranks, rank.rank);
                write_rank(to, &prefix, rank)?;
            }
        }
    }
    Ok(())
}

fn write_rank(to: &mut dyn Write, prefix: &str, rank: &RankProfile) -> io::Result<()> {
    let Some(measured) = &rank.measured else {
        for (component, planned) in &rank.planned {
            writeln!(to, "{prefix},,{},,,{planned}", component.name())?;
        }
        return Ok(());
    };
    for (round, held) in measured.rounds.iter().enumerate() {
        for (component, planned) in &rank.planned {
            let of =
                |bytes: &BTreeMap<Component, usize>| bytes.get(component).copied().unwrap_or(0);
            writeln!(
                to,
                "{prefix},{round},{},{},{},{planned}",
                component.name(),
                of(&held.held),
                of(&held.peak),
            )?;
        }
    }
    Ok(())
}
