//! Resizing a ring: programs that move tensors from the shards of one [`Sharding`] to those of
//! another, of any size and cut, with as few bytes as possible.
//!
//! The decision here: a resize is an ordinary program. Ranks, transports, byte accounting and the
//! simulator execute it without code of their own. A row moves only if its new owner runs at
//! another place; the new ranks are assigned to places so that the fewest rows move
//! ([`Resize::new`]), or in their own order ([`Resize::in_place`]).

use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::assignment::assign;
use super::program::{BufferId, BufferPlan, Component, Message, Port, RankPlan, Role, Round, Task};
use crate::dtype::DType;
use crate::error::Result;
use crate::job::{Block, Operand};
use crate::pattern::Pattern;
use crate::rows::Shards;
use crate::sharding::{Run, Sharding};
use crate::transport::Address;

/// A tensor that is resharded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ResizeTensor {
    /// Batch entries.
    pub batch: usize,
    /// Elements of a row: heads x dim.
    pub width: usize,
    /// The storage type.
    pub dtype: DType,
}

impl ResizeTensor {
    fn elements(&self, rows: usize) -> usize {
        self.batch * rows * self.width
    }
}

/// Tokens that an old and a new rank have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct TokenMove {
    /// The rank of the old ring that owns them.
    pub from: usize,
    /// The rank of the new ring that will own them.
    pub to: usize,
    /// The tokens.
    pub tokens: Run,
    /// The row of the first token in the old shard, and the step from one to the next.
    pub from_row: (usize, usize),
    /// The same in the new shard.
    pub to_row: (usize, usize),
}

/// The moves that turn the shards of one sharding into those of another. A place is what a rank
/// runs on: a thread, a process, a device. Old rank a runs at place a.
#[derive(Debug, Clone)]
pub struct Resize {
    from: Sharding,
    to: Sharding,
    old: Shards,
    new: Shards,
    places: Vec<usize>,
    moves: Vec<TokenMove>,
}

impl Resize {
    /// The resize that moves the fewest bytes: new ranks are assigned to places so that as many
    /// rows as possible stay. If the ring grows, the new places follow the old ones.
    pub fn new(from: &Sharding, to: &Sharding, tokens: usize) -> Result<Resize> {
        let mut resize = Resize::in_place(from, to, tokens)?;
        let mut shared: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        for of in &resize.moves {
            *shared.entry((of.to, of.from)).or_default() += of.tokens.count;
        }
        let kept = |rank, place| shared.get(&(rank, place)).copied().unwrap_or(0);
        resize.places = assign(to.ranks(), resize.place_count(), kept);
        Ok(resize)
    }

    /// The resize in which new rank b runs at place b: for shards that were cut for the device at
    /// each place.
    pub fn in_place(from: &Sharding, to: &Sharding, tokens: usize) -> Result<Resize> {
        from.check(tokens)?;
        to.check(tokens)?;
        let shards = |sharding| Shards::new(sharding, tokens, &Pattern::dense());
        let (old, new) = (shards(from), shards(to));
        let pairs = (0..from.ranks()).flat_map(|a| (0..to.ranks()).map(move |b| (a, b)));
        let moves = pairs
            .flat_map(|(a, b)| common_tokens(&old, a, &new, b))
            .collect();
        Ok(Resize {
            from: from.clone(),
            to: to.clone(),
            old,
            new,
            places: (0..to.ranks()).collect(),
            moves,
        })
    }

    /// The sharding before.
    pub fn from(&self) -> &Sharding {
        &self.from
    }

    /// The sharding afterwards.
    pub fn to(&self) -> &Sharding {
        &self.to
    }

    /// Tokens of the sequence.
    pub fn tokens(&self) -> usize {
        self.old.tokens()
    }

    /// The place of each new rank.
    pub fn places(&self) -> &[usize] {
        &self.places
    }

    /// The number of places in use before or after the resize.
    pub fn place_count(&self) -> usize {
        self.from.ranks().max(self.to.ranks())
    }

