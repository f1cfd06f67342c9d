//! The one line: `attention(&q, &k, &v, &settings)`.
//!
//! The decision here: settings are a handle that many layers share, so plans and buffers are made once
//! for all layers of one shape, and what the last passes held can be asked of it.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Result, Tensor};
use encke::{Builder, Report};

use crate::error::Error;
use crate::operation::Operation;
use crate::ring::Ring;
use crate::storage::{check, readable};

/// Attention with fixed settings, for any number of layers. Clones share plans, buffers and reports.
#[derive(Clone)]
pub struct Attention {
    ring: Arc<dyn Ring>,
    reports: Arc<Mutex<Reports>>,
}

/// What the last passes did: their plans, traces, and the memory of each rank.
#[derive(Debug, Clone, Default)]
pub struct Reports {
    /// Of the last forward pass.
    pub forward: Option<Arc<Report>>,
    /// Of the last backward pass.
    pub backward: Option<Arc<Report>>,
}

impl Attention {
    /// The attention with these settings, its ranks in this process.
    pub fn new(settings: Builder) -> std::result::Result<Attention, Error> {
        Ok(Attention::on(Arc::new(settings.build()?)))
    }

    /// The attention that a ring computes, wherever its ranks are.
    pub fn on(ring: Arc<dyn Ring>) -> Attention {
        Attention {
            ring,
            reports: Arc::default(),
        }
    }

    /// What the last passes did.
    pub fn reports(&self) -> Reports {
        self.lock().clone()
    }

    pub(crate) fn ring(&self) -> &dyn Ring {
        self.ring.as_ref()
    }

    pub(crate) fn note(&self, change: impl FnOnce(&mut Reports)) {
        change(&mut self.lock());
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Reports> {
        // Nothing is computed under the lock, so there is nothing half done behind a panic.
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Attention {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attention").finish_non_exhaustive()
    }
}

/// Attention of `q` `[b, n, heads, d]` to `k` and `v` `[b, n, kv_heads, d]`, with gradients. The
/// result is `[b, n, heads, d]`, contiguous.
///
/// Tensors are read in place, with any strides whose last one is 1; others are copied first.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, settings: &Attention) -> Result<Tensor> {
    for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
        check(name, tensor)?;
    }
    let operation = Operation::new(settings.clone());
    readable(q)?.apply_op3(&readable(k)?, &readable(v)?, operation)
}
