//! The operation as candle's autograd knows it.
//!
//! candle hands a backward pass the arguments, the result and its gradient, but not what else the
//! forward pass made. The log-sum-exp is kept in the operation itself. An operation belongs to one call:
//! `attention` makes one for each, nobody else can, and candle frees it with the graph (at once, where
//! no gradient is wanted). Going back twice through one graph reads it twice.

use std::sync::{Arc, OnceLock};

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor};
use encke::{Checkpoint, Forward, SavedOutput, View};

use crate::attention::Attention;
use crate::error::Error;
use crate::ring::Left;
use crate::storage::{on_host, owned, readable, view};

/// One call of attention.
pub struct Operation {
    settings: Attention,
    left: OnceLock<Remains>,
}

/// What a forward pass left beside its result.
enum Remains {
    /// The log-sum-exp; the output is candle's.
    Lse(Arc<encke::Tensor>),
    /// Output and log-sum-exp by branch, where branches stay apart.
    Slots {
        out: Arc<encke::Tensor>,
        slot_lse: Arc<encke::Tensor>,
        lse: Arc<encke::Tensor>,
    },
    /// What a policy kept that is not in memory.
    Checkpoint(Checkpoint),
    /// The log-sum-exp on a GPU, unless it is to be computed again.
    #[cfg(feature = "cuda")]
    OnGpu(Option<CudaStorage>),
}

impl Operation {
    pub fn new(settings: Attention) -> Operation {
        Operation {
            settings,
            left: OnceLock::new(),
        }
    }

    /// Takes the output out of a result, and keeps what is left of it.
    fn take(&self, forward: Forward) -> Arc<encke::Tensor> {
        let Forward {
            out,
            lse,
            checkpoint,
            report,
        } = forward;
        self.settings
            .note(|reports| reports.forward = Some(Arc::new(report)));
        let left = match checkpoint.saved().is_some() {
            false => Remains::Checkpoint(checkpoint),
            true => match checkpoint.into_slots() {
                Some((slot_out, slot_lse)) if !Arc::ptr_eq(&slot_lse, &lse) => Remains::Slots {
                    out: slot_out,
                    slot_lse,
                    lse,
                },
                _ => Remains::Lse(lse),
            },
        };
        assert!(self.left.set(left).is_ok(), "an operation is one call");
        out
    }

    /// Gradients of q, k and v, in the types the kernel sums them in.
    fn gradients(
        &self,
        qkv: [&View<'_>; 3],
        result: View<'_>,
        dout: &View<'_>,
    ) -> std::result::Result<[encke::Tensor; 3], Error> {
        let kept = |slot_out, slot_lse, lse| SavedOutput {
            slot_out,
            slot_lse,
            lse,
        };
        let ring = self.settings.ring();
        let backward = match self.left.get().ok_or(Error::NothingKept)? {
            Remains::Lse(lse) => {
                let kept = kept(result, lse.view(), lse.view());
                ring.backward(qkv, Left::SavedOutput(&kept), dout)
            }
            Remains::Slots { out, slot_lse, lse } => {
                let kept = kept(out.view(), slot_lse.view(), lse.view());
                ring.backward(qkv, Left::SavedOutput(&kept), dout)
            }
            Remains::Checkpoint(checkpoint) => {
                ring.backward(qkv, Left::Checkpoint(checkpoint), dout)
            }
            #[cfg(feature = "cuda")]
            Remains::OnGpu(_) => return Err(Error::NothingKept),
        }?;
        self.settings
            .note(|reports| reports.backward = Some(Arc::new(backward.report)));
        Ok([backward.dq, backward.dk, backward.dv])
    }
}

impl CustomOp3 for Operation {
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
        let forward = self.settings.ring().forward([&q, &k, &v]);
        let out = self.take(forward.map_err(Error::from)?);
        let shape = Shape::from(out.dims().to_vec());
        // Branches that stay apart are combined into a tensor of its own; otherwise ours is the last.
        let out = Arc::unwrap_or_clone(out);
        Ok((owned(out.into_data()), shape))
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
        let (out, lse) = crate::gpus::forward(&self.settings, qkv)?;
        let left = Remains::OnGpu(lse);
        assert!(self.left.set(left).is_ok(), "an operation is one call");
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
        if let Some(Remains::OnGpu(lse)) = self.left.get() {
            let tensors = [q, k, v, result, &dout];
            let [dq, dk, dv] = crate::gpus::backward(&self.settings, tensors, lse.as_ref())?;
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
            let gradient = match owned(gradient.into_data()) {
                CpuStorage::F64(numbers) => Tensor::from_vec(numbers, dims, of.device()),
                CpuStorage::F32(numbers) => Tensor::from_vec(numbers, dims, of.device()),
                CpuStorage::BF16(numbers) => Tensor::from_vec(numbers, dims, of.device()),
                CpuStorage::F16(numbers) => Tensor::from_vec(numbers, dims, of.device()),
                _ => unreachable!("gradients are floating-point numbers"),
            };
            gradient?.to_dtype(of.dtype())
        });
        let mut next = || gradients.next().transpose();
        Ok((next()?, next()?, next()?))
    }
}
