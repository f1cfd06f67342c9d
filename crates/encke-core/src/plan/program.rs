//! A rank's plan as a program: buffers to allocate, and rounds of tasks and messages.
//!
//! The decision that shaped everything above it: the plan is complete. A rank interprets it and
//! decides nothing. So coverage, traffic and memory are proven on the program without running it, a
//! simulator can time it, and a profiler can compare it with what happened.

use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

pub use super::component::Component;
use crate::dtype::DType;
use crate::job::{Block, Job};
use crate::sharding::Run;
use crate::transport::{Address, Moved};

/// Index of one of a rank's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct BufferId(pub usize);

/// A planned buffer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BufferPlan {
    /// Its name, as traces and reports show it.
    pub name: &'static str,
    /// What it is for.
    pub component: Component,
    /// The shard it belongs to: that of the rank that holds it, except for replicas and adopted
    /// shards.
    pub shard: usize,
    /// The element type.
    pub dtype: DType,
    /// Its size in elements.
    pub elements: usize,
}

impl BufferPlan {
    /// Its size in bytes.
    pub fn bytes(&self) -> usize {
        self.elements * self.dtype.bytes()
    }

    /// Whether it holds rows of its own shard for the whole program, rather than rows that change
    /// from round to round.
    pub fn is_resident(&self) -> bool {
        self.component.is_resident()
    }
}

/// The three buffers of a carry (running softmax).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct CarryIds {
    /// Weighted sums of values.
    pub acc: BufferId,
    /// Row maxima.
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
    /// −inf, the maximum of no scores.
    MinusInfinity,
}

/// One operation of a kernel.
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
    /// Copy rows into a parcel, which holds nothing else afterwards.
    Pack {
        /// Which rows.
        blocks: Vec<Block>,
        /// Source.
        from: BufferId,
        /// Destination.
        to: BufferId,
    },
    /// Attention that updates a carry.
    Forward {
        /// Which rows.
        job: Job,
        /// Queries.
        q: BufferId,
        /// Keys.
        k: BufferId,
        /// Values.
        v: BufferId,
        /// Whether this is the first job of its cells: the carry is written without being read.
        starts: bool,
        /// The carry that is updated.
        carry: CarryIds,
    },
    /// The last attention of its cells: reads the carry and writes out and lse.
    Conclude {
        /// Which rows.
        job: Job,
        /// Queries.
        q: BufferId,
        /// Keys.
        k: BufferId,
        /// Values.
        v: BufferId,
        /// The carry of the earlier jobs.
        carry: CarryIds,
        /// The output.
        out: BufferId,
        /// The lse.
        lse: BufferId,
    },
    /// The only attention of its cells: writes out and lse without a carry.
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
    /// Compute out and lse from a carry.
    Finish {
        /// How many cells.
        cells: usize,
        /// Head dimension.
        dim: usize,
        /// Factor of the output.
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
        /// The gradient of the lse, if there is one.
        dlse: Option<BufferId>,
        /// The result.
        delta: BufferId,
    },
    /// Attention backward: adds to dq, dk and dv.
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
    /// The buffers it needs exclusively: those it writes, and the carries it finishes or merges.
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

    /// Renumbers the buffers it refers to.
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

    /// One task with `job` in place of this task and `next`; None if they differ in more than their
    /// jobs.
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

    /// Its job, if it is an attention task.
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

/// Rows of a tensor of the call, identified by token: the same selection in each of some segments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TokenRows {
    /// How many segments.
    pub segments: usize,
    /// Tokens from one segment's first row to the next one's.
    pub segment_step: usize,
    /// The rows of the first segment: one run for each of the interleaved parcels.
    pub rows: Vec<Run>,
    /// The heads of each row.
    pub heads: Arc<[usize]>,
}

impl TokenRows {
    /// The rows of all segments, segment after segment.
    pub fn runs(&self) -> impl Iterator<Item = Run> {
        (0..self.segments).flat_map(move |segment| {
            self.rows.iter().map(move |run| Run {
                first: run.first + segment * self.segment_step,
                ..*run
            })
        })
    }

    /// The number of rows over all segments.
    pub fn count(&self) -> usize {
        self.segments * self.rows.iter().map(|run| run.count).sum::<usize>()
    }
}

/// The contents of a message in terms of the call's tensors, for executors that get the rows from
/// elsewhere (out-of-core runs). Its size does not depend on the number of tokens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Origin {
    /// The tensor.
    pub role: Role,
    /// Its rows in the order of the message; each entry holds batch entry after batch entry.
    pub rows: Arc<[TokenRows]>,
}

/// One end of a message to or from another rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Message {
    /// The other end.
    pub address: Address,
    /// What is read (sent) or overwritten (received).
    pub buffer: BufferId,
    /// Its contents: rows of an input, or partial sums of rows of a gradient. None for carries and
    /// for finished rows that are all-gathered.
    pub origin: Option<Origin>,
}

/// Tasks, then messages that are in flight while further tasks compute.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Round {
    /// Tasks that run first.
    pub before: Vec<Task>,
    /// Messages sent next.
    pub sends: Vec<Message>,
    /// Messages received at the same time.
    pub receives: Vec<Message>,
    /// Tasks that run while the messages are in flight. They are independent of each other.
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
    /// The deltas of branches.
    Delta,
    Dq,
    Dk,
    Dv,
    /// Any tensor whose rows are moved by a resize.
    Rows,
}

/// An input or output of a rank: rows of a tensor of the call in a buffer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Port {
    /// The tensor.
    pub role: Role,
    /// The buffer.
    pub buffer: BufferId,
    /// The tokens of its rows, in order.
    pub runs: Vec<Run>,
}

/// The program of one rank.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RankPlan {
    /// The rank.
    pub rank: usize,
    /// Tokens it owns, adopted ones included.
    pub rows: usize,
    /// The buffers it allocates.
    pub buffers: Vec<BufferPlan>,
    /// The inputs.
    pub inputs: Vec<Port>,
    /// The rounds, in order.
    pub rounds: Vec<Round>,
    /// The outputs.
    pub outputs: Vec<Port>,
}

impl RankPlan {
    /// The same program for a caller that passes this rank's shard instead of the whole sequence:
    /// ports refer to rows of the shard, in order, instead of tokens.
    pub fn on_shard(mut self) -> RankPlan {
        for port in self.inputs.iter_mut().chain(&mut self.outputs) {
            let count = port.runs.iter().map(|run| run.count).sum();
            let rows = Run::leading(count);
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

    /// Bytes of all buffers, by component. The kernel's workspace is not included.
    pub fn memory(&self) -> BTreeMap<Component, usize> {
        let mut memory = BTreeMap::new();
        for buffer in &self.buffers {
            *memory.entry(buffer.component).or_default() += buffer.bytes();
        }
        memory
    }

    /// Sets the seed of the dropout of every job that has dropout.
    pub fn set_seed(&mut self, seed: u64) {
        for round in &mut self.rounds {
            let tasks = round.before.iter_mut().chain(&mut round.meanwhile);
            for job in tasks.filter_map(Task::job_mut) {
                if let Some(of) = &mut job.dropout {
                    of.dropout = of.dropout.with_seed(seed);
                }
            }
        }
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
