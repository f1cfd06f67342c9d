//! What `encke bench` found: times of passes by ring, as a table and as a record.

use anyhow::Result;
use encke::explain::bytes;
use encke::plan::Plan;
use encke::{Activity, RankMemory, Report, Request};
use encke_cost::median;
use serde::{Deserialize, Serialize};

use super::Ran;
use super::case::allowed;
use crate::Verdict;
use crate::check::{Checked, Tolerance};
use crate::output::OutputFile;
use crate::process::Machine;
use crate::profile::heading;
use crate::simulate::report::{flops, seconds};
use crate::table::Table;
use crate::terminal::{Paint, say};

/// One pass of one ring.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PassTimes {
    pass: String,
    /// Operations of all its ranks.
    flops: f64,
    sent_bytes: usize,
    /// Planned for the rank that holds most.
    rank_bytes: usize,
    /// Of each turn, by the slowest rank.
    seconds: Vec<f64>,
    /// Of each turn, what ranks waited for messages, as a share of all ranks' time.
    waiting: Vec<f64>,
}

/// One ring.
#[derive(Debug, Serialize)]
pub struct RingTimes {
    /// Its size.
    pub ranks: usize,
    /// Its output, against the reference.
    pub checked: Checked,
    /// Its gradients, against those of the smallest ring: a share of the largest number.
    pub gradients_apart: Option<f64>,
    /// Forward, and backward if it was asked for.
    pub passes: Vec<PassTimes>,
}

/// Everything that was found.
#[derive(Debug, Serialize)]
pub struct Record {
    machine: Machine,
    device: String,
    library: Option<String>,
    request: Request,
    seed: u64,
    pub rings: Vec<RingTimes>,
}

impl PassTimes {
    /// What a pass is, before it was timed.
    pub fn new(pass: &str, report: &Report) -> Result<PassTimes> {
        let held = report.memory.iter().map(RankMemory::planned_bytes);
        Ok(PassTimes {
            pass: pass.to_string(),
            flops: operations(&report.plan)?,
            sent_bytes: report.trace.sent_bytes(),
            rank_bytes: held.max().unwrap_or(0),
            seconds: Vec::new(),
            waiting: Vec::new(),
        })
    }

    fn add(&mut self, seconds: f64, report: &Report) {
        let ranks = report.memory.len().max(1) as f64;
        let waited = report.trace.total(Activity::Wait).as_secs_f64();
        self.seconds.push(seconds);
        self.waiting.push(waited / (ranks * seconds));
    }

    /// What several processes, each with its own rank, found together.
    #[cfg(feature = "mpi")]
    pub fn together(own: &[PassTimes]) -> Option<PassTimes> {
        let mut all = own.first()?.clone();
        all.sent_bytes = own.iter().map(|rank| rank.sent_bytes).sum();
        all.rank_bytes = own.iter().map(|rank| rank.rank_bytes).max()?;
        for turn in 0..all.seconds.len() {
            let slowest = own.iter().map(|rank| rank.seconds[turn]);
            all.seconds[turn] = slowest.fold(0.0, f64::max);
            let waited = own
                .iter()
                .map(|rank| rank.waiting[turn] * rank.seconds[turn]);
            all.waiting[turn] = waited.sum::<f64>() / (own.len() as f64 * all.seconds[turn]);
        }
        Some(all)
    }
}

/// Operations of a pass, of the pattern's pairs alone.
fn operations(plan: &Plan) -> Result<f64> {
    let each = match plan.request().pass {
        encke::Pass::Forward => 4,
        encke::Pass::Backward { .. } => 10,
    };
    let mut pairs = 0;
    for rank in 0..plan.ranks() {
        pairs += plan.rank(rank)?.pairs();
    }
    Ok((pairs * each * plan.request().shape.dim as u128) as f64)
}

impl RingTimes {
    /// One more turn.
    pub(super) fn add(&mut self, ran: &Ran) {
        let timed = self.passes.iter_mut().zip(ran.reports());
        let timed = timed.zip(&ran.seconds);
        timed.for_each(|((pass, report), seconds)| pass.add(*seconds, report));
    }

