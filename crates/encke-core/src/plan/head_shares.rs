//! Heads × sequence: ranks of a group divide the heads, and groups divide the tokens.
//!
//! Inside a group, which is a node or a part of one, ranks first exchange heads (an all-to-all):
//! afterwards each holds all tokens of the group, for its share of the heads. A ring over groups
//! then computes every share as if it were the whole call, and the results return to the ranks that
//! own their tokens. A link between nodes carries what it does in a ring of two levels, in rounds
//! as many times longer as a group has ranks; the price is the exchange, which nothing hides, and
//! the memory of a second copy of the inputs and results.
//!
//! The decision here: a share is a plan of its own, over groups instead of ranks and with the lanes
//! of its heads only, so that offsets by head stay those of the whole call. A rank's program is the
//! share's program between two exchanges. Shares are whole key heads, with the query heads that
//! read them, as even as their number allows.

use std::ops::Range;
use std::sync::Arc;

use super::program::{
    BufferId, BufferPlan, Component, Fill, Message, Port, RankPlan, Role, Round, Task,
};
use super::request::Request;
use super::schedule::Schedule;
use super::topology::Plan;
use super::width::Width;
use crate::dtype::DType;
use crate::error::Result;
use crate::job::{Block, Operand};
use crate::pattern::{Lane, LaneHead};
use crate::shape::Shape;
use crate::sharding::{Cut, Run, Sharding, TokenRanges};
use crate::transport::Address;

/// One rank's share of the heads, in every group.
#[derive(Debug, Clone)]
pub(super) struct HeadShare {
    /// The share as a call of its own: its ranks are groups.
    pub plan: Plan,
    heads: Range<usize>,
    kv_heads: Range<usize>,
    slots: Vec<usize>,
}

impl HeadShare {
    /// Its heads in rows of the whole call.
    fn heads(&self, width: Width) -> Vec<usize> {
        match width {
            Width::Key | Width::Value => self.kv_heads.clone().collect(),
            Width::Query => self.heads.clone().collect(),
            Width::Cell | Width::WideCell => self.slots.clone(),
            Width::Delta => unreachable!("ranks that divide heads are given no deltas"),
        }
    }
}

/// The shares of a request, one for each rank of a group; none where heads are not divided.
pub(super) fn shares(request: &Request, lanes: &[Lane]) -> Result<Vec<HeadShare>> {
    let (group, ranks) = (request.schedule.heads, request.sharding.ranks());
    if group <= 1 {
        return Ok(Vec::new());
    }
    let tokens = request.shape.tokens;
    let ranges = (0..ranks / group).map(|index| {
        let members = index * group..(index + 1) * group;
        let runs = members.flat_map(|rank| request.sharding.runs(tokens, rank));
        runs.map(|run| run.first..run.end()).collect()
    });
    let ranges = Cut::Ranges(TokenRanges::new(ranges.collect()));
    let sharding = Sharding::new(ranks / group, ranges)?;
    let share = |index: usize| share(request, lanes, &sharding, index);
    Ok((0..group).map(share).collect())
}

fn share(request: &Request, lanes: &[Lane], sharding: &Sharding, index: usize) -> HeadShare {
    let (shape, group) = (request.shape, request.schedule.heads);
    let kv_heads = shape.kv_heads * index / group..shape.kv_heads * (index + 1) / group;
    let readers = shape.heads / shape.kv_heads;
    let heads = kv_heads.start * readers..kv_heads.end * readers;
    let of_slots = request.pattern.slots(shape.heads).into_iter().enumerate();
    let of_slots = of_slots.filter(|(_, head)| heads.contains(head));
    let slots: Vec<usize> = of_slots.map(|(slot, _)| slot).collect();
    let lane = |lane: &Lane| {
        let of_lane = lane.heads.iter().filter(|of| heads.contains(&of.head));
        let of_lane = of_lane.map(|of| LaneHead {
            head: of.head - heads.start,
            kv_head: of.kv_head - kv_heads.start,
            slot: slots.partition_point(|slot| *slot < of.slot),
            delta_slot: of.delta_slot,
        });
        let kept = lane.kv_heads.iter().filter(|head| kv_heads.contains(head));
        Lane {
            heads: of_lane.collect(),
            kv_heads: kept.map(|head| head - kv_heads.start).collect(),
            ..lane.clone()
        }
    };
    let lanes = lanes.iter().map(lane).filter(|lane| !lane.heads.is_empty());
    let slopes = request.slopes.as_ref();
    let request = Request {
        shape: Shape {
            heads: heads.len(),
            kv_heads: kv_heads.len(),
            ..shape
        },
        sharding: sharding.clone(),
        slopes: slopes.map(|slopes| slopes[heads.clone()].into()),
        schedule: Schedule::RING.with_backward(request.schedule.backward),
        ..request.clone()
    };
    HeadShare {
        plan: Plan::with_lanes(request, lanes.collect(), slots.len(), Vec::new()),
        heads,
        kv_heads,
        slots,
    }
}

