//! A ring that changes its size between calls: tensors that stay sharded, calls on them, and the
//! partition that a trace suggests.
//!
//! The decision here: the ring keeps no list of tensors. Tensors that stay distributed are the
//! caller's [`Sharded`] tensors; [`Attention::resize`] moves those that the caller passes to it.

use encke_core::kernel::Kernel;
use encke_core::plan::balance;
use encke_core::plan::program::Role;
use encke_core::plan::resize::{Resize, ResizeTensor};
use encke_core::plan::{Pass, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{Error as RequestError, Padding, View};
use encke_ring::{Activity, RingError as Error, Sharded, Trace};

use crate::attention::Attention;
use crate::passes::{backward_inputs, report, shape_of, take_output};
use crate::results::Report;

/// Results of a forward pass on shards.
#[derive(Debug)]
pub struct ShardedForward {
    /// The output, in the compute type.
    pub out: Sharded,
    /// The log-sum-exp of each row, in f32 (f64 for f64). The backward pass needs `out` and `lse`.
    pub lse: Sharded,
    /// Plan, times, bytes and memory of the call.
    pub report: Report,
}

/// Results of a backward pass on shards.
#[derive(Debug)]
pub struct ShardedBackward {
    /// Gradient of q.
    pub dq: Sharded,
    /// Gradient of k.
    pub dk: Sharded,
    /// Gradient of v.
    pub dv: Sharded,
    /// Plan, times, bytes and memory of the call.
    pub report: Report,
}

/// The target of a resize.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NewRing {
    /// This number of ranks, cut as before (contiguous and even, if the old cut was explicit). Old
    /// ranks are matched to new ones so that the fewest bytes move.
    Ranks(usize),
    /// One rank for each size, with that many contiguous tokens. Rank a stays rank a, because sizes
    /// are chosen for the speed of a particular rank.
    Sizes(Vec<usize>),
    /// This sharding; ranks are matched so that the fewest bytes move.
    Sharding(Sharding),
}

impl From<usize> for NewRing {
    fn from(ranks: usize) -> NewRing {
        NewRing::Ranks(ranks)
    }
}

impl From<Vec<usize>> for NewRing {
    fn from(sizes: Vec<usize>) -> NewRing {
        NewRing::Sizes(sizes)
    }
}

/// Report of a resize.
#[derive(Debug)]
pub struct Resizing {
    /// Bytes sent; the planned and the counted bytes agree.
    pub sent_bytes: usize,
    /// The old rank that each new rank was; numbers beyond the old ring are ranks that joined.
    pub places: Vec<usize>,
    /// Times and bytes, by place.
    pub trace: Trace,
}

/// A partition by the speeds that a trace shows.
#[derive(Debug, Clone, PartialEq)]
pub struct Proposal {
    /// Tokens for each rank, for [`Attention::resize`].
    pub sizes: Vec<usize>,
    /// The speed of each rank, relative to the fastest.
    pub speeds: Vec<f64>,
    /// The rank that computed longest, and its seconds.
    pub slowest: (usize, f64),
    /// Predicted compute seconds of every rank with these sizes.
    pub seconds: f64,
}

impl Report {
    /// The partition with which all ranks would have computed equally long, from the query-key
    /// pairs and the compute time of each rank. `None` where the trace shows no computation.
    pub fn proposal(&self) -> Result<Option<Proposal>, Error> {
        let request = self.plan.request();
        let (mut pairs, mut seconds) = (Vec::new(), vec![0.0; self.plan.ranks()]);
        for rank in 0..self.plan.ranks() {
            pairs.push(self.plan.rank(rank)?.pairs() as f64);
        }
        for event in &self.trace.events {
            if event.activity == Activity::Compute && event.rank < seconds.len() {
                seconds[event.rank] += event.duration.as_secs_f64();
            }
        }
        let measured = |rank: usize| pairs[rank] > 0.0 && seconds[rank] > 0.0;
        let active = (0..pairs.len()).filter(|rank| measured(*rank));
        let active: Vec<f64> = active.map(|rank| pairs[rank] / seconds[rank]).collect();
        let Some(fastest) = active.iter().copied().reduce(f64::max) else {
            return Ok(None);
        };
        // A rank without work is assumed to have the mean speed.
        let mean = active.iter().sum::<f64>() / active.len() as f64;
        let speed = |rank: usize| match measured(rank) {
            true => pairs[rank] / seconds[rank],
            false => mean,
        };
        let speeds: Vec<f64> = (0..pairs.len()).map(speed).collect();
        let cut = balance::by_speed(&request.pattern, &request.shape, &speeds)?;
        let sharding = Sharding::new(speeds.len(), cut)?;
        let tokens = request.shape.tokens;
        let longest = (0..pairs.len()).max_by(|a, b| seconds[*a].total_cmp(&seconds[*b]));
        let slowest = longest.unwrap_or(0);
        Ok(Some(Proposal {
            sizes: (0..speeds.len())
                .map(|rank| sharding.rows(tokens, rank))
                .collect(),
            slowest: (slowest, seconds[slowest]),
            seconds: pairs.iter().sum::<f64>() / speeds.iter().sum::<f64>(),
            speeds: speeds.into_iter().map(|speed| speed / fastest).collect(),
        }))
    }
}

impl<K: Kernel> Attention<K> {
    /// Which rank owns which tokens.
    pub fn sharding(&self) -> &Sharding {
        &self.sharding
    }

    /// Shards a tensor for this ring; it stays sharded between calls.
    pub fn shard(&self, tensor: &View<'_>) -> Result<Sharded, Error> {
        Ok(Sharded::split(tensor, &self.sharding)?)
    }

