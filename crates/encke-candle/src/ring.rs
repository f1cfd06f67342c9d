//! Whoever carries out a pass on host memory: all ranks of this process, or one rank of several.
//!
//! Nothing is computed here. The decision: a ring is two functions from views to results, and what it
//! needs beside them (a transport, the length of the whole sequence) is its own affair.

use std::sync::{Mutex, PoisonError};

use encke::{
    Attention, Backward, Checkpoint, CpuKernel, Error, Forward, Kernel, SavedOutput,
    ShardAttention, Transport, View,
};

/// What the backward pass starts from.
#[derive(Debug, Clone, Copy)]
pub enum Left<'a> {
    /// The output and its log-sum-exp.
    SavedOutput(&'a SavedOutput<'a>),
    /// What the checkpoint's policy kept: a file, or nothing.
    Checkpoint(&'a Checkpoint),
}

/// Attention, forward and backward, over tensors of the host.
pub trait Ring: Send + Sync {
    /// Attention of q to k and v.
    fn forward(&self, qkv: [&View<'_>; 3]) -> Result<Forward, Error>;

    /// Gradients of q, k and v, given that of the output.
    fn backward(
        &self,
        qkv: [&View<'_>; 3],
        left: Left<'_>,
        dout: &View<'_>,
    ) -> Result<Backward, Error>;
}

impl<K: Kernel> Ring for Attention<K> {
    fn forward(&self, [q, k, v]: [&View<'_>; 3]) -> Result<Forward, Error> {
        Attention::forward(self, q, k, v)
    }

    fn backward(
        &self,
        [q, k, v]: [&View<'_>; 3],
        left: Left<'_>,
        dout: &View<'_>,
    ) -> Result<Backward, Error> {
        match left {
            Left::SavedOutput(kept) => self.backward_from(q, k, v, kept, dout, None),
            Left::Checkpoint(checkpoint) => {
                Attention::backward(self, q, k, v, checkpoint, dout, None)
            }
        }
    }
}

/// One rank's rows of a sequence whose other rows are in other processes. Every process must apply
/// the operation, and go back through it, in the same order: each call is a call of all of them.
pub struct Shard<T> {
    attention: ShardAttention,
    tokens: usize,
    transport: Mutex<T>,
    begin: fn(&mut T),
}

impl<T: Transport<<CpuKernel as Kernel>::Buffer>> Shard<T> {
    /// A rank of sequences of `tokens` tokens in all. `begin` is what the transport is told before
    /// each pass, where it has to be told anything.
    pub fn new(
        attention: ShardAttention,
        tokens: usize,
        transport: T,
        begin: fn(&mut T),
    ) -> Shard<T> {
        Shard {
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

impl<T: Transport<<CpuKernel as Kernel>::Buffer> + Send> Ring for Shard<T> {
    fn forward(&self, qkv: [&View<'_>; 3]) -> Result<Forward, Error> {
        self.pass(|transport| self.attention.forward(self.tokens, qkv, transport))
    }

    fn backward(
        &self,
        qkv: [&View<'_>; 3],
        left: Left<'_>,
        dout: &View<'_>,
    ) -> Result<Backward, Error> {
        let (shard, tokens, gradients) = (&self.attention, self.tokens, (dout, None));
        self.pass(|transport| match left {
            Left::SavedOutput(kept) => shard.backward_from(tokens, qkv, kept, gradients, transport),
            Left::Checkpoint(left) => shard.backward(tokens, qkv, left, gradients, transport),
        })
    }
}