/// The program of one rank: exchange, the program of its share, exchange.
pub(super) fn program(plan: &Plan, rank: usize) -> Result<RankPlan> {
    let group = plan.request.schedule.heads;
    let (number, index) = (rank / group, rank % group);
    let share = plan.shares[index].plan.rank(number)?;
    let sparse = share.sparse_outputs();
    let RankPlan {
        mut buffers,
        inputs,
        rounds,
        outputs,
        ..
    } = share;
    for buffer in &mut buffers {
        buffer.shard = rank;
    }
    // All ranks of a group send results back in the same round, after the longest program.
    let settled = plan.shares.iter().map(|of| of.plan.settled_round());
    let last = settled.max().unwrap_or(0) + 2;
    assert!(
        rounds.len() < last,
        "a share ends before its results return"
    );
    let mut all = vec![Round::default()];
    all.extend(rounds.into_iter().map(|mut round| {
        for message in round.sends.iter_mut().chain(&mut round.receives) {
            message.address.peer = message.address.peer * group + index;
        }
        round
    }));
    all.resize_with(last + 2, Round::default);
    let mut exchange = HeadExchange {
        plan,
        index,
        members: number * group..(number + 1) * group,
        free: Vec::new(),
        program: RankPlan {
            rank,
            rows: plan.shards.rows(rank),
            buffers,
            inputs: Vec::new(),
            rounds: all,
            outputs: Vec::new(),
        },
    };
    for (tag, (role, name, dtype, width)) in plan.inputs().into_iter().enumerate() {
        let port = inputs.iter().find(|port| port.role == role);
        let port = port.expect("a share has the inputs of the call");
        exchange.scatter(tag, role, (name, dtype, width), port);
    }
    let zeros = sparse.into_iter().map(|buffer| Task::Fill {
        buffer,
        value: Fill::Zero,
    });
    exchange.program.rounds[1].before.splice(0..0, zeros);
    for (tag, port) in outputs.iter().enumerate() {
        exchange.gather(last, tag, port);
    }
    Ok(exchange.program)
}

/// The exchanges of one rank with the other members of its group.
struct HeadExchange<'a> {
    plan: &'a Plan,
    /// This rank's place in the group.
    index: usize,
    /// The ranks of the group.
    members: Range<usize>,
    /// Buffers of the first exchange, which the second one uses again.
    free: Vec<BufferId>,
    program: RankPlan,
}

/// Rows `[batch, rows, heads, …]` in a buffer: how many rows, and elements of a row.
#[derive(Clone, Copy)]
struct Extent {
    rows: usize,
    row: usize,
}

