//! The one line: `attention(&q, &k, &v, &settings)`.
//!
//! The decision here: settings are a handle that many layers share, so plans and buffers are made once
//! for all layers of one shape, and what the last passes held can be asked of it. Where the tensors are
//! decides who computes: settings are for any device that this build has a kernel for.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DeviceLocation, Result, Tensor};
use encke::{Builder, Report};

use crate::error::Error;
#[cfg(feature = "cuda")]
use crate::gpus::Gpus;
use crate::operation::Operation;
use crate::ring::Ring;
use crate::storage::{check, readable};

/// Attention with fixed settings, for any number of layers. Clones share plans, buffers and reports.
#[derive(Clone)]
pub struct Attention {
    ring: Arc<dyn Ring>,
    reports: Arc<Mutex<Reports>>,
    /// None where the ring was made elsewhere.
    #[cfg(feature = "cuda")]
    gpus: Option<Arc<Gpus>>,
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
    /// The attention with these settings, its ranks in this process: on the CPU, or (feature `cuda`)
    /// on the GPU that tensors are on.
    pub fn new(settings: Builder) -> std::result::Result<Attention, Error> {
        #[cfg(feature = "cuda")]
        let gpus = Some(Arc::new(Gpus::new(settings.clone())));
        Ok(Attention {
            ring: Arc::new(settings.build()?),
            reports: Arc::default(),
            #[cfg(feature = "cuda")]
            gpus,
        })
    }

    /// The attention that a ring computes on tensors of the host, wherever its ranks are.
    pub fn on(ring: Arc<dyn Ring>) -> Attention {
        Attention {
            ring,
            reports: Arc::default(),
            #[cfg(feature = "cuda")]
            gpus: None,
        }
    }

    /// What the last passes did.
    pub fn reports(&self) -> Reports {
        self.lock().clone()
    }

    pub(crate) fn ring(&self) -> &dyn Ring {
        self.ring.as_ref()
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn gpus(&self) -> Option<&Gpus> {
        self.gpus.as_deref()
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
/// Tensors are read in place, with any strides whose last one is 1; others are copied first. All are on
/// one device, and so is the result: the CPU, or in a build with the feature `cuda` a GPU, on whose
/// memory Encke's kernels then work, on behalf of candle's stream. There, rows that do not lie as a rank
/// holds them (tokens, then heads, contiguous) are copied on the GPU first.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, settings: &Attention) -> Result<Tensor> {
    for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
        check(name, tensor)?;
        let (place, of_q) = (tensor.device().location(), q.device().location());
        if place != of_q {
            let (device, q) = (words(place), words(of_q));
            let tensor = name;
            return Err(Error::Apart { tensor, device, q }.into());
        }
    }
    let operation = Operation::new(settings.clone());
    readable(q)?.apply_op3(&readable(k)?, &readable(v)?, operation)
}

/// A place as candle's users write it.
pub(crate) fn words(place: DeviceLocation) -> String {
    match place {
        DeviceLocation::Cpu => "the CPU".to_string(),
        DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
        DeviceLocation::Metal { gpu_id } => format!("metal:{gpu_id}"),
    }
}
