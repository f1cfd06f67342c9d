//! Attention as a Burn backend extension: on the CPU backend, and under autodiff around it.
//!
//! A forward pass under autodiff saves q, k, v and the output, which Burn keeps too (tensors are
//! shared, not copied), and what Encke saves beside the output. The decision here: the operation
//! counts as bound by computation, so Burn's gradient checkpointing never runs it again; Encke's
//! own checkpoint policy decides what is recomputed.

use std::sync::{Arc, OnceLock};

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Flex, backend_extension};
use encke::SavedState;

use crate::attention::Attention;
use crate::error::Error;
use crate::primitive::{from_tensor, readable, view};

/// Attention on a backend of Burn. [`attention`](crate::attention()) calls it through Burn's
/// dispatch; it is public because Burn's backends implement it.
#[backend_extension(Autodiff, Flex)]
pub trait AttentionExtension: Backend {
    /// The output, or `None` and an error in the call.
    fn encke_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        call: AttentionCall,
    ) -> Option<FloatTensor<Self>>;
}

/// One call: its settings, and its error if it fails.
#[derive(Debug, Clone)]
pub struct AttentionCall {
    settings: Attention,
    error: Arc<OnceLock<Error>>,
}

impl AttentionCall {
    /// A call of the attention with these settings.
    pub fn new(settings: &Attention) -> AttentionCall {
        AttentionCall {
            settings: settings.clone(),
            error: Arc::default(),
        }
    }

    /// The error of a call that failed.
    pub(crate) fn into_error(self) -> Error {
        let error = Arc::into_inner(self.error).and_then(OnceLock::into_inner);
        error.expect("a call without a result has an error, and its other holders are gone")
    }

    fn forward(&self, qkv: [&FlexTensor; 3]) -> Option<(FlexTensor, SavedState)> {
        let run = || -> Result<(FlexTensor, SavedState), Error> {
            let [q, k, v] = qkv;
            let (q, k, v) = (view("q", q)?, view("k", k)?, view("v", v)?);
            let forward = self.settings.host().forward(&q, &k, &v)?;
            let (out, saved, _) = forward.into_saved();
            // This is the last reference to `out` (unless branches keep slots), so that nothing is
            // copied.
            Ok((from_tensor(Arc::unwrap_or_clone(out)), saved))
        };
        run()
            .map_err(|error| {
                let first = self.error.set(error);
                assert!(first.is_ok(), "a call fails once");
            })
            .ok()
    }
}

impl AttentionExtension for Flex {
    fn encke_attention(
        q: FlexTensor,
        k: FlexTensor,
        v: FlexTensor,
        call: AttentionCall,
    ) -> Option<FlexTensor> {
        let [q, k, v] = [q, k, v].map(readable);
        let (out, _) = call.forward([&q, &k, &v])?;
        Some(out)
    }
}

impl<C: CheckpointStrategy> AttentionExtension for Autodiff<Flex, C> {
    fn encke_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        call: AttentionCall,
    ) -> Option<FloatTensor<Self>> {
        let nodes = [q.node(), k.node(), v.node()];
        let [q, k, v] = [q, k, v].map(|tensor| readable(tensor.into_primitive()));
        let (out, saved) = call.forward([&q, &k, &v])?;
        let prepared = AttentionBackward.prepare::<C>(nodes).compute_bound();
        Some(match prepared.stateful() {
            OpsKind::Tracked(operation) => {
                let passed = PassedForward {
                    settings: call.settings,
                    qkv: [q, k, v],
                    out: out.clone(),
                    saved,
                };
                operation.finish(passed, out)
            }
            OpsKind::UnTracked(operation) => operation.finish(out),
        })
    }
}

#[derive(Debug)]
struct AttentionBackward;

/// A forward pass as its backward pass needs it.
#[derive(Debug, Clone)]
struct PassedForward {
    settings: Attention,
    qkv: [FlexTensor; 3],
    out: FlexTensor,
    saved: SavedState,
}

impl PassedForward {
    fn gradients(&self, dout: &FlexTensor) -> Result<[FlexTensor; 3], Error> {
        let [q, k, v] = &self.qkv;
        let views = [view("q", q)?, view("k", k)?, view("v", v)?];
        let [q, k, v] = &views;
        let saved = self.saved.with_output(view("out", &self.out)?);
        let dout = view("dout", dout)?;
        let backward = self
            .settings
            .host()
            .backward_saved([q, k, v], saved, &dout)?;
        Ok([backward.dq, backward.dk, backward.dv].map(from_tensor))
    }
}

impl Backward<Flex, 3> for AttentionBackward {
    type State = PassedForward;

    fn backward(
        self,
        ops: Ops<PassedForward, 3>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let dout = readable(grads.consume::<Flex>(&ops.node));
        let gradients = ops.state.gradients(&dout);
        // Burn's backward passes return nothing.
        let gradients = gradients.unwrap_or_else(|error| panic!("attention, backward: {error}"));
        let all = ops.parents.into_iter().zip(gradients).zip(&ops.state.qkv);
        for ((parent, gradient), of) in all {
            if let Some(parent) = parent {
                grads.register::<Flex>(parent.id, crate::primitive::cast_like(gradient, of));
            }
        }
    }
}