    /// Shards a tensor of queries (q, dout, dlse) of a sequence of `tokens` tokens, which may have
    /// fewer rows than that: each stays with the token at its position.
    pub fn shard_queries(&self, tensor: &View<'_>, tokens: usize) -> Result<Sharded, Error> {
        let queries = tensor.dims()[1];
        let last = tokens.saturating_sub(queries);
        let first = self.pattern().offset_of_queries().unwrap_or(last);
        Ok(Sharded::split_queries(
            tensor,
            &self.sharding,
            tokens,
            first,
        )?)
    }

    /// Forward pass on tensors sharded for this ring.
    pub fn forward_shards(
        &self,
        q: &Sharded,
        k: &Sharded,
        v: &Sharded,
    ) -> Result<ShardedForward, Error> {
        let request = self.request_for_shards(q, k, v, Pass::Forward)?;
        let inputs = [(Role::Q, q), (Role::K, k), (Role::V, v)];
        let mut outcome = self.ring.run_shards(&request, &inputs)?;
        Ok(ShardedForward {
            out: take_output(&mut outcome, Role::Out),
            lse: take_output(&mut outcome, Role::Lse),
            report: report(outcome),
        })
    }

    /// Gradients, given the forward pass's inputs and results and the gradients with respect to
    /// those: `dout`, and `dlse` if the loss uses the lse.
    pub fn backward_shards(
        &self,
        (q, k, v): (&Sharded, &Sharded, &Sharded),
        (out, lse): (&Sharded, &Sharded),
        dout: &Sharded,
        dlse: Option<&Sharded>,
    ) -> Result<ShardedBackward, Error> {
        let pass = Pass::Backward {
            dlse: dlse.is_some(),
        };
        let request = self.request_for_shards(q, k, v, pass)?;
        let inputs = backward_inputs([q, k, v], [out, lse, dout], dlse);
        let mut outcome = self.ring.run_shards(&request, &inputs)?;
        Ok(ShardedBackward {
            dq: take_output(&mut outcome, Role::Dq),
            dk: take_output(&mut outcome, Role::Dk),
            dv: take_output(&mut outcome, Role::Dv),
            report: report(outcome),
        })
    }

    /// Changes the ring, and moves these tensors to its new shards. Later calls give the bits of a
    /// new ring of that size. After an error, ring and tensors are unchanged.
    pub fn resize(
        &mut self,
        to: impl Into<NewRing>,
        tensors: &mut [&mut Sharded],
    ) -> Result<Resizing, Error> {
        let to = to.into();
        let sharding = self.sharding_of(&to)?;
        let tokens = match (&to, tensors.first()) {
            (_, Some(tensor)) => tensor.dims()[1],
            (NewRing::Sizes(sizes), None) => sizes.iter().sum(),
            (_, None) => 0,
        };
        if let NewRing::Sizes(sizes) = &to
            && sizes.iter().sum::<usize>() != tokens
        {
            return Err(Error::Request(RequestError::Sizes {
                sizes: sizes.clone(),
                tokens,
            }));
        }
        let resize = match to {
            NewRing::Sizes(_) => Resize::in_place(&self.sharding, &sharding, tokens),
            NewRing::Ranks(_) | NewRing::Sharding(_) => {
                Resize::new(&self.sharding, &sharding, tokens)
            }
        }?;
        let borrowed: Vec<&Sharded> = tensors.iter().map(|tensor| &**tensor).collect();
        let moving: Vec<ResizeTensor> = borrowed.iter().map(|tensor| tensor.moving()).collect();
        let resized = self.ring.resize(&resize, &borrowed)?;
        let sent_bytes = resized.trace.sent_bytes();
        assert_eq!(
            sent_bytes,
            resize.sent_bytes(&moving),
            "the bytes sent are the bytes planned"
        );
        for (tensor, moved) in tensors.iter_mut().zip(resized.tensors) {
            **tensor = moved;
        }
        self.sharding = sharding;
        // From now on the ring's size is explicit and no longer chosen automatically.
        self.settings.auto = None;
        Ok(Resizing {
            sent_bytes,
            places: resize.places().to_vec(),
            trace: resized.trace,
        })
    }

    fn sharding_of(&self, to: &NewRing) -> Result<Sharding, Error> {
        let (ranks, cut) = match to {
            NewRing::Ranks(ranks) => match self.sharding.cut() {
                Cut::Firsts(_) | Cut::Ranges(_) => (*ranks, Cut::Contiguous),
                cut => (*ranks, cut.clone()),
            },
            NewRing::Sizes(sizes) => {
                let mut first = 0;
                let firsts = sizes.iter().map(|size| {
                    first += size;
                    first - size
                });
                (sizes.len(), Cut::Firsts(firsts.collect()))
            }
            NewRing::Sharding(sharding) => return Ok(sharding.clone()),
        };
        Ok(Sharding::new(ranks, cut)?)
    }

    fn request_for_shards(
        &self,
        q: &Sharded,
        k: &Sharded,
        v: &Sharded,
        pass: Pass,
    ) -> Result<Request, Error> {
        if self.pattern().splits_slots() {
            return Err(Error::Request(RequestError::NotInMode {
                what: "a call on shards",
                mode: "detached mixing or fkodom",
                hint: "give whole tensors: branches are combined over the whole sequence",
            }));
        }
        if self.pattern().padding_rule() != Padding::None {
            return Err(Error::Request(RequestError::Excludes {
                one: "torchscale's padding",
                other: "a call on shards",
                reason: "its extra terms are added to whole tensors; give those",
            }));
        }
        let signatures = [q, k, v].map(|of| (of.dims(), of.dtype()));
        let shape = shape_of(signatures)?;
        let ring_config = self.settings.ring_config(&self.sharding);
        Ok(self.request_on(ring_config, shape, q.dtype(), pass))
    }
}
