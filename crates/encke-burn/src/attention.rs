//! [`attention`], and the settings that calls and layers share.
//!
//! The decision here: layers share one handle, so plans and buffers are made once for all layers of
//! one shape.

use std::sync::Arc;

use burn::backend::{Dispatch, DispatchDevice};
use burn::tensor::{DType, Tensor};
use encke::Builder;

use crate::error::Error;
use crate::operation::{AttentionCall, AttentionExtension};

/// Attention with fixed settings, for any number of layers. Clones share plans and buffers.
#[derive(Clone)]
pub struct Attention {
    host: Arc<encke::Attention>,
}

impl Attention {
    /// The attention with these settings, its ranks in this process.
    pub fn new(settings: Builder) -> Result<Attention, Error> {
        let host = Arc::new(settings.build()?);
        Ok(Attention { host })
    }

    pub(crate) fn host(&self) -> &encke::Attention {
        &self.host
    }
}

impl std::fmt::Debug for Attention {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attention").finish_non_exhaustive()
    }
}

/// Attention of `q` `[b, n, heads, d]` to `k` and `v` `[b, n, kv_heads, d]`, with gradients where
/// Burn tracks them. The result is `[b, n, heads, d]`, contiguous.
///
/// Tensors whose last stride is 1 and whose strides are not negative are read in place; others are
/// copied first. An error is returned before anything is recorded. Burn's backward passes return no
/// errors: one that fails (on a ring with a deadline, or with a checkpoint in a file) panics with
/// the text of the error.
pub fn attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    settings: &Attention,
) -> Result<Tensor<4>, Error> {
    for (tensor, of) in [("q", &q), ("k", &k), ("v", &v)] {
        check(tensor, of)?;
    }
    let call = AttentionCall::new(settings);
    let [q, k, v] = [q, k, v].map(Tensor::into_dispatch);
    match <Dispatch as AttentionExtension>::encke_attention(q, k, v, call.clone()) {
        Some(out) => Ok(Tensor::from_dispatch(out)),
        None => Err(call.into_error()),
    }
}

/// Refuses types and devices that no kernel supports.
fn check(tensor: &'static str, of: &Tensor<4>) -> Result<(), Error> {
    match of.dtype() {
        DType::F64 | DType::F32 | DType::BF16 | DType::F16 => {}
        got => return Err(Error::Type { tensor, got }),
    }
    let device = of.device().inner();
    match device.as_dispatch() {
        DispatchDevice::Flex(_) => Ok(()),
        _ => Err(Error::Device {
            tensor,
            device: format!("{device:?}"),
        }),
    }
}
