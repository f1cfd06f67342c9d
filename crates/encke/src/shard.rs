//! One rank of an attention whose other ranks are in other processes or on other machines.
//!
//! Each rank has its rows of q, k and v and gets its rows of the results. A query is on the rank
//! that owns the token at its position. The caller's
//! [`Transport`] moves the messages, and its deadline applies. Every rank must have the same
//! settings and make the same calls in the same order. That cannot be checked here; the launcher
//! must compare the settings before the first call.

use std::sync::Arc;

use encke_core::kernel::Kernel;
use encke_core::plan::{Pass, Plan, Request};
use encke_core::sharding::Sharding;
use encke_core::transport::Transport;
use encke_core::{DType, Error as RequestError, Mode, Shape, View};
use encke_cpu::CpuKernel;
use encke_ring::call::CallRows;
use encke_ring::{CacheStats, RingError as Error, ShardRing};

use crate::builder::Builder;
use crate::checkpoint::{Checkpoint, SavedOutput};
use crate::passes::{self, ForwardResult, same_shape, shape_of, signature};
use crate::results::{Backward, Forward};

/// One rank of an attention with fixed settings. Plans and buffers are cached between calls.
pub struct ShardAttention<K: Kernel = CpuKernel> {
    settings: Builder,
    sharding: Sharding,
    ring: Arc<ShardRing<K>>,
}

impl Builder {
    /// One rank of the attention with these settings, on the CPU; the other ranks are elsewhere.
    pub fn build_shard(self, rank: usize) -> Result<ShardAttention, Error> {
        self.build_shard_on(CpuKernel::new()?, rank)
    }

    /// One rank of the attention with these settings; the other ranks are elsewhere.
    pub fn build_shard_on<K: Kernel>(
        self,
        kernel: K,
        rank: usize,
    ) -> Result<ShardAttention<K>, Error> {
        let settings = self.complete()?;
        let refusals = [
            (
                settings.balance.is_some(),
                "a balanced cut, which depends on the tokens of the call,",
                "give the cut of plan::balance::Balance as the sharding",
            ),
            (
                settings.auto.is_some(),
                "auto, which chooses a ring of threads,",
                "give the number of ranks and the sharding",
            ),
        ];
        if let Some((_, what, hint)) = refusals.into_iter().find(|(refused, ..)| *refused) {
            return Err(Error::Elsewhere { what, hint });
        }
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
            ring: Arc::new(ShardRing::new(kernel, rank)),
        })
    }
}

impl<K: Kernel> ShardAttention<K> {
    /// The same rank with another seed of its dropout, if it has any; every rank takes the same
    /// one. Both share their plans and buffers.
    pub fn with_seed(&self, seed: u64) -> ShardAttention<K> {
        ShardAttention {
            settings: self.settings.clone().with_seed(seed),
            sharding: self.sharding.clone(),
            ring: Arc::clone(&self.ring),
        }
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.ring.rank()
    }

    /// Which rank owns which tokens.
    pub fn sharding(&self) -> &Sharding {
        &self.sharding
    }

    /// Hits and misses of the caches of plans and buffers.
    pub fn stats(&self) -> CacheStats {
        self.ring.stats()
    }

    /// The plan for a shape, which is that of the whole sequence. Allocates nothing.
    pub fn plan(&self, shape: Shape, dtype: DType, pass: Pass) -> Result<Arc<Plan>, Error> {
        self.ring.plan(&self.request(shape, dtype, pass))
    }

    fn request(&self, shape: Shape, dtype: DType, pass: Pass) -> Request {
        let settings = &self.settings;
        let dtype = settings.compute_dtype(dtype, self.ring.kernel());
        settings.request(settings.ring_config(&self.sharding), shape, dtype, pass)
    }

