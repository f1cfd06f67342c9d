//! [`Attention`]: all ranks of a ring in this process, as threads.
//!
//! Nothing is computed here: a call makes a request and hands it to the ring; what a pass does
//! before and after its ring is in `passes`.

use std::sync::Arc;

use encke_core::kernel::Kernel;
use encke_core::plan::{Pass, Plan, Request};
use encke_core::sharding::{Cut, Run, Sharding};
use encke_core::{DType, Pattern, Shape, View};
use encke_cpu::CpuKernel;
use encke_ring::{CacheLimits, CacheStats, RingError as Error, ThreadRing};

use crate::auto::{Auto, ChoiceCache};
use crate::builder::{Builder, RingConfig};
use crate::checkpoint::{Checkpoint, SavedOutput};
use crate::choose::{Choice, Constraints, Workload, choose};
use crate::passes::{self, ForwardResult, shape_of, signature};
use crate::results::{Backward, Forward};

/// Attention with fixed settings. Plans and buffers are cached between calls.
pub struct Attention<K: Kernel = CpuKernel> {
    pub(crate) settings: Builder,
    pub(crate) choices: Arc<ChoiceCache>,
    pub(crate) sharding: Sharding,
    pub(crate) ring: Arc<ThreadRing<K>>,
}

impl Builder {
    /// The attention with these settings, on the CPU.
    pub fn build(self) -> Result<Attention, Error> {
        self.build_on(CpuKernel::new()?)
    }

    /// The attention with these settings, on the device of `kernel`.
    pub fn build_on<K: Kernel>(self, kernel: K) -> Result<Attention<K>, Error> {
        let settings = self.complete()?;
        let ring = ThreadRing::new(kernel, settings.deadline)
            .with_faults(settings.drill.clone())
            .with_limits(settings.limits);
        Ok(Attention {
            sharding: settings.new_sharding()?,
            ring: Arc::new(ring),
            settings,
            choices: Arc::default(),
        })
    }
}

impl Attention {
    /// The default settings: dense attention on one rank.
    pub fn builder() -> Builder {
        Builder::default()
    }
}

impl<K: Kernel> Attention<K> {
    /// Which query attends to which key.
    pub fn pattern(&self) -> &Pattern {
        &self.settings.pattern
    }

    /// Hits and misses of the caches of plans and buffers.
    pub fn stats(&self) -> CacheStats {
        self.ring.stats()
    }

    /// Limits of the caches.
    pub fn limits(&self) -> CacheLimits {
        self.ring.limits()
    }

    /// The kernel that computes.
    pub fn kernel(&self) -> &K {
        self.ring.kernel()
    }

    /// Drops everything but the kernel, and returns it; None while an attention that
    /// [`Attention::with_seed`] has made is in use.
    pub fn into_kernel(self) -> Option<K> {
        Arc::into_inner(self.ring).map(ThreadRing::into_kernel)
    }

    /// The same attention with another seed of its dropout, if it has any. Both share their plans
    /// and buffers, so a training loop may take another seed for every step.
    pub fn with_seed(&self, seed: u64) -> Attention<K> {
        Attention {
            settings: self.settings.clone().with_seed(seed),
            choices: Arc::clone(&self.choices),
            sharding: self.sharding.clone(),
            ring: Arc::clone(&self.ring),
        }
    }

    /// The settings that are chosen automatically, if any.
    pub fn auto(&self) -> Option<&Auto> {
        self.settings.auto.as_ref()
    }

    /// The compute type for inputs stored as `stored`.
    pub fn compute_dtype(&self, stored: DType) -> DType {
        self.settings.compute_dtype(stored, self.kernel())
    }

    /// The plan for a shape: its jobs, buffers and messages. Allocates nothing.
    pub fn plan(&self, shape: Shape, dtype: DType, pass: Pass) -> Result<Arc<Plan>, Error> {
        self.ring.plan(&self.request(shape, dtype, pass)?)
    }

    /// The automatic choice for a shape, with its alternatives; `None` without [`Builder::auto`].
    pub fn choice(
        &self,
        shape: Shape,
        dtype: DType,
        pass: Pass,
    ) -> Result<Option<Arc<Choice>>, Error> {
        let Some(auto) = &self.settings.auto else {
            return Ok(None);
        };
        let dtype = self.compute_dtype(dtype);
        let make = || {
            let settings = &self.settings;
            // Where bits must not depend on the ring, only its size is open.
            let open = settings.bits.is_planned();
            let constraints = Constraints {
                work: match pass {
                    Pass::Forward => Workload::Forward,
                    Pass::Backward { .. } | Pass::BackwardByBranch => Workload::Backward,
                },
                ranks: (!auto.ranks).then_some(settings.ranks),
                cut: (!auto.cut || !open).then(|| settings.cut.clone()),
                queries: (!auto.queries || !open).then_some(settings.queries),
                width: (!auto.width || !open).then_some(settings.schedule.width),
                nodes: (!auto.width || !open).then_some(settings.schedule),
                rotate: (!auto.rotate || !open).then_some(settings.schedule.backward),
                redundancy: settings.redundancy,
                memory_limit: auto.memory_limit,
                one_device_below: auto.one_device_below,
                ..Constraints::new(shape, settings.pattern.clone(), dtype, auto.most_ranks)
            };
            choose(self.kernel(), &constraints, &auto.machine).map_err(|error| Error::Undecided {
                reason: error.to_string(),
            })
        };
        self.choices.get((shape, dtype, pass), make).map(Some)
    }

