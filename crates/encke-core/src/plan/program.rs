//! A rank's plan as a program: buffers to allocate, and rounds of tasks and hops to carry out.
//!
//! The decision that shaped everything above it: the plan is complete. A rank interprets it and
//! decides nothing, so coverage, bytes and memory are proven on the program without running it, a
//! simulator can time it and a profiler can hold it against what happened.

use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

pub use super::component::Component;
use crate::dtype::DType;
use crate::job::{Block, Job};
use crate::sharding::Run;
use crate::transport::{Address, Moved};

/// One of a rank's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct BufferId(pub usize);

/// A buffer as planned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BufferPlan {
    /// What it holds.
    pub name: &'static str,
    /// What it is for.
    pub component: Component,
    /// The rank whose tokens it is about: the one that holds it, unless it is a replica or that
    /// rank's tokens were adopted.
    pub shard: usize,
    /// Its type.
    pub dtype: DType,
    /// Its size.
    pub elements: usize,
}

impl BufferPlan {
    /// Its size in bytes.
    pub fn bytes(&self) -> usize {
        self.elements * self.dtype.bytes()
    }

    /// Whether it stays at home: what it holds is of its shard's own rows, and of no round in
    /// particular.
    pub fn is_resident(&self) -> bool {
        self.component.is_resident()
    }
}

/// The three buffers of a carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct CarryIds {
    /// Weighted sums.
    pub acc: BufferId,
    /// Maxima.
    pub m: BufferId,
    /// Denominators.
    pub l: BufferId,
}

/// What a buffer is filled with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fill {
    /// 0.
    Zero,
    /// −inf, the maximum of nothing.
    MinusInfinity,
}

/// One thing a kernel is told to do.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "task")]
#[allow(
    clippy::large_enum_variant,
    reason = "jobs are most of a program; boxing them gains nothing"
)]
pub enum Task {
    /// Set a buffer.
    Fill {
        /// Which.
        buffer: BufferId,
        /// To what.
        value: Fill,
    },
    /// Copy or add rows.
    Copy {
        /// Which rows.
        blocks: Vec<Block>,
        /// Whether they are added to what is there.
        add: bool,
        /// Source.
        from: BufferId,
        /// Destination.
        to: BufferId,
    },
    /// Copy rows into a buffer that holds nothing else from then on: a parcel.
    Pack {
        /// Which rows.
        blocks: Vec<Block>,
        /// Source.
        from: BufferId,
        /// Destination.
        to: BufferId,
    },
    /// Attend.
    Forward {
        /// Which rows.
        job: Job,
        /// Queries.
        q: BufferId,
        /// Keys.
        k: BufferId,
        /// Values.
        v: BufferId,
        /// Whether its cells have seen nothing yet, so that what the carry holds is not read.
        begins: bool,
        /// Where the result accumulates.
        carry: CarryIds,
    },
    /// Attend for the last time: the carry is continued to its end.
    Conclude {
        /// Which rows.
        job: Job,
        /// Queries.
        q: BufferId,
        /// Keys.
        k: BufferId,
        /// Values.
        v: BufferId,
        /// What was seen before.
        carry: CarryIds,
        /// The output.
        out: BufferId,
        /// The lse.
        lse: BufferId,
    },
    /// Attend queries that see nothing else, to the end.
    Attend {
        /// Which rows.
        job: Job,
        /// Queries.
        q: BufferId,
        /// Keys.
        k: BufferId,
        /// Values.
        v: BufferId,
        /// The output.
        out: BufferId,
        /// The lse.
        lse: BufferId,
    },
    /// Merge cells of one carry into another.
    Merge {
        /// Which cells.
        blocks: Vec<Block>,
        /// Source.
        from: CarryIds,
        /// Destination.
        to: CarryIds,
    },
    /// End the softmax.
    Finish {
        /// How many cells.
        cells: usize,
        /// Head dimension.
        dim: usize,
        /// What the output is multiplied with.
        gain: f64,
        /// The carry.
        carry: CarryIds,
        /// The output.
        out: BufferId,
        /// The lse.
        lse: BufferId,
    },
    /// delta = dout·out − dlse.
    Delta {
        /// How many cells.
        cells: usize,
        /// Head dimension.
        dim: usize,
        /// The output.
        out: BufferId,
        /// Its gradient.
        dout: BufferId,
        /// The gradient of the lse, where there is one.
        dlse: Option<BufferId>,
        /// The result.
        delta: BufferId,
    },
    /// Add gradients.
    Backward {
        /// Which rows.
        job: Job,
        /// Queries.
        q: BufferId,
        /// Keys.
        k: BufferId,
        /// Values.
        v: BufferId,
        /// Gradient of the output.
        dout: BufferId,
        /// The lse.
        lse: BufferId,
        /// The delta.
        delta: BufferId,
        /// Gradient of q.
        dq: BufferId,
        /// Gradient of k.
        dk: BufferId,
        /// Gradient of v.
        dv: BufferId,
    },
}