    /// The new rank at a place, if there is one.
    pub fn new_rank(&self, place: usize) -> Option<usize> {
        self.places.iter().position(|of| *of == place)
    }

    /// The old and the new owner of every token; each token is listed once.
    pub fn moves(&self) -> &[TokenMove] {
        &self.moves
    }

    /// Tokens that move to another place.
    pub fn moved_tokens(&self) -> usize {
        let moved = self.moves.iter().filter(|of| self.is_sent(of));
        moved.map(|of| of.tokens.count).sum()
    }

    /// Bytes that are sent to reshard `tensors`.
    pub fn sent_bytes(&self, tensors: &[ResizeTensor]) -> usize {
        let row = |of: &ResizeTensor| of.elements(1) * of.dtype.bytes();
        self.moved_tokens() * tensors.iter().map(row).sum::<usize>()
    }

    fn is_sent(&self, of: &TokenMove) -> bool {
        of.from != self.places[of.to]
    }

    /// The program of one place: packs the rows that leave, sends them, copies the rows that stay
    /// while the messages are in flight, and unpacks the rows that arrive. Ports are in the order
    /// of `tensors`.
    pub fn program(&self, place: usize, tensors: &[ResizeTensor]) -> RankPlan {
        let mut program = ResizeProgram {
            resize: self,
            place,
            plan: RankPlan {
                rank: place,
                rows: 0,
                buffers: Vec::new(),
                inputs: Vec::new(),
                rounds: vec![Round::default(), Round::default()],
                outputs: Vec::new(),
            },
        };
        for (tag, tensor) in tensors.iter().enumerate() {
            program.tensor(tag as u64, tensor);
        }
        program.plan
    }
}

/// The tokens that old rank `a` and new rank `b` both own: one entry for each two runs that
/// overlap.
fn common_tokens(old: &Shards, a: usize, new: &Shards, b: usize) -> Vec<TokenMove> {
    let row = |(run, base): (Run, usize), common: &Run| {
        let first = base + (common.first - run.first) / run.stride;
        (first, common.stride / run.stride)
    };
    let mut found = Vec::new();
    for &before in old.runs(a) {
        for &after in new.runs(b) {
            found.extend(before.0.intersect(&after.0).map(|tokens| TokenMove {
                from: a,
                to: b,
                tokens,
                from_row: row(before, &tokens),
                to_row: row(after, &tokens),
            }));
        }
    }
    found
}

/// The program of one place under construction.
struct ResizeProgram<'a> {
    resize: &'a Resize,
    place: usize,
    plan: RankPlan,
}