    /// Forward pass.
    pub fn forward(&self, q: &View<'_>, k: &View<'_>, v: &View<'_>) -> Result<Forward, Error> {
        let request = self.request_for(q, k, v, Pass::Forward)?;
        let result = self.attend(&request, q, k, v, None)?;
        result.into_forward(self.settings.policy)
    }

    /// The same with a sink for each query head: a score that takes part in the softmax and has no
    /// value. Applied to the finished rows, so a 16-bit output is rounded twice. The backward pass
    /// returns their gradient, too.
    pub fn forward_with_sinks(
        &self,
        q: &View<'_>,
        k: &View<'_>,
        v: &View<'_>,
        sinks: &[f64],
    ) -> Result<Forward, Error> {
        let request = self.request_for(q, k, v, Pass::Forward)?;
        let result = self.attend(&request, q, k, v, Some(sinks))?;
        result.into_forward(self.settings.policy)
    }

    /// Gradients of a loss with respect to q, k and v, given those with respect to out (`dout`)
    /// and, if the loss uses it, to the lse (`dlse`, `[b, n, heads, 1]`).
    pub fn backward(
        &self,
        q: &View<'_>,
        k: &View<'_>,
        v: &View<'_>,
        checkpoint: &Checkpoint,
        dout: &View<'_>,
        dlse: Option<&View<'_>>,
    ) -> Result<Backward, Error> {
        let sinks = checkpoint.sinks.as_deref();
        let saved = match checkpoint.fetch()? {
            Some(saved) => saved,
            None => {
                let forward = self.request_for(q, k, v, Pass::Forward)?;
                self.attend(&forward, q, k, v, sinks)?.saved
            }
        };
        let saved = saved.view();
        let backward = self.backward_from(q, k, v, &saved, dout, dlse)?;
        passes::with_dsinks(backward, sinks, &saved, (dout, dlse))
    }

    /// The same from a forward output that the caller saved. `dout` has the type of q, or that of
    /// out where the compute type differs.
    pub fn backward_from(
        &self,
        q: &View<'_>,
        k: &View<'_>,
        v: &View<'_>,
        saved: &SavedOutput<'_>,
        dout: &View<'_>,
        dlse: Option<&View<'_>>,
    ) -> Result<Backward, Error> {
        let pass = Pass::Backward {
            dlse: dlse.is_some(),
        };
        let request = self.request_for(q, k, v, pass)?;
        passes::differentiate(&request, [*q, *k, *v], saved, (dout, dlse), |inputs| {
            self.ring.run(&request, inputs)
        })
    }

    fn attend(
        &self,
        request: &Request,
        q: &View<'_>,
        k: &View<'_>,
        v: &View<'_>,
        sinks: Option<&[f64]>,
    ) -> Result<ForwardResult, Error> {
        let queries = [Run::leading(request.shape.queries)];
        passes::attend(request, &queries, [*q, *k, *v], sinks, |inputs| {
            self.ring.run(request, inputs)
        })
    }

    fn request(&self, shape: Shape, dtype: DType, pass: Pass) -> Result<Request, Error> {
        // Before anything that has a value for each head, such as slopes.
        self.pattern().check(&shape)?;
        let ring_config = match self.choice(shape, dtype, pass)? {
            None => self.settings.ring_config(&self.sharding),
            Some(choice) => {
                let winner = choice.winner();
                RingConfig {
                    sharding: Sharding::new(winner.ranks, winner.cut.clone())?,
                    queries: winner.queries,
                    schedule: winner.schedule,
                }
            }
        };
        let request = self.request_on(ring_config, shape, dtype, pass);
        match (request.bits.is_planned(), request.sharding.cut()) {
            // The caller's cuts are taken as they are.
            (true, _) | (_, Cut::Firsts(_)) => Ok(request),
            _ => {
                let ranks = request.sharding.ranks();
                Ok(request.on_ranks(ranks)?)
            }
        }
    }

    pub(crate) fn request_on(
        &self,
        ring_config: RingConfig,
        shape: Shape,
        dtype: DType,
        pass: Pass,
    ) -> Request {
        let dtype = self.compute_dtype(dtype);
        self.settings.request(ring_config, shape, dtype, pass)
    }

    /// The request for q, k and v, if their shapes and types agree.
    fn request_for(
        &self,
        q: &View<'_>,
        k: &View<'_>,
        v: &View<'_>,
        pass: Pass,
    ) -> Result<Request, Error> {
        let shape = shape_of([q, k, v].map(signature))?;
        self.request(shape, q.dtype(), pass)
    }
}
