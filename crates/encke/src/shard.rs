//! One rank of an attention whose other ranks are elsewhere: in other processes, on other machines.
//!
//! Each rank has its own rows of q, k and v and gets its own rows of the results; a [`Transport`]
//! that the caller brings moves what travels, and its deadline is the one that holds. Every rank
//! must have the same settings and make the same calls in the same order: nothing here can find out
//! whether they do, so whoever starts them asks them first.

use std::sync::Arc;

use encke_core::kernel::Kernel;
use encke_core::plan::{Pass, Plan, Request};
use encke_core::sharding::Sharding;
use encke_core::transport::Transport;
use encke_core::{DType, Error as RequestError, Mode, Shape, View};
use encke_cpu::CpuKernel;
use encke_ring::{CacheStats, RingError as Error, ShardRing};

use crate::attention::{Backward, Builder, Forward, same_shape, shape_of};
use crate::checkpoint::{Checkpoint, Kept};
use crate::passes::{self, Attended};

/// One rank of an attention with fixed settings. Plans and buffers are kept between calls.
pub struct ShardAttention<K: Kernel = CpuKernel> {
    settings: Builder,
    sharding: Sharding,
    ring: ShardRing<K>,
}

impl<K: Kernel> ShardAttention<K> {
    pub(crate) fn new(settings: Builder, kernel: K, rank: usize) -> Result<Self, Error> {
        let sharding = settings.new_sharding()?;
        let ranks = sharding.ranks();
        if rank >= ranks {
            return Err(RequestError::NoSuchRank { rank, ranks }.into());
        }
        if settings.pattern.mode() == Mode::Fkodom && ranks > 1 {
            return Err(Error::Elsewhere {
                what: "fkodom mode, which divides by sums over the whole sequence,",
                hint: "use group mode, or one rank",
            });
        }
        Ok(ShardAttention {
            settings,
            sharding,
            ring: ShardRing::new(kernel, rank),
        })
    }

    /// Its number.
    pub fn rank(&self) -> usize {
        self.ring.rank()
    }

    /// Which rank owns which tokens.
    pub fn sharding(&self) -> &Sharding {
        &self.sharding
    }

    /// How often plans and buffers were found rather than made.
    pub fn stats(&self) -> CacheStats {
        self.ring.stats()
    }

    /// The plan for a shape, which is that of the whole sequence. Nothing is allocated.
    pub fn plan(&self, shape: Shape, dtype: DType, pass: Pass) -> Result<Arc<Plan>, Error> {
        self.ring.plan(&self.request(shape, dtype, pass))
    }

    fn request(&self, shape: Shape, dtype: DType, pass: Pass) -> Request {
        let settings = &self.settings;
        let dtype = settings.compute_dtype(dtype, self.ring.kernel());
        settings.request(settings.way(&self.sharding), shape, dtype, pass)
    }

    /// Attention of this rank's rows of a sequence of `tokens` tokens.
    pub fn forward(
        &self,
        tokens: usize,
        qkv: [&View<'_>; 3],
        transport: &mut dyn Transport<K::Buffer>,
    ) -> Result<Forward, Error> {
        let request = self.request_for(tokens, qkv, Pass::Forward)?;
        let attended = self.attend(&request, qkv, transport)?;
        Forward::new(attended, self.settings.policy)
    }

    /// Gradients with respect to this rank's rows of q, k and v, given those with respect to its
    /// rows of out and, if the loss of any rank uses it, of the lse.
    pub fn backward(
        &self,
        tokens: usize,
        qkv: [&View<'_>; 3],
        checkpoint: &Checkpoint,
        gradients: (&View<'_>, Option<&View<'_>>),
        transport: &mut dyn Transport<K::Buffer>,
    ) -> Result<Backward, Error> {
        if let Some(kept) = checkpoint.fetch()? {
            return self.backward_from(tokens, qkv, &kept.view(), gradients, transport);
        }
        let forward = self.request_for(tokens, qkv, Pass::Forward)?;
        let recomputed = self.attend(&forward, qkv, transport)?.kept;
        self.backward_from(tokens, qkv, &recomputed.view(), gradients, transport)
    }

    /// The same from what the caller kept of the forward pass.
    pub fn backward_from(
        &self,
        tokens: usize,
        qkv: [&View<'_>; 3],
        kept: &Kept<'_>,
        (dout, dlse): (&View<'_>, Option<&View<'_>>),
        transport: &mut dyn Transport<K::Buffer>,
    ) -> Result<Backward, Error> {
        let pass = Pass::Backward {
            dlse: dlse.is_some(),
        };
        let request = self.request_for(tokens, qkv, pass)?;
        let views = qkv.map(|view| *view);
        passes::differentiate(&request, views, kept, (dout, dlse), |inputs| {
            self.ring.run(&request, inputs, transport)
        })
    }

    fn attend(
        &self,
        request: &Request,
        qkv: [&View<'_>; 3],
        transport: &mut dyn Transport<K::Buffer>,
    ) -> Result<Attended, Error> {
        passes::attend(request, qkv.map(|view| *view), |inputs| {
            self.ring.run(request, inputs, transport)
        })
    }

    /// The request that this rank's rows amount to, if they agree with one another and are as many
    /// as the sharding gives it.
    fn request_for(
        &self,
        tokens: usize,
        [q, k, v]: [&View<'_>; 3],
        pass: Pass,
    ) -> Result<Request, Error> {
        let shape = shape_of(q, k, v, tokens)?;
        self.sharding.check(tokens)?;
        let [batch, _, heads, dim] = q.dims();
        let rows = self.sharding.rows(tokens, self.rank());
        same_shape("q", q, [batch, rows, heads, dim])?;
        Ok(self.request(shape, q.dtype(), pass))
    }
}