impl ResizeProgram<'_> {
    fn buffer(&mut self, name: &'static str, tensor: &ResizeTensor, rows: usize) -> BufferId {
        self.plan.buffers.push(BufferPlan {
            name,
            component: Component::Rows,
            shard: self.place,
            dtype: tensor.dtype,
            elements: tensor.elements(rows),
        });
        BufferId(self.plan.buffers.len() - 1)
    }

    /// Adds the buffers, messages and copies of one tensor; its messages have a tag of their own.
    fn tensor(&mut self, tag: u64, tensor: &ResizeTensor) {
        let Resize { from, old, new, .. } = self.resize;
        let place = self.place;
        let (a, b) = (place, self.resize.new_rank(place));
        let (mut old_buffer, mut new_buffer) = (None, None);
        if a < from.ranks() {
            let id = self.buffer("old rows", tensor, old.rows(a));
            self.plan.inputs.push(port(id, old.runs(a)));
            old_buffer = Some(id);
        }
        if let Some(b) = b {
            self.plan.rows = new.rows(b);
            let id = self.buffer("new rows", tensor, new.rows(b));
            self.plan.outputs.push(port(id, new.runs(b)));
            new_buffer = Some(id);
        }
        let resize = self.resize;
        let (mut out, mut incoming) = (BTreeMap::new(), BTreeMap::new());
        let (mut kept, mut old_rows, mut new_rows) = (Vec::new(), 0, 0);
        for of in &resize.moves {
            let (from, to) = (of.from, resize.places[of.to]);
            if from == place {
                old_rows = old.rows(of.from);
            }
            if to == place {
                new_rows = new.rows(of.to);
            }
            match (from == place, to == place) {
                (true, true) => kept.push(*of),
                (true, false) => push(&mut out, to, *of),
                (false, true) => push(&mut incoming, from, *of),
                (false, false) => {}
            }
        }
        let shard = |rows: usize| CopyEnd::Shard { rows };
        for (peer, moves) in &out {
            let rows = count(moves);
            let parcel = self.buffer("leaving rows", tensor, rows);
            let blocks = blocks(tensor, moves, shard(old_rows), CopyEnd::Parcel);
            let from = old_buffer.expect("a sender has old rows");
            self.plan.rounds[0].before.push(copy(blocks, from, parcel));
            let message = message(*peer, tag, tensor.elements(rows), parcel);
            self.plan.rounds[0].sends.push(message);
        }
        for (peer, moves) in &incoming {
            let rows = count(moves);
            let parcel = self.buffer("arriving rows", tensor, rows);
            let message = message(*peer, tag, tensor.elements(rows), parcel);
            self.plan.rounds[0].receives.push(message);
            let blocks = blocks(tensor, moves, CopyEnd::Parcel, shard(new_rows));
            let to = new_buffer.expect("a receiver has new rows");
            self.plan.rounds[1].before.push(copy(blocks, parcel, to));
        }
        if let (Some(from), Some(to), false) = (old_buffer, new_buffer, kept.is_empty()) {
            let blocks = blocks(tensor, &kept, shard(old_rows), shard(new_rows));
            self.plan.rounds[0].meanwhile.push(copy(blocks, from, to));
        }
    }
}

fn push(to: &mut BTreeMap<usize, Vec<TokenMove>>, peer: usize, of: TokenMove) {
    to.entry(peer).or_default().push(of);
}

fn count(moves: &[TokenMove]) -> usize {
    moves.iter().map(|of| of.tokens.count).sum()
}

fn port(buffer: BufferId, runs: &[(Run, usize)]) -> Port {
    Port {
        role: Role::Rows,
        buffer,
        runs: runs.iter().map(|(run, _)| *run).collect(),
    }
}

fn message(peer: usize, tag: u64, elements: usize, buffer: BufferId) -> Message {
    let address = Address {
        peer,
        tag,
        elements,
    };
    Message {
        address,
        buffer,
        origin: None,
    }
}

fn copy(blocks: Vec<Block>, from: BufferId, to: BufferId) -> Task {
    Task::Copy {
        blocks,
        add: false,
        from,
        to,
    }
}

/// One end of a copy: a shard of `rows` rows, or a parcel.
#[derive(Debug, Clone, Copy)]
enum CopyEnd {
    Shard { rows: usize },
    Parcel,
}

/// The copies of some moves. A parcel holds one move after the other, each with one batch entry
/// after the other, in the order of [`Resize::moves`] at both ends.
fn blocks(tensor: &ResizeTensor, moves: &[TokenMove], from: CopyEnd, to: CopyEnd) -> Vec<Block> {
    let mut packed = 0;
    let block = |of: &TokenMove| {
        let rows = of.tokens.count;
        let at = |end: CopyEnd, (first, step): (usize, usize)| match end {
            CopyEnd::Shard { rows } => Operand {
                offset: first * tensor.width,
                batch: rows * tensor.width,
                segment: 0,
                row: step * tensor.width,
                heads: Arc::new([0]),
            },
            CopyEnd::Parcel => Operand {
                offset: packed,
                batch: rows * tensor.width,
                segment: 0,
                row: tensor.width,
                heads: Arc::new([0]),
            },
        };
        let block = Block {
            batch: tensor.batch,
            segments: 1,
            rows,
            heads: 1,
            width: tensor.width,
            from: at(from, of.from_row),
            to: at(to, of.to_row),
        };
        packed += tensor.elements(rows);
        block
    };
    moves.iter().map(block).collect()
}