    /// Forward pass on this rank's rows of a sequence of so many tokens, and as many queries or
    /// fewer (`CallRows`).
    pub fn forward(
        &self,
        sequence: impl Into<CallRows>,
        qkv: [&View<'_>; 3],
        transport: &mut dyn Transport<K::Buffer>,
    ) -> Result<Forward, Error> {
        let request = self.request_for(sequence.into(), qkv, Pass::Forward)?;
        let result = self.attend(&request, qkv, None, transport)?;
        result.into_forward(self.settings.policy)
    }

    /// The same with a sink for each query head; every rank passes the same ones. The backward pass
    /// returns this rank's share of their gradient.
    pub fn forward_with_sinks(
        &self,
        sequence: impl Into<CallRows>,
        qkv: [&View<'_>; 3],
        sinks: &[f64],
        transport: &mut dyn Transport<K::Buffer>,
    ) -> Result<Forward, Error> {
        let request = self.request_for(sequence.into(), qkv, Pass::Forward)?;
        let result = self.attend(&request, qkv, Some(sinks), transport)?;
        result.into_forward(self.settings.policy)
    }

    /// Gradients with respect to this rank's rows of q, k and v, given those with respect to its
    /// rows of out and, if the loss of any rank uses it, of the lse.
    pub fn backward(
        &self,
        sequence: impl Into<CallRows>,
        qkv: [&View<'_>; 3],
        checkpoint: &Checkpoint,
        gradients: (&View<'_>, Option<&View<'_>>),
        transport: &mut dyn Transport<K::Buffer>,
    ) -> Result<Backward, Error> {
        let (sequence, sinks) = (sequence.into(), checkpoint.sinks.as_deref());
        let saved = match checkpoint.fetch()? {
            Some(saved) => saved,
            None => {
                let forward = self.request_for(sequence, qkv, Pass::Forward)?;
                self.attend(&forward, qkv, sinks, transport)?.saved
            }
        };
        let saved = saved.view();
        let backward = self.backward_from(sequence, qkv, &saved, gradients, transport)?;
        passes::with_dsinks(backward, sinks, &saved, gradients)
    }

    /// The same from a forward output that the caller saved.
    pub fn backward_from(
        &self,
        sequence: impl Into<CallRows>,
        qkv: [&View<'_>; 3],
        saved: &SavedOutput<'_>,
        (dout, dlse): (&View<'_>, Option<&View<'_>>),
        transport: &mut dyn Transport<K::Buffer>,
    ) -> Result<Backward, Error> {
        let pass = Pass::Backward {
            dlse: dlse.is_some(),
        };
        let request = self.request_for(sequence.into(), qkv, pass)?;
        let views = qkv.map(|view| *view);
        passes::differentiate(&request, views, saved, (dout, dlse), |inputs| {
            self.ring.run(&request, inputs, transport)
        })
    }

    fn attend(
        &self,
        request: &Request,
        qkv: [&View<'_>; 3],
        sinks: Option<&[f64]>,
        transport: &mut dyn Transport<K::Buffer>,
    ) -> Result<ForwardResult, Error> {
        let queries = request.query_runs(self.rank());
        passes::attend(request, &queries, qkv.map(|view| *view), sinks, |inputs| {
            self.ring.run(request, inputs, transport)
        })
    }

    /// The request for this rank's rows, if their shapes and types agree and they are as many as
    /// the sharding gives it.
    fn request_for(
        &self,
        sequence: CallRows,
        [q, k, v]: [&View<'_>; 3],
        pass: Pass,
    ) -> Result<Request, Error> {
        let whole = |view: &View<'_>, rows: usize| {
            let ([batch, _, heads, dim], dtype) = signature(view);
            ([batch, rows, heads, dim], dtype)
        };
        let CallRows { queries, keys } = sequence;
        let shape = shape_of([whole(q, queries), whole(k, keys), whole(v, keys)])?;
        let request = self.request(shape, q.dtype(), pass);
        request.pattern.check(&request.shape)?;
        request.sharding.check(keys)?;
        let own = request.query_runs(self.rank());
        let own_queries = own.iter().map(|run| run.count).sum();
        let own_keys = request.sharding.rows(keys, self.rank());
        for (name, view, rows) in [
            ("q", q, own_queries),
            ("k", k, own_keys),
            ("v", v, own_keys),
        ] {
            let [batch, _, heads, dim] = view.dims();
            same_shape(name, view.dims(), [batch, rows, heads, dim])?;
        }
        Ok(request)
    }
}
