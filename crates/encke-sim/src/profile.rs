//! Memory by ring size: measured beside planned bytes, and the exponent of both against the number
//! of ranks.
//!
//! Measured bytes come from runs: every rank computes in this process on real tensors, and its
//! ledger has every byte of its buffers. Rings too large to be run have planned bytes only
//! ([`RankProfile::measured`] is `None`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use encke_core::conformance::Random;
use encke_core::kernel::Kernel;
use encke_core::plan::program::{Component, Role};
use encke_core::plan::{Pass, Plan, Request};
use encke_core::{Data, Element, Shape, Tensor, View};
use encke_ring::ledger::Holdings;
use encke_ring::memory::{planned, share_workspace};
use encke_ring::{Outcome, RingError};
use serde::Serialize;

use crate::lockstep;
use crate::power_law::exponent;

/// The memory of one rank.
#[derive(Debug, Clone, Serialize)]
pub struct RankProfile {
    /// The rank.
    pub rank: usize,
    /// Planned bytes, the kernel's workspace included.
    pub planned: BTreeMap<Component, usize>,
    /// Measured bytes; `None` if the ring was not run.
    pub measured: Option<MeasuredMemory>,
}

/// The measured memory of one rank.
#[derive(Debug, Clone, Serialize)]
pub struct MeasuredMemory {
    /// Over the whole call; nothing is held after it.
    pub total: Holdings,
    /// In each round.
    pub rounds: Vec<Holdings>,
}

impl RankProfile {
    /// All planned bytes.
    pub fn planned_bytes(&self) -> usize {
        self.planned.values().sum()
    }

    /// The measured peak.
    pub fn measured_bytes(&self) -> Option<usize> {
        self.measured
            .as_ref()
            .map(|measured| measured.total.peak_bytes)
    }
}

/// One pass on a ring of one size.
#[derive(Debug, Clone, Serialize)]
pub struct RingProfile {
    /// The pass.
    pub pass: Pass,
    /// The size of the ring.
    pub ranks: usize,
    /// Each rank.
    pub of: Vec<RankProfile>,
}

/// Which bytes are meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum MemorySource {
    /// Bytes held in a run.
    Measured,
    /// Bytes of the plan.
    Planned,
}

impl RingProfile {
    /// The planned memory of a ring that is not run.
    pub fn planned<K: Kernel>(kernel: &K, request: &Request) -> Result<RingProfile, RingError> {
        let plan = Plan::new(request.clone())?;
        let mut of = Vec::with_capacity(plan.ranks());
        for rank in 0..plan.ranks() {
            of.push(RankProfile {
                rank,
                planned: planned(kernel, &plan.rank(rank)?, 1, request),
                measured: None,
            });
        }
        share_workspace(of.iter_mut().map(|rank| &mut rank.planned));
        Ok(RingProfile {
            pass: request.pass,
            ranks: plan.ranks(),
            of,
        })
    }