impl HeadExchange<'_> {
    /// Sends this rank's rows of an input to the members, each with the member's heads, and gets
    /// theirs with its own heads.
    fn scatter(
        &mut self,
        tag: usize,
        role: Role,
        (name, dtype, width): (&'static str, DType, Width),
        port: &Port,
    ) {
        let rank = self.program.rank;
        let component = self.program.buffers[port.buffer.0].component;
        let own_runs = self.runs(width, rank);
        let own_rows = count(&own_runs);
        let full = self.plan.resident_width(width);
        let own = self.buffer(name, component, dtype, own_rows * full);
        self.program.inputs.push(Port {
            role,
            buffer: own,
            runs: own_runs,
        });
        let group_rows = count(&port.runs);
        let (share, each) = (self.share_row(self.index, width), self.head(width));
        let own_extent = Extent {
            rows: own_rows,
            row: full,
        };
        let mut arrived = Vec::new();
        for (place, member) in self.members.clone().enumerate() {
            let heads = self.plan.shares[place].heads(width);
            let theirs = Extent {
                rows: own_rows,
                row: heads.len() * each,
            };
            let of_heads = heads.iter().map(|head| head * each).collect();
            let packed = (0..heads.len()).map(|head| head * each).collect();
            let block = self.heads_block((own_extent, of_heads), (theirs, packed), each);
            let runs = self.runs(width, member);
            let rows = count(&runs);
            let staged = match member == rank {
                // This rank's own rows go through a buffer as well; it is sent to no rank.
                true => None,
                false => Some(self.staging(dtype, rows * share)),
            };
            let packed = self.staging(dtype, own_rows * theirs.row);
            self.task(0, vec![block], own, packed, true);
            if let Some(staged) = staged {
                let out = own_rows * theirs.row;
                self.exchange(0, tag, member, (packed, out), (staged, rows * share));
            }
            self.free.extend(staged.into_iter().chain([packed]));
            arrived.push((runs, rows, staged.unwrap_or(packed)));
        }
        for (runs, rows, from) in arrived {
            let blocks = self.row_blocks(&port.runs, group_rows, &runs, rows, share);
            let copy = Task::Copy {
                blocks,
                add: false,
                from,
                to: port.buffer,
            };
            // Before everything that the share's first round does.
            self.program.rounds[1].before.insert(0, copy);
        }
    }

    /// Sends the rows of a result to the members that own them, and gets this rank's rows with the
    /// members' heads.
    fn gather(&mut self, round: usize, tag: usize, port: &Port) {
        let rank = self.program.rank;
        let BufferPlan {
            name,
            component,
            dtype,
            ..
        } = self.program.buffers[port.buffer.0];
        let width = match port.role {
            Role::Out => Width::WideCell,
            Role::Lse => Width::Cell,
            Role::Dq => Width::Query,
            Role::Dk => Width::Key,
            _ => Width::Value,
        };
        let own_runs = self.runs(width, rank);
        let own_rows = count(&own_runs);
        let full = self.plan.resident_width(width);
        let own = self.buffer(name, component, dtype, own_rows * full);
        self.program.outputs.push(Port {
            role: port.role,
            buffer: own,
            runs: own_runs,
        });
        let group_rows = count(&port.runs);
        let (share, each) = (self.share_row(self.index, width), self.head(width));
        let own_extent = Extent {
            rows: own_rows,
            row: full,
        };
        for (place, member) in self.members.clone().enumerate() {
            let runs = self.runs(width, member);
            let rows = count(&runs);
            let packed = self.used_again(dtype, rows * share);
            let blocks = self.row_blocks(&port.runs, group_rows, &runs, rows, share);
            let blocks = super::layout::reversed(blocks);
            self.task(round, blocks, port.buffer, packed, true);
            let heads = self.plan.shares[place].heads(width);
            let theirs = Extent {
                rows: own_rows,
                row: heads.len() * each,
            };
            let staged = match member == rank {
                true => packed,
                false => {
                    let elements = own_rows * theirs.row;
                    let staged = self.used_again(dtype, elements);
                    let sent = (packed, rows * share);
                    self.exchange(round, tag, member, sent, (staged, elements));
                    staged
                }
            };
            let of_heads = heads.iter().map(|head| head * each).collect();
            let packed = (0..heads.len()).map(|head| head * each).collect();
            let block = self.heads_block((theirs, packed), (own_extent, of_heads), each);
            self.task(round + 1, vec![block], staged, own, false);
        }
    }

    fn batch(&self) -> usize {
        self.plan.request.shape.batch
    }

    /// Elements of one head of a row.
    fn head(&self, width: Width) -> usize {
        width.of_head(&self.plan.request.shape)
    }

    /// Elements of a row of one share.
    fn share_row(&self, place: usize, width: Width) -> usize {
        self.plan.shares[place].heads(width).len() * self.head(width)
    }

    /// The rows of a rank: tokens of keys, or indices of queries.
    fn runs(&self, width: Width, rank: usize) -> Vec<Run> {
        let request = &self.plan.request;
        match width.is_of_keys() {
            true => request.sharding.runs(request.shape.tokens, rank),
            false => request.query_runs(rank),
        }
    }

    /// Plans a buffer for so many elements of each batch entry.
    fn buffer(
        &mut self,
        name: &'static str,
        component: Component,
        dtype: DType,
        elements: usize,
    ) -> BufferId {
        let elements = self.batch() * elements;
        self.program.buffers.push(BufferPlan {
            name,
            component,
            shard: self.program.rank,
            dtype,
            elements,
        });
        BufferId(self.program.buffers.len() - 1)
    }

    fn staging(&mut self, dtype: DType, elements: usize) -> BufferId {
        self.buffer("exchanged heads", Component::Sharing, dtype, elements)
    }

    /// The smallest buffer of the first exchange that is large enough, or another one.
    fn used_again(&mut self, dtype: DType, elements: usize) -> BufferId {
        let buffers = &self.program.buffers;
        let fits = |id: &BufferId| {
            let of = &buffers[id.0];
            of.dtype == dtype && of.elements >= self.batch() * elements
        };
        let free = self.free.iter().enumerate().filter(|(_, id)| fits(id));
        let least = free.min_by_key(|(_, id)| buffers[id.0].elements);
        match least.map(|(at, _)| at) {
            Some(at) => self.free.swap_remove(at),
            None => self.staging(dtype, elements),
        }
    }

    fn task(
        &mut self,
        round: usize,
        blocks: Vec<Block>,
        from: BufferId,
        to: BufferId,
        whole: bool,
    ) {
        let task = match whole {
            true => Task::Pack { blocks, from, to },
            false => Task::Copy {
                blocks,
                add: false,
                from,
                to,
            },
        };
        self.program.rounds[round].before.push(task);
    }

    /// Sends one buffer to a member and receives another from it; sizes are of a batch entry.
    fn exchange(
        &mut self,
        round: usize,
        tag: usize,
        peer: usize,
        sent: (BufferId, usize),
        received: (BufferId, usize),
    ) {
        let batch = self.batch();
        let message = |(buffer, elements): (BufferId, usize)| Message {
            address: Address {
                peer,
                tag: tag as u64,
                elements: batch * elements,
            },
            buffer,
            origin: None,
        };
        let round = &mut self.program.rounds[round];
        round.sends.extend((sent.1 > 0).then(|| message(sent)));
        let received = (received.1 > 0).then(|| message(received));
        round.receives.extend(received);
    }

    /// A copy of whole rows, head by head.
    fn heads_block(
        &self,
        (from, from_heads): (Extent, Arc<[usize]>),
        (to, to_heads): (Extent, Arc<[usize]>),
        width: usize,
    ) -> Block {
        let at = |of: Extent, heads: Arc<[usize]>| Operand {
            offset: 0,
            batch: of.rows * of.row,
            segment: 0,
            row: of.row,
            heads,
        };
        Block {
            batch: self.batch(),
            segments: 1,
            rows: from.rows,
            heads: from_heads.len(),
            width,
            from: at(from, from_heads),
            to: at(to, to_heads),
        }
    }

    /// The copies of a member's `rows` rows, those of `runs`, to their places among the rows of the
    /// group, those of `all`.
    fn row_blocks(
        &self,
        all: &[Run],
        all_rows: usize,
        runs: &[Run],
        rows: usize,
        row: usize,
    ) -> Vec<Block> {
        let at = |rows: usize, first: usize| Operand {
            offset: first * row,
            batch: rows * row,
            segment: 0,
            row,
            heads: Arc::new([0]),
        };
        let mut before = 0;
        let mut blocks = Vec::new();
        for run in runs {
            let mut base = 0;
            for of in all {
                if of.first <= run.first && run.end() <= of.end() {
                    base += run.first - of.first;
                    break;
                }
                base += of.count;
            }
            blocks.push(Block {
                batch: self.batch(),
                segments: 1,
                rows: run.count,
                heads: 1,
                width: row,
                from: at(rows, before),
                to: at(all_rows, base),
            });
            before += run.count;
        }
        blocks
    }
}

fn count(runs: &[Run]) -> usize {
    runs.iter().map(|run| run.count).sum()
}