impl Task {
    /// The buffers it needs for itself: those it writes, and carries it ends or merges.
    pub fn holds(&self) -> Vec<BufferId> {
        match self {
            Task::Fill { buffer, .. } => vec![*buffer],
            Task::Copy { to, .. } | Task::Pack { to, .. } => vec![*to],
            Task::Forward { carry, .. } => vec![carry.acc, carry.m, carry.l],
            Task::Attend { out, lse, .. } => vec![*out, *lse],
            Task::Merge { from, to, .. } => vec![from.acc, from.m, from.l, to.acc, to.m, to.l],
            Task::Conclude {
                carry, out, lse, ..
            }
            | Task::Finish {
                carry, out, lse, ..
            } => vec![carry.acc, carry.m, carry.l, *out, *lse],
            Task::Delta { delta, .. } => vec![*delta],
            Task::Backward { dq, dk, dv, .. } => vec![*dq, *dk, *dv],
        }
    }

    /// Renames every buffer it names.
    pub fn rename(&mut self, name: impl Fn(BufferId) -> BufferId) {
        let ids: Vec<&mut BufferId> = match self {
            Task::Fill { buffer, .. } => vec![buffer],
            Task::Copy { from, to, .. } | Task::Pack { from, to, .. } => vec![from, to],
            Task::Forward { q, k, v, carry, .. } => {
                vec![q, k, v, &mut carry.acc, &mut carry.m, &mut carry.l]
            }
            Task::Attend {
                q, k, v, out, lse, ..
            } => vec![q, k, v, out, lse],
            Task::Conclude {
                q,
                k,
                v,
                carry,
                out,
                lse,
                ..
            } => {
                let [acc, m, l] = [&mut carry.acc, &mut carry.m, &mut carry.l];
                vec![q, k, v, acc, m, l, out, lse]
            }
            Task::Merge { from, to, .. } => {
                let [from, to] = [from, to].map(|of| [&mut of.acc, &mut of.m, &mut of.l]);
                from.into_iter().chain(to).collect()
            }
            Task::Finish {
                carry, out, lse, ..
            } => vec![&mut carry.acc, &mut carry.m, &mut carry.l, out, lse],
            Task::Delta {
                out,
                dout,
                dlse,
                delta,
                ..
            } => [out, dout, delta].into_iter().chain(dlse).collect(),
            Task::Backward {
                q,
                k,
                v,
                dout,
                lse,
                delta,
                dq,
                dk,
                dv,
                ..
            } => vec![q, k, v, dout, lse, delta, dq, dk, dv],
        };
        for id in ids {
            *id = name(*id);
        }
    }

    /// This task and another one of the same kind on the same buffers, as one that does `job`.
    pub(super) fn joined(&self, next: &Task, job: Job) -> Option<Task> {
        let (mut joined, mut other) = (self.clone(), next.clone());
        *other.job_mut()? = job.clone();
        *joined.job_mut()? = job;
        (joined == other).then_some(joined)
    }

    /// This task with another job.
    pub(super) fn with(&self, job: Job) -> Option<Task> {
        let mut task = self.clone();
        *task.job_mut()? = job;
        Some(task)
    }

    fn job_mut(&mut self) -> Option<&mut Job> {
        match self {
            Task::Forward { job, .. }
            | Task::Conclude { job, .. }
            | Task::Attend { job, .. }
            | Task::Backward { job, .. } => Some(job),
            _ => None,
        }
    }

    /// The attention it computes, if it is one.
    pub fn job(&self) -> Option<&Job> {
        match self {
            Task::Forward { job, .. }
            | Task::Conclude { job, .. }
            | Task::Attend { job, .. }
            | Task::Backward { job, .. } => Some(job),
            _ => None,
        }
    }
}

/// Rows of a tensor of the call, named by token: some of each of some segments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TokenRows {
    /// How many segments.
    pub segments: usize,
    /// Tokens from one segment's first row to the next one's.
    pub segment_step: usize,
    /// The rows of the first segment: one run for each parcel that has some beside the others'.
    pub rows: Vec<Run>,
    /// The heads of each row.
    pub heads: Arc<[usize]>,
}

impl TokenRows {
    /// The rows of each segment, segment after segment.
    pub fn runs(&self) -> impl Iterator<Item = Run> {
        (0..self.segments).flat_map(move |segment| {
            self.rows.iter().map(move |run| Run {
                first: run.first + segment * self.segment_step,
                ..*run
            })
        })
    }