    fn right(&self, allowed: f64) -> bool {
        self.checked.wrong == 0 && self.gradients_apart.is_none_or(|apart| apart <= allowed)
    }
}

impl Record {
    pub fn new(request: Request, seed: u64, device: String) -> Record {
        Record {
            machine: Machine::here(),
            device,
            library: None,
            request,
            seed,
            rings: Vec::new(),
        }
    }

    /// Says which MPI moved the messages.
    #[cfg(feature = "mpi")]
    pub fn by(mut self, library: &str) -> Record {
        self.library = Some(library.to_string());
        self
    }

    /// Whether what was computed is right.
    pub fn right(&self) -> bool {
        let allowed = allowed(self.request.dtype);
        self.rings.iter().all(|ring| ring.right(allowed))
    }

    /// Prints and writes what was found.
    pub fn conclude(&self, json: Option<OutputFile>) -> Result<Verdict> {
        say(&self.words())?;
        if let Some(mut json) = json {
            json.write(|to| {
                serde_json::to_writer_pretty(&mut *to, self)?;
                to.write_all(b"\n")
            })?;
            json.keep()?;
        }
        Ok(match self.right() {
            true => Verdict::Fine,
            false => Verdict::CheckFailed,
        })
    }

    fn words(&self) -> String {
        let paint = Paint::stdout();
        let mut text = heading(&self.request);
        text += &match &self.library {
            Some(library) => format!("{} processes, {library}\n", self.rings[0].ranks),
            None => format!(
                "{}, {} threads; device: {}\n",
                self.machine.processor, self.machine.threads, self.device
            ),
        };
        text += &self.checks(paint);
        if !self.right() {
            return text;
        }
        let passes = self.rings.first().map_or(0, |ring| ring.passes.len());
        for at in 0..passes {
            let title = paint.bold(&self.rings[0].passes[at].pass);
            text += &format!("\n{title}\n{}", self.table(at));
        }
        text
    }

    /// What was checked, in a line or two.
    fn checks(&self, paint: Paint) -> String {
        let found = self.rings.iter().map(|ring| ring.checked);
        let all = found.fold(Checked::default(), Checked::with);
        let tolerance = Tolerance::of(self.request.dtype);
        let allowed = allowed(self.request.dtype);
        let mut text = format!(
            "checked: {} rows against the reference, out off by {:.1e} at most ({:.1e} allowed), lse \
             by {:.1e} ({:.1e})",
            all.rows, all.worst_out, tolerance.out, all.worst_lse, tolerance.lse
        );
        let apart = self.rings.iter().filter_map(|ring| ring.gradients_apart);
        if let Some(apart) = apart.reduce(f64::max) {
            text += &format!(
                "; gradients of rings apart by {apart:.1e} of the largest number ({allowed:.1e})"
            );
        }
        let wrong = self.rings.iter().find(|ring| !ring.right(allowed));
        let verdict = match wrong {
            None => paint.green("right"),
            Some(ring) => paint.red(&format!(
                "the ring of {} is wrong, nothing was timed",
                ring.ranks
            )),
        };
        format!("{text}: {verdict}\n")
    }

    /// One pass of all rings.
    fn table(&self, at: usize) -> Table {
        let headings = [
            "ranks", "median", "fastest", "against", "speed", "tokens/s", "waiting", "sent",
            "a rank",
        ];
        let mut table = Table::new(2, headings);
        let first = &self.rings[0].passes[at];
        for ring in &self.rings {
            let pass = &ring.passes[at];
            let time = median(&pass.seconds);
            let fastest = pass.seconds.iter().copied().fold(f64::INFINITY, f64::min);
            let ratios = pass.seconds.iter().zip(&first.seconds);
            let ratios: Vec<f64> = ratios.map(|(own, first)| own / first).collect();
            let shape = &self.request.shape;
            table.row([
                ring.ranks.to_string(),
                seconds(time),
                seconds(fastest),
                format!("{:.3}", median(&ratios)),
                flops(pass.flops / time),
                format!("{:.0}", (shape.batch * shape.tokens) as f64 / time),
                format!("{:.1} %", 100.0 * median(&pass.waiting)),
                bytes(pass.sent_bytes),
                bytes(pass.rank_bytes),
            ]);
        }
        table
    }
}