    /// The memory of a run on these inputs. The kernel's scratch memory is released first.
    pub fn measured<K: Kernel>(
        kernel: &K,
        request: &Request,
        inputs: &[(Role, View<'_>)],
    ) -> Result<(RingProfile, Outcome), RingError> {
        let plan = Arc::new(Plan::new(request.clone())?);
        kernel.release_scratch();
        let outcome = lockstep::run(kernel, &plan, inputs)?;
        let mut of = Vec::with_capacity(plan.ranks());
        for memory in &outcome.memory {
            let rounds = plan.rank(memory.rank)?.rounds.len();
            of.push(RankProfile {
                rank: memory.rank,
                planned: memory.planned.clone(),
                measured: Some(MeasuredMemory {
                    total: memory.ledger.total(),
                    rounds: memory.ledger.rounds(rounds),
                }),
            });
        }
        let profile = RingProfile {
            pass: request.pass,
            ranks: plan.ranks(),
            of,
        };
        Ok((profile, outcome))
    }

    /// The components that at least one rank plans bytes for.
    pub fn components(&self) -> BTreeSet<Component> {
        let planned = self.of.iter().flat_map(|rank| &rank.planned);
        let held = planned.filter(|(_, bytes)| **bytes > 0);
        held.map(|(component, _)| *component).collect()
    }

    /// The bytes of a component on the rank with the most.
    pub fn largest(&self, component: Component, source: MemorySource) -> Option<usize> {
        let of = |rank: &RankProfile| match source {
            MemorySource::Planned => Some(rank.planned.get(&component).copied().unwrap_or(0)),
            MemorySource::Measured => {
                let measured = rank.measured.as_ref()?;
                Some(measured.total.peak.get(&component).copied().unwrap_or(0))
            }
        };
        self.of.iter().map(of).max().flatten()
    }

    /// The bytes of all components on the rank with the most.
    pub fn fullest(&self, source: MemorySource) -> Option<usize> {
        let of = |rank: &RankProfile| match source {
            MemorySource::Planned => Some(rank.planned_bytes()),
            MemorySource::Measured => rank.measured_bytes(),
        };
        self.of.iter().map(of).max().flatten()
    }

    /// Measured / planned bytes of the ranks: the smallest and the largest ratio.
    pub fn shares(&self) -> Option<(f64, f64)> {
        let share = |rank: &RankProfile| {
            let (measured, planned) = (rank.measured_bytes()?, rank.planned_bytes());
            // A rank without tokens has no buffers.
            Some(match planned {
                0 if measured == 0 => 1.0,
                _ => measured as f64 / planned as f64,
            })
        };
        let shares: Option<Vec<f64>> = self.of.iter().map(share).collect();
        let shares = shares?;
        let least = shares.iter().copied().reduce(f64::min)?;
        Some((least, shares.into_iter().reduce(f64::max)?))
    }
}

/// The exponent of the largest rank's bytes against the size of the ring: −1 is O(n/p), 0 is
/// constant. Ring sizes at which no rank has the component are left out.
pub fn component_exponent(
    rings: &[RingProfile],
    component: Component,
    source: MemorySource,
) -> Option<f64> {
    fitted(rings, |ring| ring.largest(component, source))
}

/// The same for all components together.
pub fn total_exponent(rings: &[RingProfile], source: MemorySource) -> Option<f64> {
    fitted(rings, |ring| ring.fullest(source))
}

fn fitted(rings: &[RingProfile], bytes: impl Fn(&RingProfile) -> Option<usize>) -> Option<f64> {
    let point = |ring: &RingProfile| Some((ring.ranks as f64, bytes(ring)? as f64));
    exponent(&rings.iter().filter_map(point).collect::<Vec<_>>())
}

/// Random tensors for both passes of a request.
#[derive(Debug)]
pub struct ProfileInputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
}

impl ProfileInputs {
    /// The tensors of a seed in the request's shape and dtype.
    pub fn random(request: &Request, seed: u64) -> ProfileInputs {
        let Shape {
            batch,
            tokens,
            queries,
            heads,
            kv_heads,
            dim,
            value_dim,
        } = request.shape;
        let slots = request.pattern.slots(heads).len();
        let mut random = Random::new(seed);
        let mut tensor = |rows: usize, heads: usize, dim: usize| {
            let mut tensor = Tensor::zeros(request.dtype, [batch, rows, heads, dim]);
            match tensor.data_mut() {
                Data::F64(x) => fill(x, &mut random),
                Data::F32(x) => fill(x, &mut random),
                Data::Bf16(x) => fill(x, &mut random),
                Data::F16(x) => fill(x, &mut random),
            }
            tensor
        };
        ProfileInputs {
            q: tensor(queries, heads, dim),
            k: tensor(tokens, kv_heads, dim),
            v: tensor(tokens, kv_heads, value_dim),
            dout: tensor(queries, slots, value_dim),
        }
    }

    /// Measures the forward pass of a request, and with `grad` the backward pass on its outputs.
    pub fn measure<K: Kernel>(
        &self,
        kernel: &K,
        request: &Request,
        grad: bool,
    ) -> Result<Vec<RingProfile>, RingError> {
        let forward = Request {
            pass: Pass::Forward,
            ..request.clone()
        };
        let mut inputs = vec![
            (Role::Q, self.q.view()),
            (Role::K, self.k.view()),
            (Role::V, self.v.view()),
        ];
        let (profile, mut outcome) = RingProfile::measured(kernel, &forward, &inputs)?;
        let mut profiles = vec![profile];
        if let (true, Some(out), Some(lse)) =
            (grad, outcome.take(Role::Out), outcome.take(Role::Lse))
        {
            inputs.extend([
                (Role::Out, out.view()),
                (Role::Lse, lse.view()),
                (Role::Dout, self.dout.view()),
            ]);
            let backward = Request {
                pass: Pass::Backward { dlse: false },
                ..forward
            };
            profiles.push(RingProfile::measured(kernel, &backward, &inputs)?.0);
        }
        Ok(profiles)
    }
}

fn fill<T: Element>(values: &mut [T], random: &mut Random) {
    for x in values {
        *x = T::from_f64(random.unit());
    }
}
