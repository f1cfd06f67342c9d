//! The results of a call: with threads as ranks, with ranks one after another, or with processes.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use encke::{Backward, Forward, KeyLengths, RankMemory, Shape, Tensor};
use encke_lab::chrome_trace::ChromeTrace;

/// The results of both passes, with the times at which they returned.
pub struct AttendResult {
    pub forward: Forward,
    pub backward: Option<Backward>,
    /// The gradient of the sinks, in the type of the lse.
    pub dsinks: Option<Tensor>,
    pub forward_took: Duration,
    pub took: Duration,
}

impl AttendResult {
    /// Both passes on one timeline.
    pub fn trace(&self) -> ChromeTrace {
        let backward = self.backward.as_ref().map(|done| &done.report.trace);
        ChromeTrace::new(
            &self.forward.report.trace,
            backward,
            self.forward_took,
            self.took,
        )
    }

    /// The results with the rows of a padded batch at their places.
    pub fn unpack(mut self, lengths: &KeyLengths) -> Result<AttendResult> {
        let forward = &mut self.forward;
        forward.out = Arc::new(lengths.unpack(&forward.out, 0.0)?);
        forward.lse = Arc::new(lengths.unpack(&forward.lse, f64::NEG_INFINITY)?);
        if let Some(backward) = &mut self.backward {
            for gradient in [&mut backward.dq, &mut backward.dk, &mut backward.dv] {
                *gradient = lengths.unpack(gradient, 0.0)?;
            }
        }
        Ok(self)
    }

    /// The output tensors with their names and shapes in the file.
    pub fn outputs(&self, shape: &Shape) -> Vec<(&'static str, Vec<usize>, &Tensor)> {
        let out = &self.forward.out;
        let rows = vec![shape.batch, shape.queries, shape.heads];
        let mut outputs = vec![
            ("out", out.dims().to_vec(), &**out),
            ("lse", rows, &*self.forward.lse),
        ];
        if let Some(Backward { dq, dk, dv, .. }) = &self.backward {
            for (name, tensor) in [("dq", dq), ("dk", dk), ("dv", dv)] {
                outputs.push((name, tensor.dims().to_vec(), tensor));
            }
        }
        if let Some(dsinks) = &self.dsinks {
            outputs.push(("dsinks", vec![shape.heads], dsinks));
        }
        outputs
    }
}

/// Time, traffic and memory of a pass.
pub struct StreamedPass {
    pub name: &'static str,
    pub seconds: f64,
    pub moved_bytes: usize,
    pub largest: RankMemory,
}

/// Trace, memory and time of one rank in one pass.
#[cfg(feature = "mpi")]
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub struct RankPass {
    pub events: Vec<encke::trace::Event>,
    pub memory: RankMemory,
    pub seconds: f64,
}

/// The result of one process.
#[cfg(feature = "mpi")]
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub struct AttendProcess {
    pub passes: Vec<RankPass>,
    /// Resident memory before the first buffer was allocated, and its peak.
    pub resident_bytes: Option<(usize, usize)>,
}
