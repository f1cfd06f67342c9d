//! What runs a pass on host memory: all ranks in this process, or one rank of several processes.
//!
//! The decision here: a backend is two functions from views to results; whatever else it needs (a
//! transport, the length of the whole sequence) it holds itself.

use std::sync::{Mutex, PoisonError};

use encke::{
    Attention, Backward, CpuKernel, Error, Forward, Kernel, Memory, SavedForward, ShardAttention,
    Transport, View,
};

/// Attention, forward and backward, on tensors in host memory.
pub trait AttentionBackend: Send + Sync {
    /// Forward pass.
    fn forward(&self, qkv: [&View<'_>; 3]) -> Result<Forward, Error>;

    /// Gradients of q, k and v, given that of the output.
    fn backward(
        &self,
        qkv: [&View<'_>; 3],
        saved: SavedForward<'_>,
        dout: &View<'_>,
    ) -> Result<Backward, Error>;
}

impl<K: Kernel> AttentionBackend for Attention<K> {
    fn forward(&self, [q, k, v]: [&View<'_>; 3]) -> Result<Forward, Error> {
        Attention::forward(self, q, k, v)
    }

    fn backward(
        &self,
        qkv: [&View<'_>; 3],
        saved: SavedForward<'_>,
        dout: &View<'_>,
    ) -> Result<Backward, Error> {
        self.backward_saved(qkv, saved, dout)
    }
}

/// One rank with its rows of a sequence; the other rows are in other processes. Every pass is
/// collective: all processes must run the same forward and backward passes in the same order.
pub struct ShardBackend<T> {
    attention: ShardAttention,
    tokens: usize,
    transport: Mutex<T>,
    begin: fn(&mut T),
}

impl<T: Transport<<CpuKernel as Memory>::Buffer>> ShardBackend<T> {
    /// One rank of sequences of `tokens` tokens in total. `begin` is called with the transport
    /// before each pass.
    pub fn new(
        attention: ShardAttention,
        tokens: usize,
        transport: T,
        begin: fn(&mut T),
    ) -> ShardBackend<T> {
        ShardBackend {
            attention,
            tokens,
            transport: Mutex::new(transport),
            begin,
        }
    }

    /// Runs a pass with the transport.
    fn pass<R>(&self, run: impl FnOnce(&mut T) -> R) -> R {
        let mut transport = self
            .transport
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        (self.begin)(&mut transport);
        run(&mut transport)
    }

    /// The rank.
    pub fn attention(&self) -> &ShardAttention {
        &self.attention
    }
}

impl<T: Transport<<CpuKernel as Memory>::Buffer> + Send> AttentionBackend for ShardBackend<T> {
    fn forward(&self, qkv: [&View<'_>; 3]) -> Result<Forward, Error> {
        self.pass(|transport| self.attention.forward(self.tokens, qkv, transport))
    }

    fn backward(
        &self,
        qkv: [&View<'_>; 3],
        saved: SavedForward<'_>,
        dout: &View<'_>,
    ) -> Result<Backward, Error> {
        let (shard, tokens, gradients) = (&self.attention, self.tokens, (dout, None));
        self.pass(|transport| match saved {
            SavedForward::Output(saved) => {
                shard.backward_from(tokens, qkv, &saved, gradients, transport)
            }
            SavedForward::Checkpoint(saved) => {
                shard.backward(tokens, qkv, saved, gradients, transport)
            }
        })
    }
}