    /// How many rows, over all segments.
    pub fn count(&self) -> usize {
        self.segments * self.rows.iter().map(|run| run.count).sum::<usize>()
    }
}

/// What a message holds in terms of the call, for whoever has the rows from elsewhere. It does not
/// grow with the number of tokens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Origin {
    /// The tensor.
    pub role: Role,
    /// Its rows in the order of the message; within each of these, batch entry after batch entry.
    pub rows: Arc<[TokenRows]>,
}

/// One end of a hop: what is sent to, or received from, another rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Message {
    /// The other end.
    pub address: Address,
    /// What is read (sent) or overwritten (received).
    pub buffer: BufferId,
    /// What it holds: rows of an input, or a sum on its way to rows of a gradient. None for what
    /// is no tensor's: carries under way, and finished rows that are shared.
    pub origin: Option<Origin>,
}

/// Some tasks, then hops that fly while the other tasks compute.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Round {
    /// Done first.
    pub before: Vec<Task>,
    /// Posted next.
    pub sends: Vec<Message>,
    /// Posted with them.
    pub receives: Vec<Message>,
    /// Done while they fly.
    pub meanwhile: Vec<Task>,
}

/// A tensor of the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the names are the tensors' own")]
pub enum Role {
    Q,
    K,
    V,
    Out,
    Lse,
    Dout,
    Dlse,
    Dq,
    Dk,
    Dv,
    /// Any tensor, where its rows are only moved.
    Rows,
}

/// Where a tensor of the call enters or leaves a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Port {
    /// The tensor.
    pub role: Role,
    /// The buffer.
    pub buffer: BufferId,
    /// The tokens of its rows, in order.
    pub runs: Vec<Run>,
}

/// Everything one rank will do.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RankPlan {
    /// The rank.
    pub rank: usize,
    /// Tokens it owns, with those it has adopted.
    pub rows: usize,
    /// The buffers it allocates.
    pub buffers: Vec<BufferPlan>,
    /// What it is given.
    pub inputs: Vec<Port>,
    /// What it does.
    pub rounds: Vec<Round>,
    /// What it returns.
    pub outputs: Vec<Port>,
}

impl RankPlan {
    /// The same program for whoever has this rank's rows by themselves, as a shard: ports name rows
    /// of the shard, in order, instead of tokens of the sequence.
    pub fn on_shard(mut self) -> RankPlan {
        for port in self.inputs.iter_mut().chain(&mut self.outputs) {
            let count = port.runs.iter().map(|run| run.count).sum();
            let rows = Run {
                first: 0,
                stride: 1,
                count,
            };
            port.runs = (count > 0).then_some(rows).into_iter().collect();
        }
        self
    }

    /// Bytes of a message.
    pub fn message_bytes(&self, message: &Message) -> usize {
        message.address.elements * self.buffers[message.buffer.0].dtype.bytes()
    }

    /// Bytes that one round sends and receives.
    pub fn moved(&self, round: usize) -> Moved {
        let bytes = |messages: &[Message]| -> usize {
            let each = messages.iter().map(|message| self.message_bytes(message));
            each.sum()
        };
        let Round {
            sends, receives, ..
        } = &self.rounds[round];
        Moved {
            sent_bytes: bytes(sends),
            received_bytes: bytes(receives),
        }
    }

    /// Bytes sent to each rank, over all rounds.
    pub fn sent_bytes(&self) -> BTreeMap<usize, usize> {
        let mut sent = BTreeMap::new();
        for message in self.rounds.iter().flat_map(|round| &round.sends) {
            *sent.entry(message.address.peer).or_default() += self.message_bytes(message);
        }
        sent
    }

    /// Bytes received, over all rounds.
    pub fn received_bytes(&self) -> usize {
        let messages = self.rounds.iter().flat_map(|round| &round.receives);
        messages.map(|message| self.message_bytes(message)).sum()
    }

    /// Bytes of all buffers, by what they are for. The kernel's workspace comes on top.
    pub fn memory(&self) -> BTreeMap<Component, usize> {
        let mut memory = BTreeMap::new();
        for buffer in &self.buffers {
            *memory.entry(buffer.component).or_default() += buffer.bytes();
        }
        memory
    }

    /// Every job, in the order of execution.
    pub fn jobs(&self) -> impl Iterator<Item = &Job> {
        self.rounds
            .iter()
            .flat_map(|round| round.before.iter().chain(&round.meanwhile))
            .filter_map(Task::job)
    }

    /// (query, key) pairs computed.
    pub fn pairs(&self) -> u128 {
        self.jobs().map(Job::pairs).sum()
    }
}
