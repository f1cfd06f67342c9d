//! [`attention`] and its operation in candle's autograd.
//!
//! candle passes a backward pass the arguments, the result and its gradient, but nothing else of
//! the forward pass. The decision here: the operation itself saves the log-sum-exp. `attention`
//! makes one operation per call, and candle drops it with the graph (at once, where no gradient is
//! tracked). A second backward pass through the same graph reads it again.

use std::sync::{Arc, OnceLock};

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor};
use encke::{Data, Forward, SavedState, View};

use crate::attention::Attention;
use crate::error::Error;
use crate::storage::{check, device_name, into_storage, on_host, readable, view};

/// Attention of `q` `[b, n, heads, d]` to `k` and `v` `[b, n, kv_heads, d]`, with gradients. The
/// result is `[b, n, heads, d]`, contiguous.
///
/// Tensors with a last stride of 1 are read in place; others are copied first. All must be on one
/// device, and the result is on it too: the CPU, or with the feature `cuda` a GPU. On a GPU Encke's
/// kernels work on candle's memory, ordered with candle's stream; rows that are not contiguous
/// (tokens, then heads) are copied on the GPU first.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, settings: &Attention) -> Result<Tensor> {
    for (tensor, of) in [("q", q), ("k", k), ("v", v)] {
        check(tensor, of)?;
        let [device, q] = [of, q].map(|of| of.device().location());
        if device != q {
            let [device, q] = [device, q].map(device_name);
            return Err(Error::DeviceMismatch { tensor, device, q }.into());
        }
    }
    let operation = AttentionOp {
        settings: settings.clone(),
        saved: OnceLock::new(),
    };
    readable(q)?.apply_op3(&readable(k)?, &readable(v)?, operation)
}

/// One call of attention.
struct AttentionOp {
    settings: Attention,
    saved: OnceLock<SavedTensors>,
}

/// What a forward pass saves for its backward pass, beside the output that candle keeps.
enum SavedTensors {
    /// In host memory, or a checkpoint.
    Host(SavedState),
    /// The log-sum-exp on a GPU; `None` if the backward pass recomputes the forward pass.
    #[cfg(feature = "cuda")]
    Cuda(Option<CudaStorage>),
}

impl AttentionOp {
    /// Saves what the backward pass needs, and returns the output.
    fn save(&self, forward: Forward) -> Arc<encke::Tensor> {
        let (out, saved, report) = forward.into_saved();
        self.settings.set_forward_report(report);
        self.set_saved(SavedTensors::Host(saved));
        out
    }

    fn set_saved(&self, saved: SavedTensors) {
        assert!(self.saved.set(saved).is_ok(), "an operation is one call");
    }

    /// Gradients of q, k and v, in the accumulation types of the kernel.
    fn gradients(
        &self,
        qkv: [&View<'_>; 3],
        result: View<'_>,
        dout: &View<'_>,
    ) -> std::result::Result<[encke::Tensor; 3], Error> {
        let backward = match self.saved.get().ok_or(Error::NothingSaved)? {
            SavedTensors::Host(saved) => {
                let saved = saved.with_output(result);
                self.settings.backend().backward(qkv, saved, dout)?
            }
            #[cfg(feature = "cuda")]
            SavedTensors::Cuda(_) => return Err(Error::NothingSaved),
        };
        self.settings.set_backward_report(backward.report);
        Ok([backward.dq, backward.dk, backward.dv])
    }
}

impl CustomOp3 for AttentionOp {
    fn name(&self) -> &'static str {
        "encke-attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (q, k, v) = (
            view("q", q, q_layout)?,
            view("k", k, k_layout)?,
            view("v", v, v_layout)?,
        );
        let forward = self.settings.backend().forward([&q, &k, &v]);
        let out = self.save(forward.map_err(Error::from)?);
        let shape = Shape::from(out.dims().to_vec());
        // This is the last reference to `out`, so nothing is copied.
        let out = Arc::unwrap_or_clone(out);
        Ok((into_storage(out.into_data()), shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let qkv = [(q, q_layout), (k, k_layout), (v, v_layout)];
        let attention = self.settings.on_gpu(&q.device)?;
        let (out, lse, report) = crate::cuda::forward(&attention, qkv)?;
        self.settings.set_forward_report(report);
        self.set_saved(SavedTensors::Cuda(lse));
        Ok((out, q_layout.shape().clone()))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        result: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let dout = readable(dout)?;
        #[cfg(feature = "cuda")]
        if let Some(SavedTensors::Cuda(lse)) = self.saved.get() {
            let attention = self.settings.on_gpu(q.device().as_cuda_device()?)?;
            let tensors = [q, k, v, result, &dout];
            let (gradients, report) = crate::cuda::backward(&attention, tensors, lse.as_ref())?;
            self.settings.set_backward_report(report);
            let [dq, dk, dv] = gradients;
            return Ok((Some(dq), Some(dk), Some(dv)));
        }
        let gradients = {
            let names = ["q", "k", "v", "out", "dout"];
            let tensors = [q, k, v, result, &dout].map(Tensor::storage_and_layout);
            let mut views = Vec::with_capacity(tensors.len());
            for (name, (storage, layout)) in names.into_iter().zip(&tensors) {
                views.push(view(name, on_host(name, storage)?, layout)?);
            }
            self.gradients([&views[0], &views[1], &views[2]], views[3], &views[4])?
        };
        let mut gradients = gradients.into_iter().zip([q, k, v]).map(|(gradient, of)| {
            let dims = gradient.dims().to_vec();
            let gradient = match gradient.into_data() {
                Data::F64(values) => Tensor::from_vec(values, dims, of.device()),
                Data::F32(values) => Tensor::from_vec(values, dims, of.device()),
                Data::Bf16(values) => Tensor::from_vec(values, dims, of.device()),
                Data::F16(values) => Tensor::from_vec(values, dims, of.device()),
            };
            gradient?.to_dtype(of.dtype())
        });
        let mut next = || gradients.next().transpose();
        Ok((next()?, next()?, next()?))
    }
}
