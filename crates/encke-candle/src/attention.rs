//! [`Attention`]: settings with their plans, buffers and reports, shared by any number of layers.
//!
//! The decision here: layers share one handle, so plans and buffers are made once for all layers of
//! one shape, and the reports of the last passes can be read from it. The device of the tensors
//! decides which kernel computes.

use std::sync::{Arc, Mutex, PoisonError};

#[cfg(feature = "cuda")]
use candle_core::{CudaDevice, DeviceLocation, backend::BackendDevice};
use encke::{Builder, Report};

use crate::backend::AttentionBackend;
#[cfg(feature = "cuda")]
use crate::cuda::{GpuAttention, GpuAttentions};
use crate::error::Error;
#[cfg(feature = "cuda")]
use crate::storage::device_name;

/// Attention with fixed settings, for any number of layers. Clones share plans, buffers and
/// reports.
#[derive(Clone)]
pub struct Attention {
    backend: Arc<dyn AttentionBackend>,
    reports: Arc<Mutex<Reports>>,
    /// `None` if the attention was made of a backend.
    #[cfg(feature = "cuda")]
    gpus: Option<Arc<GpuAttentions>>,
}

/// Reports of the last passes: plan, trace, and memory of each rank.
#[derive(Debug, Clone, Default)]
pub struct Reports {
    /// The last forward pass.
    pub forward: Option<Arc<Report>>,
    /// The last backward pass.
    pub backward: Option<Arc<Report>>,
}

impl Attention {
    /// The attention with these settings, its ranks in this process: on the CPU, or (feature
    /// `cuda`) on the GPU of the tensors.
    pub fn new(settings: Builder) -> Result<Attention, Error> {
        #[cfg(feature = "cuda")]
        let gpus = Some(Arc::new(GpuAttentions::new(settings.clone())));
        Ok(Attention {
            backend: Arc::new(settings.build()?),
            reports: Arc::default(),
            #[cfg(feature = "cuda")]
            gpus,
        })
    }

    /// The attention that a backend computes on tensors in host memory, wherever its ranks are.
    pub fn from_backend(backend: Arc<dyn AttentionBackend>) -> Attention {
        Attention {
            backend,
            reports: Arc::default(),
            #[cfg(feature = "cuda")]
            gpus: None,
        }
    }

    /// Reports of the last passes.
    pub fn reports(&self) -> Reports {
        self.lock().clone()
    }

    pub(crate) fn backend(&self) -> &dyn AttentionBackend {
        self.backend.as_ref()
    }

    /// The attention on the GPU of candle's device.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_gpu(&self, device: &CudaDevice) -> Result<Arc<GpuAttention>, Error> {
        let location = device.location();
        match (&self.gpus, location) {
            (Some(gpus), DeviceLocation::Cuda { gpu_id }) => gpus.on(gpu_id),
            _ => Err(Error::HostBackend {
                device: device_name(location),
            }),
        }
    }

    pub(crate) fn set_forward_report(&self, report: Report) {
        self.lock().forward = Some(Arc::new(report));
    }

    pub(crate) fn set_backward_report(&self, report: Report) {
        self.lock().backward = Some(Arc::new(report));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Reports> {
        // Reports are only replaced under the lock, so a panic cannot leave them half written.
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Attention {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attention").finish_non_exhaustive()
    }
}
