//! A ring that changes its size between calls: tensors that stay in shards, calls on them, and the
//! partition that a trace suggests.
//!
//! The decision here: a ring has no memory of tensors. Those that are to stay distributed are the
//! caller's [`Sharded`] tensors, and whoever resizes the ring names the ones that shall come along.

use encke_core::kernel::Kernel;
use encke_core::plan::balance;
use encke_core::plan::program::Role;
use encke_core::plan::resize::{Moving, Resize};
use encke_core::plan::{Pass, Request};
use encke_core::sharding::{Cut, Sharding};
use encke_core::{Error as RequestError, Shape, View};
use encke_ring::{Activity, Outcome, RingError as Error, Sharded, Trace};

use crate::attention::{Attention, Report};
use crate::passes::report;

/// What a forward pass on shards returns.
#[derive(Debug)]
pub struct ShardedForward {
    /// The output, in the compute type.
    pub out: Sharded,
    /// The log-sum-exp of each row, in f32 (f64 for f64). With `out` it is all that the backward
    /// pass wants.
    pub lse: Sharded,
    /// What happened.
    pub report: Report,
}

/// What a backward pass on shards returns.
#[derive(Debug)]
pub struct ShardedBackward {
    /// Gradient of q.
    pub dq: Sharded,
    /// Gradient of k.
    pub dk: Sharded,
    /// Gradient of v.
    pub dv: Sharded,
    /// What happened.
    pub report: Report,
}

/// What a ring is changed to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NewRing {
    /// So many ranks, cut as before (contiguous and even, if the tokens were cut by hand). Who takes
    /// whose place is chosen so that the fewest bytes move.
    Ranks(usize),
    /// As many ranks as there are sizes, each with so many tokens in one piece. Rank a stays rank a:
    /// sizes are cut for who is there.
    Sizes(Vec<usize>),
    /// This sharding, with the fewest bytes.
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

/// What a resize planned and did.
#[derive(Debug)]
pub struct Resizing {
    /// Bytes that travelled: as planned, and as counted.
    pub sent_bytes: usize,
    /// The place of each new rank among the old ones; those beyond are newcomers.
    pub places: Vec<usize>,
    /// What happened, by place.
    pub trace: Trace,
}

/// A partition by the speeds that a trace shows.
#[derive(Debug, Clone, PartialEq)]
pub struct Proposal {
    /// Tokens for each rank, to be applied with [`Attention::resize`].
    pub sizes: Vec<usize>,
    /// The speed of each rank, as a part of the fastest one's.
    pub speeds: Vec<f64>,
    /// The rank that computed longest, and for how long.
    pub slowest: (usize, f64),
    /// How long every rank would compute with these sizes.
    pub seconds: f64,
}

impl Report {
    /// The partition in which all ranks would have computed equally long: by what each of them did
    /// and how long it took. None where the trace shows no rank at work.
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
        let known = (0..pairs.len()).filter(|rank| measured(*rank));
        let known: Vec<f64> = known.map(|rank| pairs[rank] / seconds[rank]).collect();
        let Some(fastest) = known.iter().copied().reduce(f64::max) else {
            return Ok(None);
        };
        // Of a rank that had nothing to do, one can only think the usual.
        let mean = known.iter().sum::<f64>() / known.len() as f64;
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
    /// Who owns which tokens.
    pub fn sharding(&self) -> &Sharding {
        &self.sharding
    }

    /// Cuts a tensor into the shards of this ring, where it stays between calls.
    pub fn shard(&self, tensor: &View<'_>) -> Result<Sharded, Error> {
        Ok(Sharded::split(tensor, &self.sharding)?)
    }

    /// Attention of tensors that lie in this ring's shards.
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
            out: taken(&mut outcome, Role::Out),
            lse: taken(&mut outcome, Role::Lse),
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
        let mut inputs = vec![
            (Role::Q, q),
            (Role::K, k),
            (Role::V, v),
            (Role::Out, out),
            (Role::Lse, lse),
            (Role::Dout, dout),
        ];
        inputs.extend(dlse.map(|dlse| (Role::Dlse, dlse)));
        let mut outcome = self.ring.run_shards(&request, &inputs)?;
        Ok(ShardedBackward {
            dq: taken(&mut outcome, Role::Dq),
            dk: taken(&mut outcome, Role::Dk),
            dv: taken(&mut outcome, Role::Dv),
            report: report(outcome),
        })
    }

    /// Changes the ring, and moves the tensors that come along to its new shards. Later calls give
    /// the bits that a new ring like it would. Where it fails, ring and tensors are as before.
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
        let held: Vec<&Sharded> = tensors.iter().map(|tensor| &**tensor).collect();
        let moving: Vec<Moving> = held.iter().map(|tensor| tensor.moving()).collect();
        let resized = self.ring.resize(&resize, &held)?;
        let sent_bytes = resized.trace.sent_bytes();
        assert_eq!(
            sent_bytes,
            resize.sent_bytes(&moving),
            "what moved is what was planned"
        );
        for (tensor, moved) in tensors.iter_mut().zip(resized.tensors) {
            **tensor = moved;
        }
        self.sharding = sharding;
        // From now on the ring is what it was made, whatever was left open before.
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
                Cut::Firsts(_) => (*ranks, Cut::Contiguous),
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
        for (tensor, of) in [("k", k), ("v", v)] {
            if of.dtype() != q.dtype() {
                return Err(Error::Request(RequestError::DTypeMismatch {
                    tensor,
                    got: of.dtype(),
                    expected: q.dtype(),
                }));
            }
        }
        let [batch, tokens, heads, dim] = q.dims();
        let shape = Shape::new(batch, tokens, heads, k.dims()[2], dim)?;
        let way = self.settings.way(&self.sharding);
        Ok(self.request_on(way, shape, q.dtype(), pass))
    }
}

fn taken(outcome: &mut Outcome<Sharded>, role: Role) -> Sharded {
    let tensor = outcome.take(role);
    tensor.expect("a pass returns every output it has")
}
